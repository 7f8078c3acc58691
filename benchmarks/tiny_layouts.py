"""UNets of SD1.5's and SDXL's layouts in tiny widths, whose arithmetic takes no time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from benchmarks.sd_block import Downsample, SpatialTransformer, UNet, Upsample

# At this size an unmerged block takes the time that it takes at 4x4 tokens: 490 us against 500, measured. At 16x16 it
# takes 1,230: arithmetic, of which merging would save a part.
SIDE, BATCH, CHANNELS, _HEADS = 8, 2, 16, 2
_CONTEXT_TOKENS, _CONTEXT_CHANNELS = 8, 16

# stage -> what is in it: how many blocks a transformer has, or what changes the picture's size
_Stages = tuple[tuple[int | str, ...], ...]


class UNetLayout(NamedTuple):
    """Where a UNet has transformers of how many blocks, and where it changes the picture's size."""

    down: _Stages
    middle: tuple[int | str, ...]
    up: _Stages


LAYOUTS = {
    "SD1.5": UNetLayout(
        down=((), (1,), (1,), ("down",), (1,), (1,), ("down",), (1,), (1,), ("down",), (), ()),
        middle=(1,),
        up=((), (), ("up",), (1,), (1,), (1, "up"), (1,), (1,), (1, "up"), (1,), (1,), (1,)),
    ),
    "SDXL": UNetLayout(
        down=((), (), (), ("down",), (2,), (2,), ("down",), (10,), (10,)),
        middle=(10,),
        up=((10,), (10,), (10, "up"), (2,), (2,), (2, "up"), (), (), ()),
    ),
}


def make_unet(layout: UNetLayout) -> UNet:
    """The UNet of a layout in tiny widths, with fixed random weights; leaves the global generator alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = [_stage(stage) for stage in layout.down], _stage(layout.middle), [_stage(stage) for stage in layout.up]
        return UNet(*parts).eval().requires_grad_(False)


def _stage(contents: tuple[int | str, ...]) -> list[nn.Module]:
    resamplers = {"down": Downsample, "up": Upsample}
    return [
        resamplers[one]() if isinstance(one, str) else SpatialTransformer(CHANNELS, _HEADS, _CONTEXT_CHANNELS, one)
        for one in contents
    ]


def make_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Picture, the same for both prompts of guidance, timesteps and prompts for a UNet of `make_unet`."""
    generator = torch.Generator().manual_seed(1)
    picture = torch.randn(1, CHANNELS, SIDE, SIDE, generator=generator).expand(BATCH, -1, -1, -1)
    prompt = torch.randn(BATCH, _CONTEXT_TOKENS, _CONTEXT_CHANNELS, generator=generator)
    return picture, torch.full((BATCH,), 500.0), prompt
