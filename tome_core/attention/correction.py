"""What merged keys and values lose, given back by two small products a head.

A group's mean key and value forget how values vary with keys inside the group. To first order in ``q.(k - k_g)`` the
output misses ``sum_g p_g Cov_g(v, k) scale q``, where ``p_g`` is the group's share of the attention. With the share of
its tokens ``n_g / N`` in its place the sum is the same for every query, one matrix a head:

    C = scale/N sum over tokens of (v - v_g) (k - k_g)^T

That much is known beforehand. What is left of a few queries that are answered exactly, spread evenly over the grid,
is told from the query and from the merged answer by ridge regression:

    out += A_q q + A_o out + b,    A_q = C + W_q, A_o = W_o

docs/methods.md derives C, and says what each part gains.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..merging import kernels
from ..merging.grid import Grid
from ..merging.plan import MergePlan, to_exact, without_autocast

_TINY = 1e-12
_SAME = 1e-3  # of its size: what differs by less between samples tells nothing, in half precision by less than rounding
_AS_GOOD_AS_ONE = 1 - 1e-6
# Exact answers: an output channel of a head of d channels has 2d unknowns, so each has about four answers at 16
# channels, two at 32 and 64, one at 128, and the penalty counts as one more. At most a sixteenth of the tokens, where
# that is not too few. Measured on heads of 32 and fewer channels: 128 are worth 10 % over 64, and 256 nothing over 128.
_ASKED_OF_NARROW, _ASKED, _NARROW, _FEWEST, _OF_TOKENS = 128, 256, 32, 32, 16

Pair = tuple[Tensor, Tensor]  # keys and values, flat


class Correction(NamedTuple):
    """The correction is a linear map of the query and of the merged answer, to be added to the answer.

    matrix: ``[B*H, 2d, d]``, of both; constant: ``[B*H, 1, d]``. asked: how many tokens were answered exactly for it.
    """

    matrix: Tensor
    constant: Tensor
    asked: int = 0


def pick_asked(grid: Grid, width: int, device: torch.device) -> tuple[Tensor]:
    """Which tokens are answered exactly: int64 ``[1, n]``, the middles of n cells of the grid. width: of a head."""
    tokens = grid.height * grid.width
    count = min(_ASKED_OF_NARROW if width <= _NARROW else _ASKED, max(_FEWEST, tokens // _OF_TOKENS), tokens)
    rows = min(grid.height, max(1, round((count * grid.height / grid.width) ** 0.5)))
    columns = min(grid.width, max(1, count // rows))
    down = (torch.arange(rows, device=device) * 2 + 1) * grid.height // (2 * rows)
    right = (torch.arange(columns, device=device) * 2 + 1) * grid.width // (2 * columns)
    return ((down[:, None] * grid.width + right).view(1, -1),)


def fit_correction(q: Tensor, made: Pair, plan: MergePlan, heads: int, scale: float) -> tuple[Correction, Pair]:
    """The correction of a plan, in the dtype of q. Summed and solved in float32; zero if every group has one token.

    Args:
        q: the queries that are answered exactly, those of `pick_asked`, flat ``[B, n, H*d]``.
        made: keys and values of all tokens, ``[B, N, H*d]``.
        scale: the attention's.

    Returns:
        The correction; and keys and values as the plan merges them, ``[B, G, H*d]``.
    """
    with without_autocast(q):
        keys, values = (one.to(q.dtype) for one in made)
        *pair, exact = plan.merge_pair(keys, values, exact=True)
        sums = _sums_by_kernel(keys, values, exact, plan, heads, scale)
        if sums is not None and sums.shape[3] <= kernels.RIDGE_WIDEST and not kernels.needs_gradient(q):
            answers = kernels.answer_few(q, keys, values, *pair, plan.logits_in(q.dtype), heads, scale)
            found = answers and kernels.ridge(q, answers, sums)
            if found:
                return Correction(*found), tuple(pair)
        asked_for = _by_head(q, heads)
        merged = to_exact(_attend(asked_for, *pair, heads, scale, plan.logits_in(q.dtype)[:, None, None]))
        left = to_exact(_attend(asked_for, keys, values, heads, scale)) - merged
        if sums is None:
            first = first_order(keys, values, exact, plan, heads, scale)
        else:
            first = sums.sum(0).unflatten(0, (-1, heads))
        asked_for = asked_for.to(first.dtype)
        flat = (one.flatten(0, 1) for one in (left, asked_for, first))
        left = torch.baddbmm(*flat, alpha=-1).view_as(left)
        weights, constant = _ridge(asked_for, merged, left, max(_SAME, torch.finfo(q.dtype).eps))
        lost = first.flatten(2).any(2)[..., None, None].to(first.dtype)  # nothing was: then rounding is all
        matrix = weights * lost + F.pad(first, (0, 0, 0, first.shape[3]))
        correction = Correction(matrix.to(q.dtype).flatten(0, 1), (constant * lost).to(q.dtype).flatten(0, 1))
        return correction, tuple(pair)


def _sums_by_kernel(
    keys: Tensor, values: Tensor, means: Tensor, plan: MergePlan, heads: int, scale: float
) -> Tensor | None:
    """`first_order` in parts, ``[P, B*H, d, d]``; None where torch's operators have to do."""
    if kernels.needs_gradient(keys, values) or not kernels.ready_for_halves(keys):
        return None
    return kernels.first_order(keys, values, plan.group, means, heads, scale / keys.shape[1])


