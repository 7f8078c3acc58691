"""What others do to a diffusers pipeline to save time or to draw better, as its users switch it on, and off again.

Each takes a pipeline and gives a context manager inside which it is on. Nothing here knows of merging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from diffusers.hooks import HookRegistry, PyramidAttentionBroadcastConfig, apply_pyramid_attention_broadcast
from torch import nn

from benchmarks import reference
from benchmarks.networks import at_each_call, finest_blocks

PutOn = Callable[[Any], AbstractContextManager]


@contextmanager
def deep_cache(pipe: Any) -> Iterator[None]:
    """Every second step is computed deeply."""
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=2, cache_branch_id=0)
    helper.enable()
    try:
        yield
    finally:
        helper.disable()


@contextmanager
def broadcast(pipe: Any) -> Iterator[None]:
    """PyramidAttentionBroadcast: every second self-attention, every fourth attention to the prompt.

    A UNet has no `enable_cache`, but the function behind it takes one.
    """
    latest = [0.0]
    apply_pyramid_attention_broadcast(pipe.unet, PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, cross_attention_block_skip_range=4,
        current_timestep_callback=lambda: latest[-1],
    ))  # fmt: skip
    try:
        with at_each_call(pipe.unet, latest.append):
            yield
    finally:
        for module in pipe.unet.modules():
            registry = getattr(module, "_diffusers_hook", None)
            if isinstance(registry, HookRegistry):
                registry.remove_hook("pyramid_attention_broadcast", recurse=False)
                if not registry.hooks:
                    del module._diffusers_hook


@contextmanager
def free_u(pipe: Any) -> Iterator[None]:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)  # its authors' for Stable Diffusion 1.4
    try:
        yield
    finally:
        pipe.disable_freeu()
        for module in pipe.unet.modules():  # it leaves None where there was nothing
            for name in ("s1", "s2", "b1", "b2"):
                if name in vars(module):
                    delattr(module, name)


class _InTiles:
    """HyperTile's idea as a processor: attention within 2x2 tiles of a square grid, by the processor that was there."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, attention: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return reference.join(self._inner(attention, reference.in_tiles(hidden_states, 2), *args, **kwargs), 2)


class _OnCoarserKeys:
    """Token down-sampling (ToDo, arXiv 2402.13573) as a processor: every second key a side, picked, not averaged."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, attention: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        batch, tokens, channels = hidden_states.shape
        side = reference.square_side(tokens, 2)
        picture = hidden_states.transpose(1, 2).reshape(batch, channels, side, side)
        keys = F.interpolate(picture, scale_factor=0.5, mode="nearest").flatten(2).transpose(1, 2)
        return self._inner(attention, hidden_states, keys)


def _processors(make: Callable[[Any], Any]) -> PutOn:
    """Other processors in the self-attentions of the finest level."""

    @contextmanager
    def put_on(pipe: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for place in finest_blocks(pipe.unet):
                attention = place.block.attn1
                stack.enter_context(mock.patch.object(attention, "processor", make(attention.processor)))
            yield

    return put_on


hyper_tile, down_sampling = _processors(_InTiles), _processors(_OnCoarserKeys)
