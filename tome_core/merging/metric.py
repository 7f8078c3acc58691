"""The features that a match compares, and the similarity of two tokens.

A match compares the block's input by cosine, as tomesd does, or the keys and values of self-attention by distance:
merging moves each of these to the mean of its group (docs/methods.md). One search serves both. ``q.k`` is highest for
the highest cosine if keys have length 1, and ``q.k - |k|^2 / 2`` is highest for the smallest distance.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import kernels
from .grid import cached_result
from .plan import MergePlan, take_rows, to_exact

METRICS = ("input", "keys+values")
_TINY = 1e-12  # keeps a token of zeros at similarity 0
_FEW, _LARGEST = 64, 1e4


def of_unit_spread(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return keys and values side by side, centred and scaled to a variance of about 1 in each sample.

    Both are ``(batch, tokens, channels)``, without gradient. Mean and variance are those of up to `_FEW` tokens, evenly
    spread: pictures merge as well by these as by all (docs/methods.md). All channels of the keys have one factor, and
    those of the values another, so both count the same in any model. Constant inputs give 0; no number is larger than
    `_LARGEST`.
    """
    (places,) = cached_result(_spread_places, keys, min(keys.shape[1], _FEW), keys.shape[1])
    if kernels.ready(keys) and (features := kernels.spread(keys, values, places, _LARGEST)) is not None:
        return features
    features = torch.cat([keys, values], -1)
    few = to_exact(features[:, places])
    mean = few.mean(1, keepdim=True)
    variance = (few - mean).square().unflatten(-1, (2, -1)).mean((1, 3))
    unit = variance.clamp(min=_TINY).rsqrt()[..., None].expand(-1, -1, keys.shape[2]).flatten(1)[:, None]
    features -= mean.to(features.dtype)
    features *= unit.clamp(max=torch.finfo(features.dtype).max).to(features.dtype)  # 0 times infinity is no number
    return features.clamp_(-_LARGEST, _LARGEST)


def _spread_places(count: int, tokens: int, device: torch.device) -> tuple[torch.Tensor]:
    """Return the numbers of `count` of `tokens`, evenly spread, int64, in a tuple for `cached_result`."""
    return ((torch.arange(count, device=device) * 2 + 1) * tokens // (2 * count),)


def keys_to_search(rows: torch.Tensor, by_distance: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return keys and a bias with which `methods.base.best_keys` finds the row that is most similar to a query.

    By cosine, keys are `directions`, float32, and the bias is None. By distance, keys are the rows, ``(batch, keys,
    channels)``, float32 or in their half precision, which tensor cores multiply in one step; the bias is float32.
    """
    if not by_distance:
        return directions(rows), None
    exact = rows.float()
    return rows if rows.dtype.itemsize == 2 else exact, exact.pow(2).sum(-1) * -0.5


def keys_of_rows(x: torch.Tensor, rows: torch.Tensor, by_distance: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `keys_to_search` of the tokens of `x` with the numbers `rows`, int64 ``(batch or 1, keys)``."""
    if by_distance and rows.shape[0] == 1 and kernels.ready(x):
        batch, tokens, channels = x.shape
        (offsets,) = cached_result(_offsets_of_single_rows, x, rows.shape[1])
        means = kernels.mean_rows(x.reshape(-1, channels), rows[0], offsets, tokens, bias=True)
        if means is not None:
            return means.mean.view(batch, -1, channels), means.bias.view(batch, -1)
    return keys_to_search(take_rows(x, rows), by_distance)


def keys_of_groups(plan: MergePlan, x: torch.Tensor, by_distance: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `keys_to_search` of the groups' means, always with a bias, which is minus infinity for an empty group.

    `x` are all tokens, ``(batch, tokens, channels)``; if not `by_distance`, their `directions`.
    """
    if by_distance and (centres := plan.centres(x)) is not None:
        return centres
    keys, bias = keys_to_search(plan.merge(x), by_distance)
    bias = keys.new_zeros(keys.shape[:2]) if bias is None else bias
    return keys, bias.masked_fill(plan.empty, float("-inf"))


def _offsets_of_single_rows(count: int, device: torch.device) -> tuple[torch.Tensor]:
    """Return int64 0 to `count`, inclusive, in a tuple for `cached_result`: `mean_rows`' offsets of one-row groups."""
    return (torch.arange(count + 1, device=device),)


def directions(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows scaled to length 1, in float32; a row of zeros stays zero."""
    return F.normalize(rows.float(), dim=-1, eps=_TINY)


def make_comparable(score: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, by_distance: bool) -> torch.Tensor:
    """Return scores of a search, ``(batch, n)``, which lack the query's length, made comparable between queries.

    Queries are the tokens of `x` with the numbers `rows`, int64 ``(batch or 1, n)``. The result is a new tensor:
    cosines, or minus half squared distances if `by_distance`.
    """
    length = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    length = length.gather(1, rows.expand(x.shape[0], -1))
    return score - length.pow(2) * 0.5 if by_distance else score / length.clamp(min=_TINY)
