"""Data sets that read files."""
