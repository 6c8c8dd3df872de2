"""Environment, signals and log of every process of a launch."""
