"""One training in six loops, and how they are paced so that neighbours in time can be compared. See ``peers.py``."""
