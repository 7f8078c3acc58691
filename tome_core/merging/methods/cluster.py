"""Clustering by k-means: every cluster becomes one token.

A loose summary of the ToMe paper, which does bipartite matching, describes this: "cosine similarity between the token
embeddings and the mean embedding of the image ... k-means clustering with k equal to half of the number of tokens". It
has two readings: ``cluster`` clusters the tokens, ``cluster-similarity`` only their cosine to the mean token.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from ..grid import Grid
from ..plan import MergePlan, take_rows, without_autocast
from .base import MatchOptions, Method, best_keys

ITERATIONS = 4  # a fixed number, because a test for convergence would wait for the device


def match(x: torch.Tensor, grid: Grid, options: MatchOptions, by_similarity: bool = False) -> MergePlan | None:
    """Return a plan that clusters the tokens by k-means (`ITERATIONS` steps), into as many groups as the ratio leaves.

    `x`, ``(batch, tokens, channels)``, are the tokens of `grid`. The ratio times their number, rounded down, is the
    number of tokens to remove; None if it is 0. There is at least one group, and no group is empty. Distances are
    Euclidean, in float32. If `by_similarity`, each token's cosine to the mean token is clustered, with first centres
    evenly spread over the sorted cosines, else the tokens, with first centres evenly spread over the picture.
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
            group = (_nearest_scalar if by_similarity else _nearest)(value, centre)
            plan = MergePlan(group, count)
            # a centre moves to the mean of its tokens; a centre without tokens stays
            centre = torch.where(plan.empty[..., None], centre, plan.merge(value))
            if by_similarity:
                centre = centre.sort(dim=1).values
        distance = (value - take_rows(centre, group)).square().sum(-1)
        return MergePlan(_fill_empty(group, distance, count), count)


def _nearest(value: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """Return the number of each token's nearest centre, int64 ``(batch, tokens)``, by Euclidean distance."""
    # |x - c|^2 is smallest if x.c - |c|^2 / 2 is largest
    return best_keys(value, None, centre, centre.square().sum(-1) / -2)[1]


def _nearest_scalar(value: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """Return the number of the nearest centre as `_nearest` does, for tokens of one channel and ascending centres."""
    middle = (centre[:, 1:, 0] + centre[:, :-1, 0]) / 2
    return torch.searchsorted(middle.contiguous(), value[..., 0].contiguous())


def _fill_empty(group: torch.Tensor, distance: torch.Tensor, count: int) -> torch.Tensor:
    """Return the groups of all tokens after each empty one of the `count` clusters got a token far from its old centre.

    `group` and `distance`, each token's distance from its centre, are ``(batch, tokens)``. The farthest tokens move,
    but no cluster loses its nearest token. There are always enough: with E of G clusters empty, G - E tokens must stay
    and the other N - (G - E) >= E may move.
    """
    plan = MergePlan(group, count)
    # The nearest token of each cluster stays. Sort by distance, then stably by cluster: it is the first of its run.
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
