"""What a call of the engine gives its host to do, counted on a UNet in tiny widths, whose arithmetic takes no time."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import torch

import tome_core
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


def watch(run: Callable[[], Any]) -> list[str]:
    """The Python functions of the engine that are called meanwhile, in order, as ``file:name``.

    A generator counts each time it is resumed.
    """
    package = os.path.dirname(tome_core.__file__) + os.sep
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            file = code.co_filename[len(package) :].replace(os.sep, "/")
            called.append(f"{file}:{getattr(code, 'co_qualname', code.co_name)}")  # the former from Python 3.11 on

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return called


def beyond(called: list[str], other: list[str]) -> tuple[Counter, int]:
    """Calls of each function that one run makes and the other does not, and changes from file to file, likewise."""
    return Counter(called) - Counter(other), _changes(called) - _changes(other)


def _changes(called: list[str]) -> int:
    return sum(one.partition(":")[0] != other.partition(":")[0] for one, other in pairwise(called))
