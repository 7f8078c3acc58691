"""Plain code for what the engine has not: attention that gives zeros, stays inside tiles, or merges by lot.

For measuring quality, not speed. Grids are square.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import reference_tiles
from benchmarks.networks import answered, at_each_call, finest_blocks
from tome_core import MergePlan
from tome_core.merging.grid import Grid, split_grid
from tome_core.merging.methods.base import Best
from tome_core.merging.methods.bipartite import _plan


@dataclass(frozen=True)
class Recipe:
    """What happens to a self-attention: the first of these that is given.

    zero: it gives zeros. tiles: it stays inside tiles, this many a side, and nothing is merged. ratio: this share of
    its keys and values merges, and of its queries where `together`, with partners drawn by lot in cells of
    ``cell x cell`` tokens; a key's logit gets the logarithm of its group's size.
    """

    zero: bool = False
    tiles: int | None = None
    ratio: float = 0.0
    cell: int = 2
    together: bool = False


class Lots:
    """The plans of a recipe at the time of the network's latest call: by seed, timestep and block, by nothing else."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe, self.seed, self.timestep = recipe, seed, 0.0

    def tell(self, timestep: float) -> None:
        """The time of a call."""
        self.timestep = timestep

    def plan(self, x: torch.Tensor, number: int) -> MergePlan:
        """For the tokens ``[B, N, C]`` of block `number`, of which only the shape matters.

        As the engine's matching, but that who merges and with whom is drawn.
        """
        side = reference_tiles.square_side(x.shape[1], self.recipe.cell)
        destinations, sources = split_grid(Grid(side, side), self.recipe.cell, self.recipe.cell, None, x)
        dice = torch.Generator().manual_seed((self.seed * 1_000 + round(self.timestep)) * 100 + number)
        lots = torch.rand(len(x), sources.shape[1], destinations.shape[1], generator=dice).to(x.device)
        removed = min(sources.shape[1], int(x.shape[1] * self.recipe.ratio))
        return _plan(Best(*lots.max(2)), sources.sort().values, destinations, removed)


@contextmanager
def in_unet(unet: nn.Module, recipe: Recipe, seed: int) -> Iterator[None]:
    """Inside it the UNet's finest self-attention follows the recipe."""
    lots = Lots(recipe, seed)
    found = [place.block.attn1 for place in finest_blocks(unet)]
    forwards = {one: partial(_attend, lots, number, one.forward) for number, one in enumerate(found)}
    with at_each_call(unet, lots.tell), answered(forwards):
        yield


def _attend(
    lots: Lots, number: int, own: Any, x: torch.Tensor, encoder_hidden_states=None, attention_mask=None, **more: Any
) -> torch.Tensor:
    """In place of an ``attn1.forward``, which is `own`."""
    recipe = lots.recipe
    if recipe.zero:
        return torch.zeros_like(x)
    if recipe.tiles:
        return reference_tiles.join(own(reference_tiles.split(x, recipe.tiles), **more), recipe.tiles)
    plan = lots.plan(x, number)
    keys, sizes = plan.merge(x), plan.key_logits.to(x.dtype)[:, None]
    return plan.unmerge(own(keys, keys, sizes, **more)) if recipe.together else own(x, keys, sizes, **more)
