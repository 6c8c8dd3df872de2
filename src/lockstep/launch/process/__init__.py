"""What every process of a launch has: its environment, signals and log."""
