"""The run folder: its files, heartbeat and summary."""
