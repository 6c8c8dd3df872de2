"""Pages and pictures of runs, and their comparison. Reads run folders only."""
