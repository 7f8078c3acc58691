"""A UNet of blocks in tiny widths, whose arithmetic takes no time."""

from __future__ import annotations

import torch

from benchmarks.sd_block import SpatialTransformer, UNet

# At this size an unmerged block takes the time that it takes at 4x4 tokens: 490 us against 500, measured. At 16x16 it
# takes 1,230: arithmetic, of which merging would save a part.
SIDE, BATCH, CHANNELS, _HEADS = 8, 2, 16, 2
_CONTEXT_TOKENS, _CONTEXT_CHANNELS = 8, 16


def make_unet(blocks: int) -> UNet:
    """Transformers of a block each, with fixed random weights; leaves the global generator alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stages = [[SpatialTransformer(CHANNELS, _HEADS, _CONTEXT_CHANNELS)] for _ in range(blocks)]
        return UNet(stages).eval().requires_grad_(False)


def make_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Picture, the same for both prompts of guidance, timesteps and prompts for a UNet of `make_unet`."""
    generator = torch.Generator().manual_seed(1)
    picture = torch.randn(1, CHANNELS, SIDE, SIDE, generator=generator).expand(BATCH, -1, -1, -1)
    prompt = torch.randn(BATCH, _CONTEXT_TOKENS, _CONTEXT_CHANNELS, generator=generator)
    return picture, torch.full((BATCH,), 500.0), prompt
