"""Checkpoints: atomic folders with hashes, saved beside training. Only ``host`` and ``content`` import torch."""
