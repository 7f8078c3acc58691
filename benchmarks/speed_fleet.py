"""The UNets that are compared: one for each variant, patched once, all on the same weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor
from torch import nn

from benchmarks.networks import finest_blocks
from benchmarks.speed_models import twin
from benchmarks.speed_variants import VARIANTS


class BlockClock:
    """Processor seconds inside the blocks of the finest level.

    On a CPU the rest of a UNet call, three quarters of it, varies by more than merging gains; the blocks alone tell.
    """

    def __init__(self, unet: nn.Module) -> None:
        self.seconds = self._since = 0.0
        for place in finest_blocks(unet):
            place.block.register_forward_pre_hook(self._start)
            place.block.register_forward_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self._since = time.process_time()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.process_time() - self._since


class Fleet:
    """A model and a patched twin of it for each variant.

    unpatched: the model itself. unets: by variant. clocks: variant -> `BlockClock`, where processor time is what is
    measured and the model is not compiled (hooks would break its graph).
    """

    def __init__(self, unet: nn.Module, names: Sequence[str], attention: str = "sdpa", compiled: bool = False) -> None:
        """unet: is left as it is. attention: ``sdpa`` or ``naive``."""
        self.unpatched = twin(unet)
        if attention == "naive":
            self.unpatched.set_attn_processor(AttnProcessor())  # writes all its scores to memory
        self.unets = {name: twin(self.unpatched) for name in names}
        for name, one in self.unets.items():
            VARIANTS[name].apply(one)
        on_cpu = next(unet.parameters()).device.type == "cpu"
        self.clocks = {} if compiled or not on_cpu else {name: BlockClock(one) for name, one in self.unets.items()}
        if compiled:
            self._compile()

    def _compile(self) -> None:
        # each variant at each size is a graph of its own for the same lines of code; the compiler gives up after eight
        torch._dynamo.config.recompile_limit = 256
        self.unpatched = torch.compile(self.unpatched, dynamic=False)
        self.unets = {name: torch.compile(one, dynamic=False) for name, one in self.unets.items()}
