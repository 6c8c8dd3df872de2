"""Checkpoints: atomic folders with hashes, saved beside training. Only ``writer`` and ``content`` import torch."""
