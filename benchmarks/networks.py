"""What the benchmarks ask of a network that they measure, and how they reach its attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from tome_core.attention.functions import _TOKENS as TRIED
from tome_core.models.transformer import TIMES, family_of, find_attentions
from tome_core.models.unet_blocks import BlockPlace, find_blocks

UNET, TRANSFORMER = KINDS = ("unet", "transformer")


def kind_of(network: nn.Module) -> str:
    """One of `KINDS`."""
    return UNET if family_of(network) is None else TRANSFORMER


def finest_blocks(unet: nn.Module) -> list[BlockPlace]:
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


def at_each_call(network: nn.Module, tell: Callable[[float], None]) -> RemovableHandle:
    """A context manager: inside it `tell` is told the timestep of each call, before anything else happens."""
    def look(network: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tell(timestep_of(network, args, kwargs))

    return network.register_forward_pre_hook(look, with_kwargs=True)


class InPlaceOfAttention:
    """A context manager: inside it `attend` stands in the place of torch's attention function, which is `own`.

    In a UNet's finest self-attentions, or in all attentions, by number, of a transformer over one sequence, as Flux.
    """

    own: Callable[..., torch.Tensor]

    def __init__(self, network: nn.Module) -> None:
        self.network, self.is_unet, self.number = network, kind_of(network) == UNET, None
        self.blocks = [place.block for place in finest_blocks(network)] if self.is_unet else []
        self.attentions = [block.attn1 for block in self.blocks] or [
            one for _, one in find_attentions(network, family_of(network))]  # fmt: skip

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        """As torch's attention function is called."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        def enter(number: int | None) -> Callable[..., None]:
            return lambda *call: setattr(self, "number", number)

        self._hooks = [one.register_forward_pre_hook(enter(place)) for place, one in enumerate(self.attentions)]
        self._hooks += [one.register_forward_hook(enter(None)) for one in self.attentions]
        self.own = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self._answer
        return self

    def __exit__(self, *error: object) -> None:
        F.scaled_dot_product_attention = self.own
        for hook in self._hooks:
            hook.remove()

    def _answer(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        q, k, v = (named.pop(name) for name in ("query", "key", "value"))
        return (self.own if self.number is None else self.attend)(q, k, v, **named)


class Work(InPlaceOfAttention):
    """Counts queries times keys where every method has to pass. Enter it before what is put on the network.

    full: of all tokens that reached the attentions; left: of those that were attended.
    """

    full = left = 0

    def share(self) -> float:
        """Work left, as a share of the whole, since the last call of this method."""
        share = self.left / self.full
        self.full = self.left = 0
        return share

    def __enter__(self) -> Work:
        super().__enter__()
        self._hooks += [one.register_forward_pre_hook(self._add_full, with_kwargs=True)
                        for one in self.blocks or self.attentions]  # fmt: skip
        return self

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        """Count, and do as torch does."""
        if (q.shape[0], q.shape[2], k.shape[2]) != (1, TRIED, TRIED):  # which the engine tries once
            self.left += q.shape[0] * q.shape[2] * k.shape[2]
        return self.own(q, k, v, **more)

    def _add_full(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        more = () if self.is_unet else (*args[1:], kwargs.get("hidden_states"), kwargs.get("encoder_hidden_states"))
        sequences = [one for one in (*args[:1], *more) if torch.is_tensor(one)]
        self.full += len(sequences[0]) * sum(one.shape[1] for one in sequences) ** 2
