"""Bipartite soft matching (Bolya & Hoffman, ToMe for Stable Diffusion, arXiv 2303.17604).

The result is that of tomesd 0.1.3 at a lower cost: the matrix of scores never exists as a whole. Only a token of zeros
differs: its score is 0 instead of NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from ..grid import Grid, split_grid
from ..metric import directions, keys_of_groups, keys_of_rows, make_comparable
from ..plan import MergePlan, without_autocast
from .base import Best, MatchOptions, Method, best_keys


def match(x: Tensor, grid: Grid, options: MatchOptions) -> MergePlan | None:
    """Return a plan that merges the sources most similar to a destination into their most similar destinations.

    `x`, ``(batch, tokens, channels)``, are the tokens of `grid`. Each cell has one destination, see `split_grid`; all
    other tokens are sources. Similarity is the cosine, or with `by_distance` nearness. The number of removed tokens is
    the ratio times all tokens, rounded down, but at most all sources; None if it is 0. Groups of destinations come
    first. Then follow as many k-means steps as `refine` says, see `refine_plan`, in which a token may join any group.
    """
    destinations, sources = split_grid(grid, options.sy, options.sx, options.draw, x, options.st)
    removed = min(sources.shape[1], int(x.shape[1] * options.ratio))
    if removed <= 0:
        return None
    ranked = removed < sources.shape[1]  # if all sources merge, their order does not matter
    with torch.no_grad(), without_autocast(x):
        if options.refine and not ranked:  # all sources merge, so k-means starts from the destinations
            plan = _nearest(x, *keys_of_rows(x, destinations, options.by_distance))
        else:
            best = (best_destination if ranked else _best_anywhere)(x, sources, destinations, options.by_distance)
            plan = _plan(*best, sources, destinations, removed)
    return refine_plan(plan, x, options.refine, options.by_distance) if options.refine else plan


def best_destination(x: Tensor, sources: Tensor, destinations: Tensor, by_distance: bool = False) -> Best:
    """Find the most similar destination of each source: return scores, float32, and places in `destinations`, int64.

    Both are ``(batch, sources)``. Sources and destinations are numbers of tokens of `x`, int64 ``(batch or 1, n)``. A
    score is minus half the squared distance if `by_distance`, else the cosine, so it is comparable between sources.
    """
    if by_distance and kernels.ready(x):
        best = kernels.best_keys(x, sources, *keys_of_rows(x, destinations, True), lengths=True)
        if best is not None:
            return best
    score, index = _best_anywhere(x, sources, destinations, by_distance)
    return make_comparable(score, x, sources, by_distance), index


def _best_anywhere(x: Tensor, sources: Tensor, destinations: Tensor, by_distance: bool) -> Best:
    """Return the same as `best_destination`, but scores lack the source's length, so sources cannot be compared."""
    return best_keys(x, sources, *keys_of_rows(x, destinations, by_distance))


def refine_plan(plan: MergePlan, x: Tensor, steps: int, by_distance: bool = False) -> MergePlan:
    """Return a new plan after `steps` steps of k-means. In each step every token of `x` joins the most similar centre.

    A centre is the mean of a group's tokens if `by_distance`, else of their directions (spherical k-means). The
    number of groups stays; a group that loses all tokens is empty, which proportional attention and unmerging support.
    """
    with torch.no_grad(), without_autocast(x):
        if not by_distance:
            x = directions(x)
        for _ in range(steps):
            plan = _nearest(x, *keys_of_groups(plan, x, by_distance))
    return plan


def _nearest(x: Tensor, keys: Tensor, bias: Tensor | None) -> MergePlan:
    """Return a plan in which each token of `x` joins its most similar key's group. For keys, bias: `keys_to_search`."""
    return MergePlan(best_keys(x, None, keys, bias)[1], keys.shape[1])


def _plan(score: Tensor, index: Tensor, sources: Tensor, destinations: Tensor, removed: int) -> MergePlan:
    """Return the plan in which the `removed` best sources join their destinations, see `kernels.assign_groups`."""
    batch, count = score.shape
    ranked = removed < count
    num_destinations = destinations.shape[1]
    group = kernels.assign_groups(score, index, sources, destinations, removed) if ranked else None
    if group is not None:
        return MergePlan(group, num_destinations + count - removed)
    sources, destinations = sources.expand(batch, -1), destinations.expand(batch, -1)
    tokens = num_destinations + count
    group = torch.empty(batch, tokens, dtype=torch.int64, device=sources.device)
    number = torch.arange(tokens - removed, device=sources.device).expand(batch, -1)
    group_of_source = index  # if all merge, their order does not matter
    if ranked:
        order = score.argsort(dim=1, descending=True, stable=True)
        merged, alone = order[:, :removed], order[:, removed:]
        group_of_source = torch.empty_like(sources).scatter(1, merged, index.gather(1, merged))
        group_of_source = group_of_source.scatter(1, alone, number[:, num_destinations:])
    group = group.scatter(1, sources, group_of_source).scatter(1, destinations, number[:, :num_destinations])
    return MergePlan(group, tokens - removed)


METHOD = Method("bipartite", match, keeps_cells=True, compares=True)
