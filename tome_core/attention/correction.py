"""What merged keys and values lose, given back by two small products a head.

A group's mean key and value forget how values vary with keys inside the group. To first order in ``q.(k - k_g)`` the
output misses ``sum_g p_g Cov_g(v, k) scale q``, where ``p_g`` is the group's share of the attention. With the share of
its tokens ``n_g / N`` in its place the sum is the same for every query, one matrix a head:

    C = scale/N sum over tokens of (v - v_g) (k - k_g)^T

That much is known beforehand. What is left of a few queries that are answered exactly, one in each cell of the grid,
is told from the query and from the merged answer by ridge regression:

    out += q M1 + out M2 + b,    M1 = C^T + W1, M2 = W2

On trained models C halves the error at equal work, and all but removes it where heads are smooth; where heads are
sharp it overdoes, which the regression sees. Both together make 64 keys of 4,096 as good as 256 with C alone
(benchmarks/README.md, which also names what was tried beside this).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..grid import Grid
from ..plan import MergePlan
from .sizes import size_logs

_TINY = 1e-12
_INVERSIONS = 12  # doublings of an inverse's digits: enough for a condition of some hundreds, which the ridge sees to
# Exact answers: at least twice as many as a head has unknowns for each of its channels, and no more than a sixteenth of
# the tokens. Measured on heads of 32 and fewer channels: 128 are worth 10 % over 64, and 256 nothing over 128.
_ASKED_OF_NARROW, _ASKED, _NARROW, _FEWEST, _OF_TOKENS = 128, 256, 32, 32, 16


class Correction(NamedTuple):
    """matrix: ``[B*H, 2d, d]``, of the query and of the merged answer; constant: ``[B*H, 1, d]``."""

    matrix: torch.Tensor
    constant: torch.Tensor


def asked(grid: Grid, width: int, device: torch.device) -> torch.Tensor:
    """Which tokens are answered exactly: int64 ``[1, n]``, the middles of n cells of the grid. width: of a head."""
    tokens = grid.height * grid.width
    count = min(_ASKED_OF_NARROW if width <= _NARROW else _ASKED, max(_FEWEST, tokens // _OF_TOKENS), tokens)
    rows = min(grid.height, max(1, round((count * grid.height / grid.width) ** 0.5)))
    columns = min(grid.width, max(1, count // rows))
    down = (torch.arange(rows, device=device) * 2 + 1) * grid.height // (2 * rows)
    right = (torch.arange(columns, device=device) * 2 + 1) * grid.width // (2 * columns)
    return (down[:, None] * grid.width + right).view(1, -1)


def fitted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: MergePlan, heads: int, scale: float
) -> Correction:
    """The correction of a plan, in the dtype of k.

    q: queries of the tokens that are `asked`, flat ``[B, n, H*d]``. k, v: keys and values of all tokens, flat
    ``[B, N, H*d]``. scale: the attention's. Summed and solved in float32; zero where every group has one token.
    """
    # there is no autocast on the meta device
    with nullcontext() if k.is_meta else torch.autocast(k.device.type, enabled=False):
        k, v = k.to(q.dtype), v.to(q.dtype)
        first = first_order(k, v, plan, heads, scale)
        merged = _attended(q, plan.merge(k), plan.merge(v), heads, scale, size_logs(plan).to(q.dtype)[:, None, None])
        left = _attended(q, k, v, heads, scale) - merged
        asked_for = _by_head(q, heads).to(first.dtype)
        weights, constant = _ridge(asked_for, merged, left - asked_for @ first)
        lost = (first != 0).flatten(2).any(2)[..., None, None].to(first.dtype)  # nothing was: then rounding is all
        matrix = weights * lost + F.pad(first, (0, 0, 0, first.shape[3]))
        return Correction(matrix.to(q.dtype).flatten(0, 1), (constant * lost).to(q.dtype).flatten(0, 1))


def first_order(k: torch.Tensor, v: torch.Tensor, plan: MergePlan, heads: int, scale: float) -> torch.Tensor:
    """``C^T``: ``[B, H, d, d]``, float32 at least. k, v, scale: as in `fitted`."""
    exact = _exact(v)
    # the tokens' distances from their group's value add up to 0, so that of the key need not be taken off
    spread = _by_head(exact - plan.unmerge(plan.merge(exact)), heads)
    return _by_head(k, heads).to(exact.dtype).transpose(2, 3) @ spread * (scale / k.shape[1])


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, scale: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """By torch's function: nothing that a host has put into its own is to hear of these queries."""
    q, k, v = (_by_head(one, heads) for one in (q, k, v))
    return _exact(F.scaled_dot_product_attention(q, k, v, bias, scale=scale))


def _ridge(q: torch.Tensor, merged: torch.Tensor, left: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What of ``left [B, H, n, d]`` is linear in q and merged: weights ``[B, H, 2d, d]``, constant ``[B, H, 1, d]``.

    Each of the two is centred and scaled as a whole to a variance of 1 a channel. The penalty is as many samples as
    there are weights to each output, whatever n; the constant bears none.
    """
    parts, scales, means = [], [], []
    for part in (q, merged):
        mean = part.mean(2, keepdim=True)
        part = part - mean
        scale = part.square().mean((2, 3), keepdim=True).clamp(min=_TINY).rsqrt()
        parts.append(part * scale)
        scales.append(scale.expand(-1, -1, part.shape[3], 1))
        means.append(mean)
    x, level = torch.cat(parts, -1), left.mean(2, keepdim=True)
    count, unknowns = x.shape[2], x.shape[3]
    normal = x.transpose(2, 3) @ x / count
    penalty = unknowns / count
    inverse = _inverse(normal + penalty * torch.eye(unknowns, dtype=x.dtype, device=x.device), unknowns + penalty)
    weights = inverse @ (x.transpose(2, 3) @ (left - level) / count) * torch.cat(scales, 2)
    return weights, level - torch.cat(means, -1) @ weights


def _inverse(matrix: torch.Tensor, most: float) -> torch.Tensor:
    """Of positive definite matrices whose eigenvalues are at most so large, by Newton's iteration (Schulz 1933).

    Products alone: not every backend has a solver, and some of those there are wait for the device.
    """
    found = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix) / most
    for _ in range(_INVERSIONS):
        found = 2 * found - found @ (matrix @ found)
    return found


def _by_head(flat: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, N, H*d]`` to ``[B, H, N, d]``."""
    return flat.unflatten(-1, (heads, -1)).transpose(1, 2)


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
