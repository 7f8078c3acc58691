"""What others do to a network to save time or to draw better, each as its users switch it on in diffusers.

Each is put on a pipeline and taken off again by what it brings itself. Nothing here knows of merging.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import reference
from benchmarks.networks import TRANSFORMER, UNET, at_each_call, finest_blocks, first_block_cache

PLAIN_PIPELINE = "StableDiffusionPipeline"
FIRST_BLOCK = 0.2  # threshold of FirstBlockCache
PAB_HOOK = "pyramid_attention_broadcast"


class Beside(NamedTuple):
    """What somebody else does, and how it is switched on.

    put_on: pipeline -> context manager inside which it is on. pipeline: diffusers' class that it needs.
    made_with, call: what it adds to making the pipeline and to calling it. package: what has to be installed. kind: of
    network, as of `networks.KINDS`.
    """

    name: str
    meaning: str
    put_on: Callable[[Any], AbstractContextManager] = nullcontext
    pipeline: str = PLAIN_PIPELINE
    made_with: Mapping[str, Any] = MappingProxyType({})
    call: Mapping[str, Any] = MappingProxyType({})
    package: str | None = None
    kind: str = UNET

    @property
    def is_there(self) -> bool:
        """Is its package installed?"""
        return self.package is None or importlib.util.find_spec(self.package) is not None


@contextmanager
def _deep_cache(pipe: Any) -> Iterator[None]:
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=2, cache_branch_id=0)
    helper.enable()
    try:
        yield
    finally:
        helper.disable()


@contextmanager
def _broadcast(pipe: Any) -> Iterator[None]:
    """A UNet has no `enable_cache`, but the function behind it takes one."""
    from diffusers.hooks import HookRegistry, PyramidAttentionBroadcastConfig, apply_pyramid_attention_broadcast

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
                registry.remove_hook(PAB_HOOK, recurse=False)
                if not registry.hooks:
                    del module._diffusers_hook


@contextmanager
def _free_u(pipe: Any) -> Iterator[None]:
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
    """HyperTile's idea as a processor: attention within tiles of a square grid, by the processor that was there."""

    def __init__(self, inner: Any, tiles: int) -> None:
        self._inner, self._tiles = inner, tiles

    def __call__(self, attention: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        cut = reference.in_tiles(hidden_states, self._tiles)
        return reference.join(self._inner(attention, cut, *args, **kwargs), self._tiles)


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


def _processors(make: Callable[[Any], Any]) -> Callable[[Any], AbstractContextManager]:
    """Other processors in the self-attentions of the finest level."""

    @contextmanager
    def put_on(pipe: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for place in finest_blocks(pipe.unet):
                attention = place.block.attn1
                stack.enter_context(mock.patch.object(attention, "processor", make(attention.processor)))
            yield

    return put_on


BESIDE = {one.name: one for one in (
    Beside("DeepCache", "DeepCache 0.1.1, every second step computed deeply", _deep_cache, package="DeepCache"),
    Beside("PyramidAttentionBroadcast", "diffusers' hooks on a UNet: every second self-attention, every fourth "
           "attention to the prompt, between timesteps 100 and 800", _broadcast),
    Beside("HyperTile", "attention in 2x2 tiles at the finest level, as a processor",
           _processors(lambda inner: _InTiles(inner, 2))),
    Beside("down-sampling", "token down-sampling (ToDo) 2x2 at the finest level, as a processor",
           _processors(_OnCoarserKeys)),
    Beside("FreeU", "diffusers' enable_freeu with its authors' values", _free_u),
    Beside("PAG", "perturbed attention guidance in the middle block, diffusers' pipeline",
           pipeline="StableDiffusionPAGPipeline", call={"pag_scale": 1.0}),
    Beside("PAG at the finest", "the same in the finest level's last stage", pipeline="StableDiffusionPAGPipeline",
           made_with={"pag_applied_layers": ["up_blocks.2"]}, call={"pag_scale": 1.0}),
    Beside("SAG", "self-attention guidance, diffusers' pipeline", pipeline="StableDiffusionSAGPipeline",
           call={"sag_scale": 0.75}),
    Beside("FirstBlockCache", f"diffusers' hook on a Wan transformer, threshold {FIRST_BLOCK}: it computes the first "
           "block, and the others where that changed more",
           lambda pipe: first_block_cache(pipe.transformer, FIRST_BLOCK), "WanPipeline", kind=TRANSFORMER),
)}  # fmt: skip
# what a table names because it cannot be in it
LEFT_OUT = {
    "FirstBlockCache on UNets": "diffusers' function looks for a list of transformer blocks at the top of the model, "
                                "which a UNet has not, and fails with an IndexError; a UNet has no enable_cache either",
    "token down-sampling in ComfyUI": "its core has no such node",
}  # fmt: skip
