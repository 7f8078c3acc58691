"""What a match compares, and how alike two tokens are.

Compared is the block's input, as tomesd does, or what self-attention makes of it: by the cosine of their channels, or
by their distance. Both are a dot product with something that depends on one side alone, so one search serves both:
``q.k`` finds the highest cosine where the keys have length 1, and ``q.k - |k|^2 / 2`` the smallest distance.
Merging keys and values moves each of them to the mean of its group, so how far they lie apart is what a match should
look at (docs/methods.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import kernels
from .grid import reuse
from .plan import MergePlan, take_rows

METRICS = ("input", "keys+values")
_TINY = 1e-12  # keeps a token of zeros at similarity 0


def of_unit_spread(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Centred, and each scaled so that a channel varies by 1 on average: keys and values then count alike in any model.

    keys, values: ``[B, N, C]``, without gradient. Returns ``[B, N, 2*C]``.
    """
    found = torch.cat([keys, values], -1)
    found -= found.mean(1, keepdim=True)
    x, exact = found.unflatten(-1, (2, -1)), torch.float64 if found.dtype == torch.float64 else torch.float32
    # row by row first: a norm over both at once takes a CPU five times as long, and adds up with less care
    length = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=3, dtype=exact), dim=1)[:, None, :, None]
    unit = (x.shape[1] * x.shape[3]) ** -0.5
    x /= (length * unit).clamp(min=torch.finfo(x.dtype).tiny).to(x.dtype)
    return found


def keys_to_search(rows: torch.Tensor, by_distance: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `best_keys` takes to find the rows most alike: keys ``[B, K, C]`` and, by distance, a bias ``[B, K]``.

    rows: ``[B, K, C]``, any float dtype. Both float32; by distance keys of half precision stay what they are, so that
    tensor cores multiply them in one part, and the bias is exactly theirs.
    """
    if not by_distance:
        return directions(rows), None
    exact = rows.float()
    return rows if rows.dtype.itemsize == 2 else exact, exact.pow(2).sum(-1) * -0.5


def keys_of_rows(x: torch.Tensor, rows: torch.Tensor, by_distance: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`keys_to_search` of these rows of ``x [B, N, C]``: int64 ``[B or 1, K]``."""
    if by_distance and rows.shape[0] == 1 and kernels.ready(x):
        batch, tokens, channels = x.shape
        (offsets,) = reuse(_one_each, x, rows.shape[1])
        found = kernels.mean_rows(x.reshape(-1, channels), rows[0], offsets, tokens, bias=True)
        if found is not None:
            return found.mean.view(batch, -1, channels), found.bias.view(batch, -1)
    return keys_to_search(take_rows(x, rows), by_distance)


def keys_of_groups(plan: MergePlan, x: torch.Tensor, by_distance: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`keys_to_search` of the centres of the plan's groups, from ``x [B, N, C]``. Empty groups are never found."""
    if by_distance and (found := plan.centres(x)) is not None:
        return found
    keys, bias = keys_to_search(plan.merge(x), by_distance)
    bias = keys.new_zeros(keys.shape[:2]) if bias is None else bias
    return keys, bias.masked_fill(plan.empty, float("-inf"))


def _one_each(count: int, device: torch.device) -> tuple[torch.Tensor]:
    """Where groups of one row each start: int64 ``[count + 1]``."""
    return (torch.arange(count + 1, device=device),)


def directions(rows: torch.Tensor) -> torch.Tensor:
    """The rows at length 1, float32; a row of zeros stays zero."""
    return F.normalize(rows.float(), dim=-1, eps=_TINY)


def make_comparable(score: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, by_distance: bool) -> torch.Tensor:
    """From a search's scores ``[B, Q]``, which lack the row's own length, to the cosine, or to minus half the squared
    distance, which compare between rows. x: ``[B, N, C]``; rows: int64 ``[B or 1, Q]``, which tokens were searched for.
    """
    length = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    length = length.gather(1, rows.expand(x.shape[0], -1))
    return score - length.pow(2) * 0.5 if by_distance else score / length.clamp(min=_TINY)
