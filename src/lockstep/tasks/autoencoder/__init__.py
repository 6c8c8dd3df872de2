"""Images of handwritten digits through a narrow code and back."""

from lockstep.tasks.autoencoder.digits import load_digits
from lockstep.tasks.autoencoder.metrics import draw
from lockstep.tasks.autoencoder.task import AutoencoderConfig, AutoencoderTask

__all__ = ["AutoencoderConfig", "AutoencoderTask", "draw", "load_digits"]
