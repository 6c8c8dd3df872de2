"""What runs did, as pages and pictures, and how two of them differ. Reads run folders and nothing else."""
