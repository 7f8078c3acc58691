"""What others put on a UNet, each as a context manager that takes it off again. Nothing here knows of merging.

A session ends each without an error; a model that something stays on, because a law was broken, serves no other one.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import UNet2DConditionModel
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from diffusers.hooks.hooks import HookRegistry
from diffusers.models import attention_processor
from torch import nn

from benchmarks.stack_beside import BESIDE, PAB_HOOK
from tests.foreign_wrappers import Foreign, sites_of, unwrap
from tome_core.models.unet_blocks import find_blocks, find_unet

On = Callable[[nn.Module, random.Random], AbstractContextManager]


class Layer(NamedTuple):
    """on: what puts it on; fits: which UNets; weight: how often."""

    on: On
    fits: Callable[[nn.Module], bool] = lambda unet: True
    weight: int = 2


def _is_diffusers(unet: nn.Module) -> bool:
    return isinstance(unet, UNet2DConditionModel)


def _beside(name: str) -> On:
    """One of those that are measured beside merging."""
    return lambda unet, dice: BESIDE[name].put_on(SimpleNamespace(unet=unet))


def _between(on: str, off: str) -> On:
    """A method of the UNet begins it, another ends it."""

    @contextmanager
    def layer(unet: nn.Module, dice: random.Random) -> Iterator[None]:
        getattr(unet, on)()
        yield
        getattr(unet, off)()

    return layer


def _broadcast(unet: nn.Module, dice: random.Random) -> AbstractContextManager:
    """Pyramid attention broadcast; diffusers refuses it where it is on already."""
    registries = (getattr(module, "_diffusers_hook", None) for module in unet.modules())
    if any(one is not None and one.get_hook(PAB_HOOK) is not None for one in registries):
        return contextlib.nullcontext()
    return _beside("PyramidAttentionBroadcast")(unet, dice)


@contextmanager
def _free_u(unet: nn.Module, dice: random.Random) -> Iterator[None]:
    unet.enable_freeu(0.9, 0.2, 1.2, 1.4)
    yield
    unet.disable_freeu()
    for module in unet.modules():
        for name in ("s1", "s2", "b1", "b2"):
            vars(module).pop(name, None)


class OddProcessor:
    """Nobody's: attention by plain products."""

    def __call__(self, attention, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None, **more):
        other = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (attention.head_to_batch_dim(one) for one in (
            attention.to_q(hidden_states), attention.to_k(other), attention.to_v(other)))  # fmt: skip
        scores = attention.get_attention_scores(q, k, attention_mask)
        return attention.to_out[0](attention.batch_to_head_dim(torch.bmm(scores, v)))


class Fussy(OddProcessor):
    """Refuses numbers of tokens that it did not expect, in its own way."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, attention, hidden_states, *args, **more):
        side = round(hidden_states.shape[1] ** 0.5)
        if side * side != hidden_states.shape[1]:
            raise KeyError(f"{hidden_states.shape[1]} tokens are no square")
        return super().__call__(attention, hidden_states, *args, **more)


PROCESSORS = (
    attention_processor.AttnProcessor, attention_processor.AttnProcessor2_0,
    lambda: attention_processor.SlicedAttnProcessor(1), attention_processor.PAGIdentitySelfAttnProcessor2_0,
    attention_processor.PAGCFGIdentitySelfAttnProcessor2_0, OddProcessor, Fussy,
)  # fmt: skip


@contextmanager
def _processors(unet: nn.Module, dice: random.Random) -> Iterator[None]:
    """Others in some self-attentions."""
    kind = dice.choice(PROCESSORS)
    every = [place.block.attn1 for place in find_blocks(unet)]
    found = [(one, one.processor) for one in dice.sample(every, dice.randint(1, len(every)))]
    for one, _ in found:
        one.processor = kind()
    yield
    for one, before in found:
        one.processor = before


def _drop_hooks(unet: nn.Module, *names: str) -> None:
    for module in unet.modules():
        registry = getattr(module, "_diffusers_hook", None)
        if isinstance(registry, HookRegistry):
            for name in names:
                registry.remove_hook(name, recurse=False)
            if not registry.hooks:
                del module._diffusers_hook


def _cast(unet: nn.Module, dice: random.Random) -> AbstractContextManager:
    """Which stays: diffusers has no way back."""
    apply_layerwise_casting(unet, torch.bfloat16, next(unet.parameters()).dtype)
    return contextlib.nullcontext()


@contextmanager
def _offloaded(unet: nn.Module, dice: random.Random) -> Iterator[None]:
    cpu = torch.device("cpu")
    apply_group_offloading(unet, cpu, cpu, offload_type="leaf_level")
    yield
    _drop_hooks(unet, "group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")


@contextmanager
def _foreign(unet: nn.Module, dice: random.Random) -> Iterator[None]:
    """Replacements of `forward` that are put back as accelerate and ControlNet do."""
    every = sites_of(unet)
    wraps = [Foreign(*site) for site in dice.sample(every, dice.randint(1, len(every)))]
    yield
    unwrap(wraps)


@contextmanager
def _listened(unet: nn.Module, dice: random.Random) -> Iterator[None]:
    """torch's own hooks on some modules."""
    hooks = []
    for module in dice.sample(list(unet.modules()), 4):
        hooks.append(module.register_forward_hook(lambda module, args, out: None))
        hooks.append(module.register_forward_pre_hook(lambda module, args: None))
    yield
    for one in hooks:
        one.remove()


