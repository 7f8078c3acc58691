"""What the benchmarks ask of a network that they measure: is it a UNet or a transformer, and when is it called?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FirstBlockCacheConfig
from torch import nn
from torch.utils.hooks import RemovableHandle

from tome_core.models.transformer import TIMES, family_of
from tome_core.models.unet_blocks import Place, find_blocks

UNET, TRANSFORMER = KINDS = ("unet", "transformer")


def kind_of(network: nn.Module) -> str:
    """One of `KINDS`."""
    return UNET if family_of(network) is None else TRANSFORMER


def finest_blocks(unet: nn.Module) -> list[Place]:
    """The transformer blocks of the finest level that has attention."""
    places = find_blocks(unet)
    finest = min(place.halvings for place in places)
    return [place for place in places if place.halvings == finest]


def timestep_of(network: nn.Module, args: tuple, kwargs: dict[str, Any]) -> float:
    """Of Stable Diffusion's schedule, from the arguments of a call; a transformer's have to be named."""
    family = family_of(network)
    if family is None:
        given = args[1] if len(args) > 1 else kwargs["timestep"]
    else:
        given = family.timestep(next(kwargs[name] for name in TIMES if name in kwargs))
    return float(torch.as_tensor(given).reshape(-1)[0])


def take_apart(args: tuple, kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Queries, keys and values ``[B, H, S, d]`` of a call of torch's attention function, and what else came along."""
    rest = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)) | kwargs
    return list(args[:3]) + [rest.pop(name) for name in ("query", "key", "value")[len(args) :]], rest


class InPlaceOfAttention:
    """A context manager: inside it `attend` stands in the place of torch's attention function, which is `own`.

    The engine leaves attentions alone in a torch function mode, which would see the same calls.
    """

    own: Callable[..., torch.Tensor]

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As torch's attention function is called."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        self.own = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self.attend
        return self

    def __exit__(self, *error: object) -> None:
        F.scaled_dot_product_attention = self.own


def at_each_call(network: nn.Module, tell: Callable[[float], None]) -> RemovableHandle:
    """A context manager: inside it `tell` is told the timestep of each call, before anything else happens."""
    def look(network: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tell(timestep_of(network, args, kwargs))

    return network.register_forward_pre_hook(look, with_kwargs=True)


@contextmanager
def answer_by(forwards: dict[nn.Module, Callable]) -> Iterator[None]:
    """Inside it these modules answer by these functions, not by their own ``forward``."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward


@contextmanager
def first_block_cache(transformer: nn.Module, threshold: float) -> Iterator[None]:
    """diffusers' own step skipper: where the first block answers nearly as before, so do all others."""
    transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    try:
        yield
    finally:
        transformer.disable_cache()
