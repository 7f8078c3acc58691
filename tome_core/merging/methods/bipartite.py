"""Bipartite soft matching (Bolya & Hoffman, ToMe for Stable Diffusion, arXiv 2303.17604).

One token of every cell is a destination, all the others are sources; the sources that are most similar to
their best destination merge into it. Differs from tomesd 0.1.3 in what it costs, not in what it finds: the
score matrix never exists as a whole, and a token of zeros scores 0 instead of NaN.
"""

from __future__ import annotations

import torch

from .. import kernels
from ..grid import Grid, split_grid
from ..metric import directions, keys_of_groups, keys_of_rows, make_comparable
from ..plan import MergePlan, without_autocast
from .base import Best, MatchOptions, Method, best_keys


def match(x: torch.Tensor, grid: Grid, options: MatchOptions) -> MergePlan | None:
    """Merge ``int(N * ratio)`` sources, or all there are, into their most similar destination.

    x: ``[B, N, C]``, any float dtype, N the grid's tokens; compared in float32, by cosine or by distance.
    Then the match may be refined (`refine_plan`).
    Returns groups numbered destinations first; None where the ratio removes no token.
    """
    destinations, sources = split_grid(grid, options.sy, options.sx, options.draw, x, options.st)
    removed = min(sources.shape[1], int(x.shape[1] * options.ratio))
    if removed <= 0:
        return None
    ranked = removed < sources.shape[1]  # else all merge, in whatever order
    with torch.no_grad(), without_autocast(x):
        if options.refine and not ranked:  # nothing to choose: k-means from the cells
            plan = _nearest(x, *keys_of_rows(x, destinations, options.by_distance))
        else:
            best = (best_destination if ranked else _best_anywhere)(x, sources, destinations, options.by_distance)
            plan = _plan(*best, sources, destinations, removed)
    return refine_plan(plan, x, options.refine, options.by_distance) if options.refine else plan


def best_destination(
    x: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, by_distance: bool = False
) -> Best:
    """The most similar destination of each source, with its cosine, or minus half the squared distance.

    x: ``[B, N, C]``; sources ``[B or 1, S]``, destinations ``[B or 1, D]``: int64 token numbers.
    """
    if by_distance and kernels.ready(x):
        found = kernels.best_keys(x, sources, *keys_of_rows(x, destinations, True), lengths=True)
        if found is not None:
            return found
    score, index = _best_anywhere(x, sources, destinations, by_distance)
    return make_comparable(score, x, sources, by_distance), index


def _best_anywhere(x: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, by_distance: bool) -> Best:
    return best_keys(x, sources, *keys_of_rows(x, destinations, by_distance))


def refine_plan(plan: MergePlan, x: torch.Tensor, steps: int, by_distance: bool = False) -> MergePlan:
    """The plan after ``steps`` of k-means that start from it: every token goes to the nearest centre.

    By distance a centre is the mean of its tokens; by cosine of their directions (spherical k-means). A group that
    loses its tokens stays empty, so the plan is for proportional attention, or for merging and unmerging.
    """
    with torch.no_grad(), without_autocast(x):
        if not by_distance:
            x = directions(x)
        for _ in range(steps):
            plan = _nearest(x, *keys_of_groups(plan, x, by_distance))
    return plan


def _nearest(x: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None) -> MergePlan:
    """Every token of ``x [B, N, C]`` to the centre that is most alike, of `keys_of_rows` or `keys_of_groups`."""
    return MergePlan(best_keys(x, None, keys, bias)[1], keys.shape[1])


def _plan(
    score: torch.Tensor, index: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, removed: int
) -> MergePlan:
    batch, count = score.shape
    ranked = removed < count
    num_destinations = destinations.shape[1]
    found = kernels.place_tokens(score, index, sources, destinations, removed) if ranked else None
    if found is not None:
        return MergePlan(found, num_destinations + count - removed)
    sources, destinations = sources.expand(batch, -1), destinations.expand(batch, -1)
    tokens = num_destinations + count
    group = torch.empty(batch, tokens, dtype=torch.int64, device=sources.device)
    number = torch.arange(tokens - removed, device=sources.device).expand(batch, -1)
    own = index  # if all merge, in whatever order
    if ranked:
        order = score.argsort(dim=1, descending=True, stable=True)
        merged, alone = order[:, :removed], order[:, removed:]
        own = torch.empty_like(sources).scatter(1, merged, index.gather(1, merged))
        own = own.scatter(1, alone, number[:, num_destinations:])
    group = group.scatter(1, sources, own).scatter(1, destinations, number[:, :num_destinations])
    return MergePlan(group, tokens - removed)


METHOD = Method("bipartite", match, keeps_cells=True, compares=True)