@contextmanager
def _accelerated(unet: nn.Module, dice: random.Random) -> Iterator[None]:
    add_hook_to_module(unet, ModelHook())
    yield
    remove_hook_from_module(unet)


@contextmanager
def _heavier(unet: nn.Module, dice: random.Random) -> Iterator[None]:
    """Other weights, as a LoRA that is fused and unfused."""
    attention = dice.choice(find_blocks(unet)).block.attn1
    weight = next(attention.to_q.parameters())
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.25)
    yield
    with torch.no_grad():
        weight.copy_(before)


@contextmanager
def _of_class(unet: nn.Module, dice: random.Random) -> Iterator[None]:
    """A host that replaces the attentions' method on their class."""
    kind = type(dice.choice(find_blocks(unet)).block.attn1)
    before = kind.forward

    @functools.wraps(before)
    def theirs(self, *args, **kwargs):
        return before(self, *args, **kwargs) * 1.0

    kind.forward = theirs
    try:
        yield
    finally:
        kind.forward = before


LAYERS = {
    "FreeU": Layer(_free_u, _is_diffusers),
    "HyperTile": Layer(_beside("HyperTile"), _is_diffusers),
    "down-sampling": Layer(_beside("down-sampling"), _is_diffusers),
    "PyramidAttentionBroadcast": Layer(_broadcast, _is_diffusers),
    "DeepCache": Layer(_beside("DeepCache"), lambda unet: _is_diffusers(unet) and BESIDE["DeepCache"].is_there),
    "processors": Layer(_processors, _is_diffusers, 6),
    "fused projections": Layer(_between("fuse_qkv_projections", "unfuse_qkv_projections"), _is_diffusers),
    "layerwise casting": Layer(_cast, _is_diffusers, 1),
    "group offloading": Layer(_offloaded, _is_diffusers, 1),
    "adapters off": Layer(_between("disable_adapters", "enable_adapters"),
                          lambda unet: bool(getattr(unet, "peft_config", None)), 6),
    "foreign wraps": Layer(_foreign, weight=4),
    "torch's hooks": Layer(_listened),
    "accelerate": Layer(_accelerated),
    "heavier weights": Layer(_heavier),
    "another method of the class": Layer(_of_class),
}


def fitting(model: nn.Module) -> dict[str, int]:
    """Name -> weight of what this model can take."""
    unet = find_unet(model)
    return {name: one.weight for name, one in LAYERS.items() if one.fits(unet)}


def put_on(name: str, model: nn.Module, seed: int) -> Any:
    """An entered context manager."""
    context = LAYERS[name].on(find_unet(model), random.Random(seed))
    context.__enter__()
    return context
