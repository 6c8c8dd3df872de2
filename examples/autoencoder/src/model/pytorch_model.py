"""The autoencoder in plain PyTorch: it knows nothing of devices, ranks or Lightning."""

from torch import nn

from src.model.pytorch_decoder import Decoder
from src.model.pytorch_encoder import Encoder


class Autoencoder(nn.Module):
    def __init__(self, hidden: tuple[int, int] = (128, 64), code: int = 16):
        super().__init__()
        self.encoder = Encoder(hidden, code)
        self.decoder = Decoder(hidden, code)

    def forward(self, images):
        return self.decoder(self.encoder(images))
