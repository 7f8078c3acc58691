"""Where in the picture a convolution is: told to it, because a small model learns it from the borders but slowly."""

from __future__ import annotations

import math

import torch
from torch import nn

WAVES = (0.5, 1, 2)  # across a whole picture
FEATURES = 4 * len(WAVES)  # a sine and a cosine of each, down and across
Window = tuple[float, float, float, float]
WHOLE: Window = (0.0, 0.0, 1.0, 1.0)


class PlacedConv(nn.Conv2d):
    """A convolution that adds a linear map of the place to what it gives. Its weights begin at zero.

    window: top, left, height and width of what is seen, as shares of the picture's sides; all of it by default.
    """

    def __init__(self, like: nn.Conv2d):
        super().__init__(like.in_channels, like.out_channels, like.kernel_size, like.stride, like.padding)
        self.load_state_dict(like.state_dict())
        self.place = nn.Conv2d(FEATURES, like.out_channels, 1, bias=False)
        nn.init.zeros_(self.place.weight)
        self.window = WHOLE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in, h, w] to [n, out, h, w]."""
        seen = super().forward(x)
        return seen + self.place(features(*seen.shape[2:], self.window).to(seen))


def features(height: int, width: int, window: Window = WHOLE) -> torch.Tensor:
    """[1, FEATURES, height, width]: waves over the picture, at the middles of a window's cells."""
    top, left, tall, wide = window
    waves = 2 * math.pi * torch.tensor(WAVES)[:, None]
    down = waves * (top + tall * (torch.arange(height) + 0.5) / height)
    across = waves * (left + wide * (torch.arange(width) + 0.5) / width)
    shape = (-1, height, width)
    both = [(down.sin(), down.cos()), (across.sin(), across.cos())]
    return torch.cat([*(one[:, :, None].expand(shape) for one in both[0]),
                      *(one[:, None, :].expand(shape) for one in both[1])])[None]
