"""Questions about a network that is measured, and the way to its attention."""

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
    """Name the kind of a network, one of `KINDS`."""
    return UNET if family_of(network) is None else TRANSFORMER


def finest_blocks(unet: nn.Module) -> list[BlockPlace]:
    """Find the transformer blocks of the finest level that has attention."""
    places = find_blocks(unet)
    finest = min(place.halvings for place in places)
    return [place for place in places if place.halvings == finest]


def timestep_of(network: nn.Module, args: tuple, kwargs: dict[str, Any]) -> float:
    """Read the timestep, from 0 to 1000, from the arguments of a network's call; a transformer gets it by name."""
    family = family_of(network)
    if family is None:
        timestep = args[1] if len(args) > 1 else kwargs["timestep"]
    else:
        timestep = family.timestep(next(kwargs[name] for name in TIMES if name in kwargs))
    return float(torch.as_tensor(timestep).reshape(-1)[0])


def at_each_call(network: nn.Module, act: Callable[[float], None]) -> RemovableHandle:
    """Call `act` with the timestep before each call of the network, until the returned context manager exits."""
    return network.register_forward_pre_hook(
        lambda network, args, kwargs: act(timestep_of(network, args, kwargs)), with_kwargs=True)  # fmt: skip


class InPlaceOfAttention:
    """A context manager that puts `attend` in the place of torch's attention function, which is `original`.

    It acts in a UNet's finest self-attentions, or in all attentions of a transformer over one sequence, as Flux.
    ``number`` is the index of the attention that is being called; it is None outside of them.
    """

    original: Callable[..., torch.Tensor]

    def __init__(self, network: nn.Module) -> None:
        self.network, self.is_unet, self.number = network, kind_of(network) == UNET, None
        self.blocks = [place.block for place in finest_blocks(network)] if self.is_unet else []
        self.attentions = [block.attn1 for block in self.blocks] or [
            module for _, module in find_attentions(network, family_of(network))]  # fmt: skip

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        """Compute attention of ``[B, H, N, d]``; each subclass has its own. more: torch's other arguments by name."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        def enter(number: int | None) -> Callable[..., None]:
            return lambda *call: setattr(self, "number", number)

        self._hooks = [module.register_forward_pre_hook(enter(place)) for place, module in enumerate(self.attentions)]
        self._hooks += [module.register_forward_hook(enter(None)) for module in self.attentions]
        self.original = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self._answer
        return self

    def __exit__(self, *error: object) -> None:
        F.scaled_dot_product_attention = self.original
        for hook in self._hooks:
            hook.remove()

    def _answer(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stand in for torch's function: call `attend` inside the chosen attentions, else `original`."""
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        q, k, v = (named.pop(name) for name in ("query", "key", "value"))
        return (self.original if self.number is None else self.attend)(q, k, v, **named)


class Work(InPlaceOfAttention):
    """A context manager that counts the attentions' work, queries times keys. Enter it before the network is patched.

    ``full`` is the work without merging, ``left`` the work that was done.
    """

    full = left = 0

    def share(self) -> float:
        """Return ``left`` as a share of ``full`` since the last call of this method, and reset both."""
        share = self.left / self.full
        self.full = self.left = 0
        return share

    def __enter__(self) -> Work:
        super().__enter__()
        self._hooks += [module.register_forward_pre_hook(self._add_full, with_kwargs=True)
                        for module in self.blocks or self.attentions]  # fmt: skip
        return self

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        """Count the work, and compute attention as torch does."""
        if (q.shape[0], q.shape[2], k.shape[2]) != (1, TRIED, TRIED):  # the engine's own trial
            self.left += q.shape[0] * q.shape[2] * k.shape[2]
        return self.original(q, k, v, **more)

    def _add_full(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Add the unmerged work of one attention, whose arguments these are, to ``full``."""
        more = () if self.is_unet else (*args[1:], kwargs.get("hidden_states"), kwargs.get("encoder_hidden_states"))
        sequences = [tensor for tensor in (*args[:1], *more) if torch.is_tensor(tensor)]
        self.full += len(sequences[0]) * sum(tensor.shape[1] for tensor in sequences) ** 2
