"""Putting the reference code's groups into the finest self-attention of a diffusers UNet, and taking them out again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from benchmarks import reference_tiles
from benchmarks.networks import finest_blocks, timestep_of
from benchmarks.reference import Groups, bipartite, pooled, refined

Metric = Literal["input", "keys", "keys+values"]


@dataclass(frozen=True)
class Grouping:
    """How one side of attention is grouped.

    how: ``match`` by similarity, ``random`` partners, or ``pool`` (squares of `cell`, which set the ratio).
    metric: what is compared: the block's input (as tomesd does), the keys (as in ToMe for ViTs, arXiv 2210.09461, but
    with all heads side by side), or keys and values side by side.
    euclid: compared by distance, not by cosine. steps: of k-means afterwards. drawn: destinations are drawn anew
    at every time instead of top left.
    """

    ratio: float
    cell: int = 2
    how: Literal["match", "random", "pool"] = "match"
    metric: Metric = "input"
    euclid: bool = False
    window: int | None = None
    steps: int = 0
    drawn: bool = False


@dataclass(frozen=True)
class Recipe:
    """What happens to a self-attention: keys and values by `kv`, queries by `q`.

    together: queries are grouped as keys and values are. sized: a key's logit gets the logarithm of its group's size.
    zero: attention gives zeros, the control; the rest is then ignored. tiles: attention stays inside
    tiles, this many a side, and nothing is merged.
    """

    kv: Grouping | None = None
    q: Grouping | None = None
    together: bool = False
    sized: bool = True
    zero: bool = False
    tiles: int | None = None


@dataclass(frozen=True)
class Phase:
    """A recipe, and the lowest timestep it holds at."""

    lowest: float
    recipe: Recipe


class Following:
    """Which phase holds at the time of the network's latest call.

    Random choices depend on `seed`, the timestep and the block, on nothing else.
    """

    def __init__(self, network: nn.Module, phases: tuple[Phase, ...], seed: int) -> None:
        super().__init__()
        self.network, self.phases, self.seed = network, phases, seed
        self.timestep = 0.0
        self._hooks: list = []

    def recipe(self) -> Recipe | None:
        """The recipe in force; None where no phase holds."""
        return next((phase.recipe for phase in self.phases if self.timestep >= phase.lowest), None)

    def grouped(self, grouping: Grouping, compared: torch.Tensor, number: int) -> Groups:
        """Tokens ``[B, N, C]`` of block `number`, grouped."""
        if grouping.how == "pool":
            return pooled(compared, grouping.cell)
        generator = torch.Generator().manual_seed((self.seed * 1_000 + round(self.timestep)) * 100 + number)
        groups = bipartite(
            compared,
            grouping.ratio,
            grouping.cell,
            euclid=grouping.euclid,
            window=grouping.window,
            destinations_from=generator if grouping.drawn else None,
            partners_from=generator if grouping.how == "random" else None,
        )
        return refined(groups, compared, grouping.steps, euclid=grouping.euclid)

    def follow(self) -> None:
        """Look at the network's calls from now on."""
        self._hooks.append(self.network.register_forward_pre_hook(self._note, with_kwargs=True))

    def leave(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note(self, network: nn.Module, args: tuple, kwargs: dict) -> None:
        self.timestep = timestep_of(network, args, kwargs)


class Reference(Following):
    """A context manager: inside it the UNet's finest self-attention follows the first phase that holds."""

    def __enter__(self) -> Reference:
        self.follow()
        self._attentions: list[nn.Module] = []
        for number, place in enumerate(finest_blocks(self.network)):
            attention = _Attention(self, place.block.attn1, number)
            self._hooks.append(place.block.register_forward_pre_hook(attention.note_input))
            place.block.attn1.forward = attention.forward
            self._attentions.append(place.block.attn1)
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()
        for module in self._attentions:
            del module.forward


class _Attention:
    """Stands in for one ``attn1.forward``."""

    def __init__(self, owner: Reference, attention: nn.Module, number: int) -> None:
        self.owner, self.attention, self.number = owner, attention, number
        self.original = attention.forward
        self.input: torch.Tensor | None = None

    def note_input(self, block: nn.Module, args: tuple) -> None:
        """The tokens the block was called with."""
        self.input = args[0]

    def forward(self, x: torch.Tensor, encoder_hidden_states=None, attention_mask=None, **more) -> torch.Tensor:
        recipe = self.owner.recipe()
        if recipe is None:
            return self.original(x, encoder_hidden_states, attention_mask, **more)
        if recipe.zero:
            return torch.zeros_like(x)
        if recipe.tiles:
            return reference_tiles.join(self.original(reference_tiles.split(x, recipe.tiles), **more), recipe.tiles)
        keys = self._group(recipe.kv, x)
        queries = keys if recipe.together else self._group(recipe.q, x)
        context = keys.merge(x) if keys else x
        if keys and recipe.sized:
            attention_mask = keys.log_sizes().to(x.dtype)[:, None]
        out = self.original(queries.merge(x) if queries else x, context, attention_mask, **more)
        return queries.unmerge(out) if queries else out

    def _group(self, grouping: Grouping | None, x: torch.Tensor) -> Groups | None:
        return grouping and self.owner.grouped(grouping, self._compared(grouping.metric, x), self.number)

    def _compared(self, metric: Metric, x: torch.Tensor) -> torch.Tensor:
        if metric == "input":
            return self.input
        keys = self.attention.to_k(x)
        return keys if metric == "keys" else torch.cat([keys, self.attention.to_v(x)], -1)
