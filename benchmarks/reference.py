"""Plain code for what the engine has not: attention that gives zeros, stays inside tiles, or merges on a coarser grid,
or by lot. It measures quality, not speed. Grids are square.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.networks import InPlaceOfAttention, timestep_of
from tome_core import MergePlan

HALF_TIME = 500  # the timestep at which the schedules of tomesd and of down-sampling switch


class Reference(InPlaceOfAttention):
    """A context manager that changes a network's attentions among the picture's tokens.

    It acts behind projections, norm and positions; a transformer's text, which comes first, is kept. A draw depends on
    seed, timestep and attention only.

    Args:
        network: a UNet or a transformer.
        seed: of the draws.
        zero: attentions give zeros.
        tiles: attentions of a UNet stay inside so many tiles a side.
        coarse: token down-sampling (ToDo, arXiv 2402.13573): of each cell of so many tokens a side the first token
            alone is key and value.
        coarse_early: as `coarse`, at the timesteps from `HALF_TIME` on.
        ratio: this share of the tokens merges, with partners drawn by lot.
    """

    def __init__(
        self, network: nn.Module, seed: int, *, zero: bool = False, tiles: int = 0, coarse: int = 0,
        coarse_early: int = 0, ratio: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(network)
        self.seed, self.zero, self.tiles, self.ratio = seed, zero, tiles, ratio
        self.coarse, self.coarse_early = coarse, coarse_early or coarse
        self.timestep, self._picture = 0.0, 0

    def __enter__(self) -> Reference:
        super().__enter__()
        self._hooks.append(self.network.register_forward_pre_hook(self._note, with_kwargs=True))
        return self

    def _note(self, network: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the timestep of a call and the number of a transformer's picture tokens, 0 for a UNet."""
        self.timestep = timestep_of(network, args, kwargs)
        self._picture = 0 if self.is_unet else kwargs["hidden_states"].shape[1]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        """Compute attention of ``[B, H, N, d]`` in the way that the constructor's arguments choose."""
        if self.zero:
            return torch.zeros_like(q)
        if self.tiles:
            cut = (_by_head(in_tiles(_in_rows(part), self.tiles), q.shape[1]) for part in (q, k, v))
            return _by_head(join(_in_rows(self.original(*cut, **more)), self.tiles), q.shape[1])
        picture = self._picture or q.shape[2]
        if self.coarse:
            kept = _top_left(k, picture, self.coarse_early if self.timestep >= HALF_TIME else self.coarse)
            return self.original(q, k[:, :, kept], v[:, :, kept], **more)
        plan = self.plan(k[:, 0, -picture:], self.number)
        q, k, v = (_change(part, plan.merge, picture) for part in (q, k, v))
        more["attn_mask"] = F.pad(plan.logits_in(q.dtype), (k.shape[2] - plan.num_groups, 0))[:, None, None]
        return _change(self.original(q, k, v, **more), plan.unmerge, plan.num_groups)

    def plan(self, x: torch.Tensor, number: int) -> MergePlan:
        """Draw groups for the tokens ``[B, N, C]`` of attention `number`: each merged token joins one of the others."""
        dice, (batch, tokens, _) = torch.Generator(), x.shape
        dice.manual_seed((self.seed * 1_000 + round(self.timestep)) * 100 + number)
        groups = tokens - int(tokens * self.ratio)
        group = torch.cat([torch.arange(groups), torch.randint(groups, (tokens - groups,), generator=dice)])
        group = group[torch.randperm(tokens, generator=dice)]
        return MergePlan(group.to(x.device).repeat(batch, 1), groups)


def _top_left(x: torch.Tensor, last: int, cell: int) -> torch.Tensor:
    """List indices in ``[B, H, S, d]``: of the tokens before the `last` ones, and of the top left one of each cell."""
    places, side = torch.arange(x.shape[2], device=x.device), square_side(last, cell)
    return torch.cat([places[:-last], places[-last:].view(side, side)[::cell, ::cell].flatten()])


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """Turn ``[B, H, S, d]`` to ``[B, S, H * d]``."""
    return x.transpose(1, 2).flatten(2)


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Turn ``[B, S, H * d]`` to ``[B, H, S, d]``."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def _change(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], last: int) -> torch.Tensor:
    """Replace the `last` tokens of ``[B, H, S, d]`` by what `change` makes of them as ``[B, last, H * d]``."""
    return torch.cat([x[:, :, :-last], _by_head(change(_in_rows(x[:, :, -last:])), x.shape[1])], 2)


def square_side(tokens: int, cell: int) -> int:
    """Return the side of a square grid of tokens. Raises ValueError unless it is square and `cell` divides its side."""
    side = math.isqrt(tokens)
    if side * side != tokens or side % cell:
        raise ValueError(f"{tokens} tokens are no square grid that cells of {cell}x{cell} divide; the reference code "
                         "measures square pictures only")
    return side


def in_tiles(x: torch.Tensor, tiles: int) -> torch.Tensor:
    """Cut a square grid in `tiles` a side: ``[B, N, C]`` to ``[B * tiles**2, N / tiles**2, C]``.

    This is HyperTile's idea with tiles of one size, so that the work is always the same.
    """
    batch, tokens, channels = x.shape
    inner = square_side(tokens, tiles) // tiles
    cut = x.reshape(batch, tiles, inner, tiles, inner, channels).transpose(2, 3)
    return cut.reshape(batch * tiles**2, inner**2, channels)


def join(y: torch.Tensor, tiles: int) -> torch.Tensor:
    """Undo `in_tiles`: ``[B * tiles**2, n, C]`` to ``[B, n * tiles**2, C]``."""
    inner = square_side(y.shape[1], 1)
    cut = y.reshape(-1, tiles, tiles, inner, inner, y.shape[2]).transpose(2, 3)
    return cut.reshape(-1, (tiles * inner) ** 2, y.shape[2])
