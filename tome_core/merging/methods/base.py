"""The interface of matching methods, and the search for the best key that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import kernels
from ..grid import Draw, Grid
from ..plan import MergePlan, take_rows


class MatchOptions(NamedTuple):
    """The settings of a match. Clustering uses only the ratio, bipartite matching all of them."""

    ratio: float  # the share of tokens to remove, from 0 to 1
    sx: int  # width of a cell in tokens
    sy: int  # height of a cell in tokens
    draw: Draw | None = None  # decides into which token of a cell, its destination, others merge; None: the first
    refine: int = 0  # number of k-means steps after the match
    by_distance: bool = False  # compare tokens by distance, not by cosine
    st: int = 1  # number of frames of a cell


class Method(NamedTuple):
    """A matching method. Its `match` may use only operators with static shapes, and must not wait for the device."""

    name: str  # in settings
    # takes features (batch, tokens, channels), their grid and the options; returns None if no token merges
    match: Callable[[torch.Tensor, Grid, MatchOptions], MergePlan | None]
    keeps_cells: bool = False  # one token of every cell stays, so that the ratio is 1 - 1/(sx*sy) at most
    compares: bool = False  # the method follows `by_distance` and `st`, and k-means steps improve its plan


def take_queries(x: torch.Tensor, rows: torch.Tensor | None, start: int, stop: int) -> torch.Tensor:
    """Return queries `start` to ``stop - 1`` of each sample, float32; for `x` and `rows` see `best_keys`."""
    if rows is None:
        return x[:, start:stop].float()
    rows = rows[:, start:stop]
    if x.shape[0] > 1 or rows.shape[0] == 1:
        return take_rows(x, rows).float()
    return take_rows(x, rows.reshape(1, -1)).view(*rows.shape, -1).float()


# Most bytes of scores in memory at a time. 8 MiB fit a CPU's cache; a GPU is faster with few, large products.
_SCORE_BYTES = {"cpu": 8 << 20}
_SCORE_BYTES_ELSEWHERE = 64 << 20
# Where torch's `max`, which also tells the place, takes four times as long as all steps of `_best_of`.
_WITH_SLOW_MAX = ("cpu",)

# Score (float32) and number (int64) of the best key of each query, both (batch, queries).
Best = tuple[torch.Tensor, torch.Tensor]


def best_keys(x: torch.Tensor, rows: torch.Tensor | None, keys: torch.Tensor, bias: torch.Tensor | None = None) -> Best:
    """Find the key with the highest score for each query. A score is a dot product plus the key's bias.

    Return highest scores and the numbers of their keys. The scores never exist as a whole. On a GPU with Triton one
    kernel computes and reduces them, in the dtype of `x`; elsewhere queries are processed slice by slice. The two agree
    up to rounding, so near ties may resolve differently. Not differentiable.

    Args:
        x: ``(batch, tokens, channels)``, any float dtype; a batch of 1 is possible if `rows` has the whole batch.
        rows: the tokens that are queries, int64 ``(batch or 1, queries)``; None for all.
        keys: ``(batch, keys, channels)``, float32 or the dtype of `x`, at least one.
        bias: is added to the scores of each key, float32 ``(batch, keys)``; None adds nothing.
    """
    if kernels.ready(keys) and kernels.ready(x):
        best = kernels.best_keys(x, rows, keys, bias)
        if best is not None:
            return best
    count, transposed = (x if rows is None else rows).shape[1], keys.float().transpose(1, 2)
    budget = _SCORE_BYTES.get(keys.device.type, _SCORE_BYTES_ELSEWHERE)
    step = max(1, budget // (4 * keys.shape[0] * keys.shape[1]))
    if step >= count:
        return _best_of(_scores(take_queries(x, rows, 0, count), transposed, bias))
    # The results are filled in place. Small results between freed slices would fragment a CPU's heap (4.8 GiB at
    # 65,536 tokens).
    score = transposed.new_empty(keys.shape[0], count)
    index = torch.empty(keys.shape[0], count, dtype=torch.int64, device=keys.device)
    for start in range(0, count, step):
        stop = min(start + step, count)
        scores = _scores(take_queries(x, rows, start, stop), transposed, bias)
        score[:, start:stop], index[:, start:stop] = _best_of(scores)
    return score, index


def _scores(queries: torch.Tensor, transposed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return dot products ``(batch, queries, keys)`` with keys ``(batch, channels, keys)``, plus bias (batch, keys)."""
    return torch.bmm(queries, transposed) if bias is None else torch.baddbmm(bias[:, None], queries, transposed)


def _best_of(scores: torch.Tensor) -> Best:
    """Return each row's highest score and its first place, as ``scores.max(-1)`` does. Scores may be overwritten."""
    if scores.device.type not in _WITH_SLOW_MAX:
        return scores.max(-1)
    count, best = scores.shape[-1], scores.amax(-1, keepdim=True)
    # places are numbered from the last one, from 1 on: the highest number belongs to the first
    numbers = torch.arange(count, 0, -1, dtype=scores.dtype, device=scores.device)
    place = count - scores.eq_(best).mul_(numbers).amax(-1)
    return best[..., 0], place.to(torch.int64).clamp_(max=count - 1)  # of NaN the place does not matter
