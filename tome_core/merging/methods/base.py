"""What every matching method is: one function of one signature, and a few facts about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import kernels
from ..grid import Draw, Grid
from ..plan import MergePlan, take_rows


class MatchOptions(NamedTuple):
    """The settings a method may use.

    ratio: share of tokens to remove, 0..1. sx, sy: cell size in tokens. draw: what random choices depend
    on, None for fixed ones. refine: k-means steps after the match; by_distance: tokens are compared by distance, not by
    cosine; st: frames of a film's cell. All of bipartite matching.
    """

    ratio: float
    sx: int
    sy: int
    draw: Draw | None = None
    refine: int = 0
    by_distance: bool = False
    st: int = 1


class Method(NamedTuple):
    """A matching method.

    match: ``(x [B, N, C], grid, options) -> MergePlan``, or None where nothing is to merge. It may look at
        ``x`` only through operators with static shapes, and never synchronises with the device.
    keeps_cells: True where one token of every cell stays, so that the ratio can reach ``1 - 1/(sx*sy)`` at most.
    compares: True where it gets what `metric` names instead of the block's input, and k-means steps improve its plan.
    """

    name: str
    match: Callable[[torch.Tensor, Grid, MatchOptions], MergePlan | None]
    keeps_cells: bool = False
    compares: bool = False


def take_queries(x: torch.Tensor, rows: torch.Tensor | None, start: int, stop: int) -> torch.Tensor:
    """Queries ``start`` to ``stop`` of every sample: float32 ``[B, stop - start, C]``. x, rows: see `best_keys`."""
    if rows is None:
        return x[:, start:stop].float()
    rows = rows[:, start:stop]
    if x.shape[0] > 1 or rows.shape[0] == 1:
        return take_rows(x, rows).float()
    return take_rows(x, rows.reshape(1, -1)).view(*rows.shape, -1).float()


# Largest block of scores held at once. 8 MiB stays in a CPU's cache; a GPU wants few, large products.
_SCORE_BYTES = {"cpu": 8 << 20}
_SCORE_BYTES_ELSEWHERE = 64 << 20

Best = tuple[torch.Tensor, torch.Tensor]  # of every query: the best key's score, float32, and index, int64: ``[B, Q]``


def best_keys(x: torch.Tensor, rows: torch.Tensor | None, keys: torch.Tensor, bias: torch.Tensor | None = None) -> Best:
    """The key with the highest dot product for each query, plus ``bias`` if given. Not differentiable.

    The scores never exist as a whole: on a GPU with Triton one kernel keeps them to itself (`kernels`; half precision
    is multiplied as it is), elsewhere queries are taken slice by slice. Equal up to rounding: near ties may resolve
    differently.

    Args:
        x: ``[B or 1, N, C]``, any float dtype; a kernel takes its rows from where they are, without a copy.
        rows: int64 ``[B or 1, Q]`` with values in ``0..N-1``, which rows of x are queries; None for all.
        keys: ``[B, K, C]``, float32 or as x.
        bias: float32 ``[B, K]``.
    """
    if kernels.ready(keys) and kernels.ready(x):
        found = kernels.best_keys(x, rows, keys, bias)
        if found is not None:
            return found
    count, transposed = (x if rows is None else rows).shape[1], keys.float().transpose(1, 2)
    budget = _SCORE_BYTES.get(keys.device.type, _SCORE_BYTES_ELSEWHERE)
    step = max(1, budget // (4 * keys.shape[0] * keys.shape[1]))
    if step >= count:
        return _scores(take_queries(x, rows, 0, count), transposed, bias).max(-1)
    # Filled in place: kept results between freed slices tear a CPU's heap apart (4.8 GiB at 65,536 tokens).
    score = transposed.new_empty(keys.shape[0], count)
    index = torch.empty(keys.shape[0], count, dtype=torch.int64, device=keys.device)
    for start in range(0, count, step):
        stop = min(start + step, count)
        score[:, start:stop], index[:, start:stop] = _scores(
            take_queries(x, rows, start, stop), transposed, bias
        ).max(-1)
    return score, index


def _scores(queries: torch.Tensor, transposed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.bmm(queries, transposed) if bias is None else torch.baddbmm(bias[:, None], queries, transposed)
