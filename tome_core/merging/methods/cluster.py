"""k-means clustering: every cluster becomes one token.

A loose summary of the ToMe paper describes this ("cosine similarity between the token embeddings and the
mean embedding of the image ... k-means clustering with k equal to half of the number of tokens"). The paper
itself does bipartite matching; this is an option beside it. Two readings of that sentence:
``cluster`` clusters the tokens themselves, ``cluster-similarity`` only their cosine to the image's mean token.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from ..grid import Grid
from ..plan import MergePlan, take_rows, without_autocast
from .base import MatchOptions, Method, best_keys

ITERATIONS = 4  # a fixed number: stopping at convergence would need a look at the data


def match(x: torch.Tensor, grid: Grid, options: MatchOptions, by_similarity: bool = False) -> MergePlan | None:
    """Cluster into ``N - int(N * ratio)`` groups (at least one), none of them empty.

    x: ``[B, N, C]``, any float dtype; computed in float32 with Euclidean distance, from centres spread
    evenly over the picture, or ``by_similarity`` over the sorted similarities.
    Returns None where the ratio removes no token.
    """
    tokens = grid.height * grid.width
    count = max(1, tokens - int(tokens * options.ratio))
    if count >= tokens:
        return None
    with torch.no_grad(), without_autocast(x):
        value = start = x.float()
        if by_similarity:
            value = F.cosine_similarity(value, value.mean(1, keepdim=True), dim=-1)[..., None]
            start = value.sort(dim=1).values
        centre = take_rows(start, torch.arange(count, device=x.device)[None] * tokens // count)
        for _ in range(ITERATIONS):
            group = (_nearest_number if by_similarity else _nearest)(value, centre)
            plan = MergePlan(group, count)
            # centres go to the mean of their tokens; one that lost all of them stays where it was
            centre = torch.where(plan.empty[..., None], centre, plan.merge(value))
            if by_similarity:
                centre = centre.sort(dim=1).values
        distance = (value - take_rows(centre, group)).square().sum(-1)
        return MergePlan(_fill_empty(group, distance, count), count)


def _nearest(value: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """``|x - c|^2`` is smallest where ``x.c - |c|^2 / 2`` is largest."""
    return best_keys(value, None, centre, centre.square().sum(-1) / -2)[1]


def _nearest_number(value: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """In one dimension centres are sorted, so the nearest is found by bisection between the mid-points."""
    middle = (centre[:, 1:, 0] + centre[:, :-1, 0]) / 2
    return torch.searchsorted(middle.contiguous(), value[..., 0].contiguous())


def _fill_empty(group: torch.Tensor, distance: torch.Tensor, count: int) -> torch.Tensor:
    """Give every empty cluster one token: those farthest from their centre, except one token per cluster.

    With E of G clusters empty, G - E tokens stay and N - (G - E) >= E may move. group, distance: ``[B, N]``.
    Returns ``[B, N]``.
    """
    plan = MergePlan(group, count)
    # the nearest token of each cluster stays: sort by distance, then stably by cluster; the first of a run
    by_distance = distance.argsort(dim=1, stable=True)
    by_cluster = group.gather(1, by_distance).argsort(dim=1, stable=True)
    order = by_distance.gather(1, by_cluster)
    run = group.gather(1, order)
    is_first = torch.cat([torch.ones_like(run[:, :1], dtype=torch.bool), run[:, 1:] != run[:, :-1]], 1)
    keeps = torch.zeros_like(is_first).scatter(1, order, is_first)
    movable = torch.where(keeps, torch.full_like(distance, -1.0), distance)
    farthest = movable.argsort(dim=1, descending=True, stable=True)[:, :count]
    empty = plan.empty
    empty_first = empty.to(torch.int64).argsort(dim=1, descending=True, stable=True)[:, : farthest.shape[1]]
    taken = torch.where(empty.gather(1, empty_first), empty_first, group.gather(1, farthest))
    return group.scatter(1, farthest, taken)


METHOD = Method("cluster", match)
BY_SIMILARITY = Method("cluster-similarity", partial(match, by_similarity=True))
