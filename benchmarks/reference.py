"""Plain code for what the engine has not: attention that gives zeros, stays inside tiles, or merges on a coarser grid,
by lot, or as ToMA.

For measuring quality, not speed. Grids are square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.networks import InPlaceOfAttention, answer_by, at_each_call, finest_blocks, take_apart, timestep_of
from tome_core import MergePlan
from tome_core.merging.grid import Grid, split_grid
from tome_core.merging.methods.bipartite import _plan
from tome_core.models.transformer import family_of, find_attentions

TILES = 8  # a side
SHARPNESS = 10.0  # of the weights over cosines
HALF_TIME = 500  # the timestep at which the schedules of others switch, tomesd's and down-sampling's


@dataclass(frozen=True)
class Recipe:
    """What happens to a self-attention: the first of these that is given.

    zero: it gives zeros. tiles: it stays inside tiles, this many a side, and nothing is merged. ratio: this share of
    its keys and values merges, and of its queries where `together`, with partners drawn by lot in cells of
    ``cell x cell`` tokens; a key's logit gets the logarithm of its group's size. coarse: of each cell of so many tokens
    a side the first token alone is key and value; coarse_early: as many a side at the timesteps from `HALF_TIME` on.
    """

    zero: bool = False
    tiles: int | None = None
    coarse: int = 0
    coarse_early: int = 0
    ratio: float = 0.0
    cell: int = 2
    together: bool = False


class Coarse:
    """Token down-sampling (Smith et al., ToDo, arXiv 2402.13573): of each cell of a square grid the top left token."""

    def __init__(self, x: torch.Tensor, cell: int) -> None:
        side = square_side(x.shape[1], cell)
        self.places = torch.arange(x.shape[1], device=x.device).view(side, side)[::cell, ::cell].flatten()
        self.num_groups = len(self.places)
        self._logits = torch.zeros(len(x), self.num_groups, device=x.device)

    def logits_in(self, dtype: torch.dtype) -> torch.Tensor:
        """Every token stands for as many."""
        return self._logits.to(dtype)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, N, C]`` to ``[B, G, C]``."""
        return x[:, self.places]


class Lots:
    """The plans of a recipe at the time of the network's latest call: by seed, timestep and block, by nothing else."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe, self.seed, self.timestep = recipe, seed, 0.0

    def tell(self, timestep: float) -> None:
        """The time of a call."""
        self.timestep = timestep

    def plan(self, x: torch.Tensor, number: int) -> MergePlan | Coarse:
        """For the tokens ``[B, N, C]`` of block `number`, of which only the shape matters.

        As the engine's matching, but that who merges and with whom is drawn.
        """
        if self.recipe.coarse:
            early = self.recipe.coarse_early and self.timestep >= HALF_TIME
            return Coarse(x, self.recipe.coarse_early if early else self.recipe.coarse)
        side = square_side(x.shape[1], self.recipe.cell)
        destinations, sources = split_grid(Grid(side, side), self.recipe.cell, self.recipe.cell, None, x)
        dice = torch.Generator().manual_seed((self.seed * 1_000 + round(self.timestep)) * 100 + number)
        lots = torch.rand(len(x), sources.shape[1], destinations.shape[1], generator=dice).to(x.device)
        removed = min(sources.shape[1], int(x.shape[1] * self.recipe.ratio))
        return _plan(*lots.max(2), sources.sort().values, destinations, removed)


@contextmanager
def in_unet(unet: nn.Module, recipe: Recipe, seed: int) -> Iterator[None]:
    """Inside it the UNet's finest self-attention follows the recipe."""
    lots = Lots(recipe, seed)
    found = [place.block.attn1 for place in finest_blocks(unet)]
    forwards = {one: partial(_attend, lots, number, one.forward) for number, one in enumerate(found)}
    with at_each_call(unet, lots.tell), answer_by(forwards):
        yield


