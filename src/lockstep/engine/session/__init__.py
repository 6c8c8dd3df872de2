"""Training in a loop of the user's: the engine's source, reduction, update, checkpoints and run log behind calls."""
