"""Images of handwritten digits through a narrow code and back."""

from lockstep.tasks.autoencoder.digits import SPLITS, load_digits, scale
from lockstep.tasks.autoencoder.task import AutoencoderConfig, AutoencoderTask, draw

__all__ = ["SPLITS", "AutoencoderConfig", "AutoencoderTask", "draw", "load_digits", "scale"]