def _attend(
    lots: Lots, number: int, own: Any, x: torch.Tensor, encoder_hidden_states=None, attention_mask=None, **more: Any
) -> torch.Tensor:
    """In place of an ``attn1.forward``, which is `own`."""
    recipe = lots.recipe
    if recipe.zero:
        return torch.zeros_like(x)
    if recipe.tiles:
        return join(own(in_tiles(x, recipe.tiles), **more), recipe.tiles)
    plan = lots.plan(x, number)
    keys, sizes = plan.merge(x), plan.logits_in(x.dtype)[:, None]
    return plan.unmerge(own(keys, keys, sizes, **more)) if recipe.together else own(x, keys, sizes, **more)


class SequenceReference(InPlaceOfAttention):
    """A context manager: inside it the attentions of a Flux transformer follow the recipe, one without tiles.

    Among the picture's tokens, behind norm and positions; text is kept. It answers in torch's attention function, which
    is called once in each block, the text's tokens first.
    """

    def __init__(self, transformer: nn.Module, recipe: Recipe, seed: int) -> None:
        self._transformer, self._recipe, self._lots = transformer, recipe, Lots(recipe, seed)

    def __enter__(self) -> SequenceReference:
        self._hook = self._transformer.register_forward_pre_hook(self._note, with_kwargs=True)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._hook.remove()

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The answer of one block."""
        self._block += 1
        (q, k, v), more = take_apart(args, kwargs)
        if self._recipe.zero:
            return torch.zeros_like(q)
        plan = self._lots.plan(k[:, 0, -self._picture :], self._block)
        k, v = (_change(one, plan.merge, self._picture) for one in (k, v))
        more["attn_mask"] = F.pad(plan.logits_in(q.dtype), (k.shape[2] - plan.num_groups, 0))[:, None, None]
        if not self._recipe.together:
            return self.own(q, k, v, **more)
        return _change(self.own(_change(q, plan.merge, self._picture), k, v, **more), plan.unmerge, plan.num_groups)

    def _note(self, transformer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._lots.tell(timestep_of(transformer, args, kwargs))
        self._picture, self._block = kwargs["hidden_states"].shape[1], 0


def _change(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], last: int) -> torch.Tensor:
    """``[B, H, S, d]`` with its `last` tokens changed to as many as `change` gives of them."""
    changed = change(x[:, :, -last:].transpose(1, 2).flatten(2)).unflatten(2, (x.shape[1], -1)).transpose(1, 2)
    return torch.cat([x[:, :, :-last], changed], 2)


def square_side(tokens: int, cell: int) -> int:
    """Tokens a side of a square grid. Raises ValueError where it is none, or `cell` does not divide it."""
    side = math.isqrt(tokens)
    if side * side != tokens or side % cell:
        raise ValueError(f"{tokens} tokens are no square grid that cells of {cell}x{cell} divide; the reference code "
                         "measures square pictures only")
    return side


def in_tiles(x: torch.Tensor, tiles: int) -> torch.Tensor:
    """``[B, N, C]`` to ``[B * tiles**2, N / tiles**2, C]``: a square grid cut in `tiles` a side.

    HyperTile's idea in plain code; the published one draws among several sizes, here it is fixed, so that its work is.
    Raises ValueError where the grid is no square that `tiles` divides.
    """
    batch, tokens, channels = x.shape
    inner = square_side(tokens, tiles) // tiles
    cut = x.reshape(batch, tiles, inner, tiles, inner, channels).transpose(2, 3)
    return cut.reshape(batch * tiles**2, inner**2, channels)


def join(y: torch.Tensor, tiles: int) -> torch.Tensor:
    """The inverse of `in_tiles`."""
    inner = square_side(y.shape[1], 1)
    cut = y.reshape(-1, tiles, tiles, inner, inner, y.shape[2]).transpose(2, 3)
    return cut.reshape(-1, (tiles * inner) ** 2, y.shape[2])


class Toma:
    """ToMA (arXiv 2509.10918): fewer tokens through each attention, chosen in tiles.

    As we read the paper's abstract; its code may differ: a subset of the tokens that represents all others best
    (facility location, greedy), in tiles of the picture; merging as an attention of that subset to all tokens; each
    token then takes from the subset as it gave. The authors make this anew every few steps and for several blocks
    together; here each block does, which errs less.

    Of the tokens ``[B, N, C]`` of square pictures. chosen: int64 ``[B, M]``, the subset's places.
    """

    def __init__(self, x: torch.Tensor, ratio: float) -> None:
        unit = F.normalize(in_tiles(x, TILES), dim=-1)
        alike = unit @ unit.transpose(1, 2)
        chosen = representatives(alike, round(alike.shape[1] * (1 - ratio)))
        rows = alike.gather(1, chosen[..., None].expand(-1, -1, alike.shape[2]))
        self._given = (SHARPNESS * rows).softmax(1)  # [tiles, M, n]: how each token divides itself
        places = torch.arange(x.shape[1], device=x.device)[None, :, None]
        inside = in_tiles(places, TILES)[..., 0].repeat(len(x), 1)
        self.chosen = inside.gather(1, chosen).view(len(x), -1)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, N, C]`` to ``[B, M, C]``, in the order of `chosen`."""
        weights = self._given / self._given.sum(2, keepdim=True)
        return (weights.to(x.dtype) @ in_tiles(x, TILES)).view(len(x), -1, x.shape[2])

    def unmerge(self, y: torch.Tensor) -> torch.Tensor:
        """``[B, M, C]`` to ``[B, N, C]``."""
        by_tile = y.reshape(len(self._given), -1, y.shape[2])
        return join(self._given.transpose(1, 2).to(y.dtype) @ by_tile, TILES)


