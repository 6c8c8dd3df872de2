"""Image → code."""

from torch import nn


class Encoder(nn.Module):
    """Images (batch, 1, 8, 8) → codes (batch, code)."""

    def __init__(self, hidden: tuple[int, int], code: int):
        super().__init__()
        wide, narrow = hidden
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, wide),
            nn.ReLU(),
            nn.Linear(wide, narrow),
            nn.ReLU(),
            nn.Linear(narrow, code),
        )

    def forward(self, images):
        return self.layers(images)
