"""Sweeps: runs of one task with different settings and seeds, on the devices of this machine."""
