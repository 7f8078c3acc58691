"""Plain code for what the engine has not: attention that gives zeros, stays inside tiles, or merges by lot.

For measuring quality, not speed. Grids are square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks import reference_tiles
from benchmarks.networks import answered, at_each_call, attended, finest_blocks, timestep_of
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


class SequenceReference(TorchFunctionMode):
    """A context manager: inside it the attentions of a Flux transformer follow the recipe, one without tiles.

    Among the picture's tokens, behind norm and positions; text is kept. It answers in torch's attention function, which
    is called once in each block, the text's tokens first.
    """

    def __init__(self, transformer: nn.Module, recipe: Recipe, seed: int) -> None:
        super().__init__()
        self._transformer, self._recipe, self._lots = transformer, recipe, Lots(recipe, seed)

    def __enter__(self) -> SequenceReference:
        self._hook = self._transformer.register_forward_pre_hook(self._note, with_kwargs=True)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self._block += 1
        (q, k, v), more = attended(args, kwargs or {})
        if self._recipe.zero:
            return torch.zeros_like(q)
        plan = self._lots.plan(k[:, 0, -self._picture :], self._block)
        k, v = (_changed(one, plan.merge, self._picture) for one in (k, v))
        more["attn_mask"] = F.pad(plan.key_logits, (k.shape[2] - plan.num_groups, 0)).to(q.dtype)[:, None, None]
        if not self._recipe.together:
            return func(q, k, v, **more)
        return _changed(func(_changed(q, plan.merge, self._picture), k, v, **more), plan.unmerge, plan.num_groups)

    def _note(self, transformer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._lots.tell(timestep_of(transformer, args, kwargs))
        self._picture, self._block = kwargs["hidden_states"].shape[1], 0


def _changed(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], last: int) -> torch.Tensor:
    """``[B, H, S, d]`` with its `last` tokens changed to as many as `change` gives of them."""
    changed = change(x[:, :, -last:].transpose(1, 2).flatten(2)).unflatten(2, (x.shape[1], -1)).transpose(1, 2)
    return torch.cat([x[:, :, :-last], changed], 2)
