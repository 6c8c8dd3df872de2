"""Images of handwritten digits through a narrow code and back."""

from lockstep.recipes.autoencoder.task import SPLITS, AutoencoderConfig, AutoencoderTask, draw, load_digits, scale

__all__ = ["SPLITS", "AutoencoderConfig", "AutoencoderTask", "draw", "load_digits", "scale"]