def first_order(keys: Tensor, values: Tensor, means: Tensor, plan: MergePlan, heads: int, scale: float) -> Tensor:
    """``C^T``: ``[B, H, d, d]``. means: of the groups' values, ``[B, G, H*d]``, float32 at least."""
    # the tokens' distances from their group's value add up to 0, so that of the key need not be taken off
    spread = _by_head(to_exact(values) - plan.unmerge(means), heads)
    return _by_head(to_exact(keys), heads).transpose(2, 3) @ spread * (scale / keys.shape[1])


def _attend(q: Tensor, keys: Tensor, values: Tensor, heads: int, scale: float, bias: Tensor | None = None) -> Tensor:
    """By torch's function: nothing that a host has put into its own is to hear of these queries ``[B, H, n, d]``."""
    attend = torch._C._nn.scaled_dot_product_attention
    return attend(q, _by_head(keys, heads), _by_head(values, heads), bias, scale=scale)


def _ridge(q: Tensor, merged: Tensor, left: Tensor, same: float = _SAME) -> tuple[Tensor, Tensor]:
    """What of ``left [B, H, n, d]`` is linear in q and merged: weights ``[B, H, 2d, d]``, constant ``[B, H, 1, d]``.

    Each of the two is centred and scaled to a variance of 1 a channel, or to less where it differs by less than this
    share of its size: rounding alone would bear weights, and gradients, without bounds. The penalty is as many samples
    as there are weights to each output; the constant bears none.
    """
    told = torch.cat([q, merged], -1)
    mean = told.mean(2, keepdim=True)
    x = told - mean
    count, unknowns = x.shape[2], x.shape[3]
    transposed = x.transpose(2, 3)
    normal, cross = transposed @ x, transposed @ left  # sums: what they would be divided by goes with the scaling
    energy, size = (one.unflatten(2, (2, -1)).mean(3, keepdim=True)
                    for one in (normal.diagonal(dim1=2, dim2=3), told.square().sum(2)))  # fmt: skip
    energy = torch.maximum(energy, size * same**2).clamp(min=_TINY)
    unit = energy.rsqrt().expand(-1, -1, -1, unknowns // 2).flatten(2)[..., None]
    weights = unit * (_inverse(normal * unit * unit.transpose(2, 3), unknowns / count, unknowns) @ (unit * cross))
    return weights, left.mean(2, keepdim=True) - mean @ weights


def _inverse(matrix: Tensor, penalty: float, most: float) -> Tensor:
    """Of ``matrix + penalty I``, whose matrices ``[B, H, D, D]`` have eigenvalues from 0 to ``most``.

    Newton's iteration (Schulz 1933), each step scaled for the bounds that are known (Pan and Schreiber 1991, section
    2). Products alone: not every backend has a solver, and some of those there are wait for the device.
    """
    places = torch.arange(matrix.shape[-1], device=matrix.device)
    unit = (places[:, None] == places).to(matrix.dtype)  # DirectML has no eye
    regular = torch.add(matrix, unit, alpha=penalty).flatten(0, 1)
    low, high = penalty, most + penalty  # bounds of the eigenvalues of `regular`
    step = 2 / (low + high)
    found = torch.sub(2 * step * unit, regular, alpha=step * step)
    low = 4 * low * high / (low + high) ** 2  # of those of `found` times it, which are 1 at most
    while low < _AS_GOOD_AS_ONE:
        step = 2 / (low + 1.0)
        found = torch.baddbmm(found, found, regular @ found, beta=2 * step, alpha=-step * step)
        low = 4 * low / (low + 1.0) ** 2
    return found.view_as(matrix)


def _by_head(flat: Tensor, heads: int) -> Tensor:
    """``[B, N, H*d]`` to ``[B, H, N, d]``."""
    return flat.unflatten(-1, (heads, -1)).transpose(1, 2)
