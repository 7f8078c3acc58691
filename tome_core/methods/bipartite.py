"""Bipartite soft matching (Bolya & Hoffman, ToMe for Stable Diffusion, arXiv 2303.17604).

One token of every cell is a destination, all the others are sources; the sources that are most similar to
their best destination merge into it. Differs from tomesd 0.1.3 in what it costs, not in what it finds: the
score matrix never exists as a whole, and a token of zeros scores 0 instead of NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..grid import Grid, cells, split_cells
from ..plan import MergePlan, take_rows
from .base import Best, MatchOptions, Method, best_keys
from .windows import best_in_window

_TINY = 1e-12  # keeps a token of zeros at similarity 0


def match(x: torch.Tensor, grid: Grid, options: MatchOptions) -> MergePlan | None:
    """Merge ``int(N * ratio)`` sources, or all there are, into their most similar destination.

    x: ``[B, N, C]``, any float dtype, N the grid's tokens; similarity is the cosine, compared in float32.
    Partners are looked for in the whole grid or in windows of it; then the match may be refined (`refined`).
    Returns groups numbered destinations first; None where the ratio removes no token.
    """
    destinations, sources = split_cells(cells(grid, options.sy, options.sx, x.device), options.draw)
    removed = min(sources.shape[1], int(x.shape[1] * options.ratio))
    if removed <= 0:
        return None
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        if 0 < options.window < max(grid.height, grid.width):
            best = best_in_window(x, grid, options, sources, destinations)
        else:
            best = _best_anywhere(x, sources, destinations)
        if removed < sources.shape[1]:  # else all merge, in whatever order
            best = Best(best.score / _lengths(x, sources), best.index)
        plan = _plan(best, sources, destinations, removed)
        return refined(plan, x, options.refine) if options.refine else plan


def best_destination(x: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> Best:
    """The most similar destination of each source, by cosine.

    x: ``[B, N, C]``; sources ``[B or 1, S]``, destinations ``[B or 1, D]``: int64 token numbers.
    """
    best = _best_anywhere(x, sources, destinations)
    return Best(best.score / _lengths(x, sources), best.index)


def _best_anywhere(x: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> Best:
    """The score is the cosine times the source's length, which does not change which destination is best."""
    keys = F.normalize(take_rows(x, destinations).float(), dim=-1, eps=_TINY)
    return best_keys(lambda i, j: take_rows(x, sources[:, i:j]).float(), sources.shape[1], keys)


def _lengths(x: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).clamp(min=_TINY)
    return length.gather(1, sources.expand(x.shape[0], -1))


def refined(plan: MergePlan, x: torch.Tensor, steps: int) -> MergePlan:
    """The plan after ``steps`` of spherical k-means that start from it: every token goes to the nearest centre.

    A centre is the mean of its tokens' directions, near is the cosine. A group that loses its tokens stays empty,
    so the plan is for keys that know their sizes, or for merging and unmerging.
    """
    unit = F.normalize(x.float(), dim=-1, eps=_TINY)
    for _ in range(steps):
        centres = F.normalize(plan.merge(unit), dim=-1, eps=_TINY)
        empty = torch.zeros(plan.sizes.shape, device=x.device).masked_fill(plan.sizes == 0, float("-inf"))
        group = best_keys(lambda i, j: unit[:, i:j], x.shape[1], centres, empty).index
        plan = MergePlan(group, plan.num_groups)
    return plan


def _plan(best: Best, sources: torch.Tensor, destinations: torch.Tensor, removed: int) -> MergePlan:
    batch, count = best.score.shape
    num_destinations = destinations.shape[1]
    sources, destinations = sources.expand(batch, -1), destinations.expand(batch, -1)
    if removed == count:
        order = torch.arange(count, device=sources.device).expand(batch, -1)
    else:
        order = best.score.argsort(dim=1, descending=True, stable=True)
    merged, alone = order[:, :removed], order[:, removed:]
    number = torch.arange(num_destinations + count - removed, device=sources.device).expand(batch, -1)
    own = torch.empty_like(sources).scatter(1, merged, best.index.gather(1, merged))
    own = own.scatter(1, alone, number[:, num_destinations:])
    tokens = num_destinations + count
    group = torch.empty(batch, tokens, dtype=torch.int64, device=sources.device)
    group = group.scatter(1, sources, own).scatter(1, destinations, number[:, :num_destinations])
    representative = torch.cat([destinations, sources.gather(1, alone)], 1)
    return MergePlan(group, tokens - removed, representative)


METHOD = Method(
    name="bipartite",
    summary="one destination per cell; the most similar tokens merge into theirs (ToMe, arXiv 2303.17604)",
    match=match,
)