def representatives(alike: torch.Tensor, count: int) -> torch.Tensor:
    """int64 ``[T, count]``: of each set of tokens those with the highest sum of every token's likeness to the nearest.

    One after the other, each the one that adds the most. alike: ``[T, n, n]``.
    """
    covered = torch.full_like(alike[:, 0], -1.0)
    chosen: list[torch.Tensor] = []
    taken = torch.zeros_like(covered)
    for _ in range(count):
        gain = (alike - covered[:, None]).clamp(min=0).sum(2) - taken
        best = gain.argmax(1, keepdim=True)
        taken = taken.scatter(1, best, float("inf"))
        covered = torch.maximum(covered, alike.gather(1, best[..., None].expand(-1, -1, alike.shape[2]))[:, 0])
        chosen.append(best)
    return torch.cat(chosen, 1)


@contextmanager
def as_toma(transformer: nn.Module, ratio: float) -> Iterator[None]:
    """Inside it the attentions of a Flux transformer see 1 - ratio of the picture's tokens."""
    tokens = [0]  # of the picture, at the latest call

    def look(transformer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tokens[0] = kwargs["hidden_states"].shape[1]

    found = [one for _, one in find_attentions(transformer, family_of(transformer))]
    forwards = {one: partial(_attend_toma, one.forward, ratio, tokens) for one in found}
    with transformer.register_forward_pre_hook(look, with_kwargs=True), answer_by(forwards):
        yield


def _attend_toma(
    own: Any, ratio: float, tokens: list[int], hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None, **more: Any,
) -> Any:  # fmt: skip
    """In place of one attention's ``forward``, `own`; picture by picture, because positions are the whole batch's."""
    text = hidden_states.shape[1] - tokens[0]  # in one sequence with the picture, or apart
    merging = Toma(hidden_states[:, text:], ratio)
    x = torch.cat([hidden_states[:, :text], merging.merge(hidden_states[:, text:])], 1)
    words = image_rotary_emb[0].shape[0] - tokens[0]
    found = []
    for number in range(len(x)):
        places = torch.cat([torch.arange(words, device=x.device), merging.chosen[number] + words])
        row = slice(number, number + 1)
        beside = None if encoder_hidden_states is None else encoder_hidden_states[row]
        found.append(own(x[row], beside, image_rotary_emb=tuple(one[places] for one in image_rotary_emb), **more))
    if encoder_hidden_states is None:
        out = torch.cat(found)
        return torch.cat([out[:, :text], merging.unmerge(out[:, text:])], 1)
    out, *others = (torch.cat(one) for one in zip(*found, strict=True))
    return merging.unmerge(out), *others
