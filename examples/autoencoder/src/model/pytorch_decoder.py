"""Code → image."""

from torch import nn


class Decoder(nn.Module):
    """Codes (batch, code) → images (batch, 1, 8, 8) with pixels from 0 to 1."""

    def __init__(self, hidden: tuple[int, int], code: int):
        super().__init__()
        wide, narrow = hidden
        self.layers = nn.Sequential(
            nn.Linear(code, narrow),
            nn.ReLU(),
            nn.Linear(narrow, wide),
            nn.ReLU(),
            nn.Linear(wide, 64),
            nn.Sigmoid(),
            nn.Unflatten(1, (1, 8, 8)),
        )

    def forward(self, codes):
        return self.layers(codes)
