"""Questions about a network that is measured, and other code in the place of its attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from tome_core.attention.functions import _TOKENS as TRIED
from tome_core.models.transformer import TIMES, family_of, find_attentions
from tome_core.models.unet_blocks import BlockPlace, find_blocks

UNET, TRANSFORMER = KINDS = ("unet", "transformer")  # the kinds of a network


def finest_blocks(unet: nn.Module) -> list[BlockPlace]:
    """Return the places of transformer blocks of the level of the most tokens, among the levels that have attention."""
    places = find_blocks(unet)
    finest = min(place.halvings for place in places)
    return [place for place in places if place.halvings == finest]


def before_each_call(network: nn.Module, act: Callable[[float], None]) -> RemovableHandle:
    """Call `act` with the timestep, 0 to 1000, of the first sample before each call, until the handle is removed."""
    family = family_of(network)

    def read(network: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if family is None:
            timestep = args[1] if len(args) > 1 else kwargs["timestep"]
        else:  # a transformer gets it by name
            timestep = family.timestep(next(kwargs[name] for name in TIMES if name in kwargs))
        act(float(torch.as_tensor(timestep).reshape(-1)[0]))

    return network.register_forward_pre_hook(read, with_kwargs=True)


class InPlaceOfAttention:
    """A context manager that calls `attend` in the place of torch's attention function,
    ``F.scaled_dot_product_attention``, which is `original`, while chosen modules run: a UNet's finest self-attentions,
    or all attentions of a transformer over one sequence, as Flux.
    """

    original: Callable[..., torch.Tensor]

    def __init__(self, network: nn.Module) -> None:
        self.network, self.is_unet, self._inside = network, family_of(network) is None, False
        self.blocks = [place.block for place in finest_blocks(network)] if self.is_unet else []
        self.attentions = [block.attn1 for block in self.blocks] or [
            module for _, module in find_attentions(network, family_of(network))]  # fmt: skip

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        """Return attention, ``[B, H, N, d]``; each subclass has its own. more: torch's other arguments, by name."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        def enter(inside: bool) -> Callable[..., None]:
            return lambda *call: setattr(self, "_inside", inside)

        self._hooks = [module.register_forward_pre_hook(enter(True)) for module in self.attentions]
        self._hooks += [module.register_forward_hook(enter(False)) for module in self.attentions]
        self.original = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self._answer
        return self

    def __exit__(self, *error: object) -> None:
        F.scaled_dot_product_attention = self.original
        for hook in self._hooks:
            hook.remove()

    def _answer(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call `attend` in the chosen attentions, else `original`: q, k and v by position, other arguments by name."""
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        q, k, v = (named.pop(name) for name in ("query", "key", "value"))
        return (self.attend if self._inside else self.original)(q, k, v, **named)


class Work(InPlaceOfAttention):
    """A context manager that counts the work, batch x queries x keys, of the attentions that `InPlaceOfAttention`
    chooses; enter it before the network is patched. ``full``: the work without merging, ``left``: the work that was
    done, both since the last `share`."""

    full = left = 0

    def share(self) -> float:
        """Return ``left`` as a share of ``full`` since the last call of this method, and reset both to 0."""
        share = self.left / self.full
        self.full = self.left = 0
        return share

    def __enter__(self) -> Work:
        super().__enter__()
        self._hooks += [module.register_forward_pre_hook(self._add_full, with_kwargs=True)
                        for module in self.blocks or self.attentions]  # fmt: skip
        return self

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        """Attend as torch does; add batch x queries x keys to ``left``, save for the engine's trial of 64 tokens."""
        if (q.shape[0], q.shape[2], k.shape[2]) != (1, TRIED, TRIED):  # the engine's own trial
            self.left += q.shape[0] * q.shape[2] * k.shape[2]
        return self.original(q, k, v, **more)

    def _add_full(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Add to ``full`` a call's work without merging: samples times squared tokens, with a transformer's text."""
        more = () if self.is_unet else (*args[1:], kwargs.get("hidden_states"), kwargs.get("encoder_hidden_states"))
        sequences = [tensor for tensor in (*args[:1], *more) if torch.is_tensor(tensor)]
        self.full += len(sequences[0]) * sum(tensor.shape[1] for tensor in sequences) ** 2


class Zeros(InPlaceOfAttention):
    """A context manager in which the attentions that `InPlaceOfAttention` chooses give zeros."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        """Return zeros of q's shape."""
        return torch.zeros_like(q)


class Downsampled(InPlaceOfAttention):
    """A context manager of token down-sampling (ToDo, arXiv 2402.13573) of square pictures, in `InPlaceOfAttention`'s
    attentions: all tokens are queries; keys and values are the top left token of each `cell` x `cell`, and all text.
    """

    def __init__(self, network: nn.Module, cell: int) -> None:
        super().__init__(network)
        self.cell, self._picture = cell, 0

    def __enter__(self) -> Downsampled:
        super().__enter__()
        self._hooks.append(self.network.register_forward_pre_hook(self._note, with_kwargs=True))
        return self

    def _note(self, network: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note before a call the number of a transformer's picture tokens; 0 for a UNet, whose tokens all are."""
        self._picture = 0 if self.is_unet else kwargs["hidden_states"].shape[1]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        """Attend to top left tokens and all text; raise ValueError if the picture is no square that cells divide."""
        places, picture = torch.arange(k.shape[2], device=k.device), self._picture or k.shape[2]
        side = _side(picture, self.cell)
        cells = places[-picture:].view(side, side)[:: self.cell, :: self.cell].flatten()
        kept = torch.cat([places[:-picture], cells])
        return self.original(q, k[:, :, kept], v[:, :, kept], **more)


class Tiles(InPlaceOfAttention):
    """A context manager of HyperTile's idea for a UNet's square pictures: queries see the keys of their tile alone.

    The published one draws the number of tiles at random; here it is `tiles` a side.
    """

    def __init__(self, unet: nn.Module, tiles: int) -> None:
        super().__init__(unet)
        self.tiles = tiles

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        """Attend in each tile; raise ValueError if the picture is no square that tiles divide."""
        batch, tiles, inner = len(q), self.tiles, _side(q.shape[2], self.tiles) // self.tiles

        def split(x: torch.Tensor) -> torch.Tensor:
            cut = x.unflatten(2, (tiles, inner, tiles, inner)).permute(0, 2, 4, 1, 3, 5, 6)
            return cut.flatten(4, 5).flatten(0, 2)

        out = self.original(*map(split, (q, k, v)), **more)
        return out.unflatten(2, (inner, inner)).unflatten(0, (batch, tiles, tiles)).permute(
            0, 3, 1, 4, 2, 5, 6).flatten(2, 5)  # fmt: skip


def _side(tokens: int, cell: int) -> int:
    """Return the side of a square grid of tokens; raise ValueError if it is none that cells of this side divide."""
    side = math.isqrt(tokens)
    if side * side != tokens or side % cell:
        raise ValueError(f"{tokens} tokens are no square grid that cells of {cell}x{cell} divide; this is measured on "
                         "square pictures only")
    return side
