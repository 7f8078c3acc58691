"""Where in the picture a convolution is: told to it, because a small model learns it from the borders but slowly."""

from __future__ import annotations

import math

import torch
from torch import nn

WAVES = 3  # the longest twice as long as a picture, each half as long as the one before
FEATURES = 4 * WAVES  # a sine and a cosine of each, down and across
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
        return seen + self.place(features(*seen.shape[2:], self.window, seen.device).to(seen.dtype))


def window_of(sizes: torch.Tensor | None) -> Window:
    """Of the first row of sizes [n, 6], as `SceneModel.forward` takes them; the whole picture without any."""
    if sizes is None:
        return WHOLE
    height, width, top, left, tall, wide = sizes[0].tolist()
    return top / height, left / width, tall / height, wide / width


def features(
    height: int, width: int, window: Window = WHOLE, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[1, FEATURES, height, width]: waves over the picture, at the middles of a window's cells.

    All of it is made on the device: a copy to it would wait there, and cannot be captured in a CUDA graph.
    """
    top, left, tall, wide = window
    waves = math.pi * 2.0 ** torch.arange(WAVES, device=device)[:, None, None]
    down, across = ((torch.arange(count, device=device) + 0.5) / count for count in (height, width))
    phases = ((waves * (top + tall * down[:, None])).expand(-1, -1, width),
              (waves * (left + wide * across)).expand(-1, height, -1))
    return torch.cat([wave for phase in phases for wave in (phase.sin(), phase.cos())])[None]
