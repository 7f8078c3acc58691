"""The correction of the error of merged keys and values, by two small matrix products for each head.

The mean key and the mean value of a group do not hold how values vary with keys inside the group. To first order in
``q.(k - k_g)``, the output lacks ``sum_g p_g Cov_g(v, k) scale q``, where ``p_g`` is the attention weight of group g.
With the group's share of the tokens ``n_g / N`` instead of ``p_g``, the sum is one matrix for each head,

    C = scale/N sum over tokens of (v - v_g) (k - k_g)^T

The rest of the error is fitted: a few queries, evenly spread over the grid, are answered exactly, and ridge regression
predicts their remaining errors from the query and the merged answer (docs/methods.md):

    out += A_q q + A_o out + b,    A_q = C + W_q, A_o = W_o

W_q and W_o have blocks of at most 16 channels on their diagonals, and zeros elsewhere, so that the equations of a wide
head are small too.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..merging import kernels
from ..merging.grid import Grid
from ..merging.plan import MergePlan, to_exact, without_autocast

_TINY = 1e-12
_LEAST_SPREAD = 1e-3  # relative spread below which a feature counts as constant: in half precision the rest is rounding
_CONVERGED = 1 - 1e-6
# The number of exact answers: at most a sixteenth of the tokens, but at least 32. On heads of up to 32 channels 64 have
# up to a quarter more error than 128, and 256 have up to a fifth less (``python -m benchmarks.renewal``).
_MOST_IF_NARROW, _MOST, _NARROW, _FEWEST, _TOKENS_PER_ANSWER = 128, 256, 32, 32, 16
PENALTY = 0.2  # counts as so many samples for each unknown
_WIDEST_BLOCK = 16  # channels of the query, and of the answer, that are fitted together

Pair = tuple[Tensor, Tensor]  # keys and values, (batch, tokens, heads * head_dim)


class Correction(NamedTuple):
    """An affine map, for each head, of a query and its output over merged keys. Its result is added to that output."""

    # that of the query above that of the output, (batch * heads, 2 * head_dim, head_dim); the latter is zero outside of
    # blocks of `block_of` channels on its diagonal, and so is what was fitted of the former
    matrix: Tensor
    constant: Tensor  # (batch * heads, 1, head_dim)
    num_queries: int = 0  # number of tokens to whose exact outputs it was fitted; 0 if not recorded
    # mean squares of what it leaves of each exact output if fitted to the others, and of outputs over merged keys, of
    # each block, float32 (batch * heads * blocks, 2); None if not known
    error: Tensor | None = None


def pick_queries(grid: Grid, width: int, device: torch.device) -> tuple[Tensor]:
    """Choose the tokens to whose exact outputs the correction is fitted: the middles of equal cells of the grid.

    There are about a sixteenth of the tokens: from about 32 (or all, if fewer) to 128, or to 256 for heads of more than
    32 channels (`width`). Their numbers, ascending, int64 ``(1, queries)``, are in a tuple for `grid.cached_result`.
    """
    return (pick_middles(grid, count_answers(grid.height * grid.width, width), device)[None],)


def count_answers(tokens: int, width: int) -> int:
    """Return about how many of so many `tokens` are answered exactly, for heads of `width` channels."""
    return min(_MOST_IF_NARROW if width <= _NARROW else _MOST, max(_FEWEST, tokens // _TOKENS_PER_ANSWER), tokens)


def block_of(width: int) -> int:
    """Return how many channels of a head of `width` are fitted together: the most up to 16 that divide the width."""
    return max(part for part in range(1, min(width, _WIDEST_BLOCK) + 1) if width % part == 0)


def pick_middles(grid: Grid, count: int, device: torch.device) -> Tensor:
    """Return the numbers of the tokens in the middles of about `count` equal cells, ascending, int64 ``(cells,)``."""
    rows = min(grid.height, max(1, round((count * grid.height / grid.width) ** 0.5)))
    columns = min(grid.width, max(1, count // rows))
    down = (torch.arange(rows, device=device) * 2 + 1) * grid.height // (2 * rows)
    right = (torch.arange(columns, device=device) * 2 + 1) * grid.width // (2 * columns)
    return (down[:, None] * grid.width + right).flatten()


def fit_correction(
    q: Tensor, places: Tensor, keys_and_values: Pair, plan: MergePlan, scale: float
) -> tuple[Correction, Pair]:
    """Merge keys and values by `plan`; return the correction of what attention loses by this, and the merged pair.

    `q` are queries, ``(batch, tokens, heads, head_dim)``, of which those with the numbers `places`, int64
    ``(queries,)``, are answered exactly, such as those of `pick_queries`; `scale` is the factor of the logits. Keys and
    values are ``(batch, tokens, heads * head_dim)``. The correction, in the dtype of `q`, is zero if every group has a
    single token. Sums and solutions are in float32, or float64.
    """
    heads, count = q.shape[2], places.shape[0]
    block = block_of(q.shape[3])
    with without_autocast(q):
        keys, values = (tensor.to(q.dtype) for tensor in keys_and_values)
        *pair, exact = plan.merge_pair(keys, values, exact=True)
        same = max(_LEAST_SPREAD, torch.finfo(q.dtype).eps)
        if kernels.corrects(q) and not kernels.needs_gradient(q, keys, values):
            sizes, penalty = plan.log_sizes(q.dtype), PENALTY * 2 * block / count
            answers = kernels.answer(q, places, keys, values, *pair, sizes, plan.group, exact, scale)
            correction = answers and kernels.ridge(
                q, places, answers, block, inverse_steps(penalty, 2 * block), penalty, same**2
            )
            if correction:
                return Correction(*correction[:2], count, correction[2]), tuple(pair)
        queries = q[:, places].transpose(1, 2)
        merged = to_exact(_attend(queries, *pair, heads, scale, plan.log_sizes(q.dtype)[:, None, None]))
        left = to_exact(_attend(queries, keys, values, heads, scale)) - merged
        first = first_order(keys, values, exact, plan, heads, scale)
        queries, merged, left, first = (part.flatten(0, 1) for part in (queries.to(first.dtype), merged, left, first))
        left = torch.baddbmm(left, queries, first, alpha=-1)
        queries, merged, left = (_in_blocks(part, block) for part in (queries, merged, left))
        weights, constant, rest = _ridge(queries, merged, left, same)
        # 0 for blocks in which merging loses nothing: there the rest is rounding
        lost = _in_blocks(first, block).flatten(2).any(2).to(first.dtype)
        of_query, of_answer = map(_on_diagonal, (weights * lost[..., None, None]).split(block, 2))
        matrix = torch.cat([first + of_query, of_answer], 1)
        constant = (constant * lost[..., None, None]).flatten(1)[:, None]
        squares = torch.stack([rest * lost, merged.square().mean((2, 3))], 2).flatten(0, 1)
        return Correction(matrix.to(q.dtype), constant.to(q.dtype), count, squares), tuple(pair)


def _in_blocks(rows: Tensor, block: int) -> Tensor:
    """Return a view of ``(heads, rows, width)`` as ``(heads, width / block, rows, block)``."""
    return rows.unflatten(2, (-1, block)).transpose(1, 2)


def _on_diagonal(blocks: Tensor) -> Tensor:
    """Return matrices ``(heads, blocks * n, blocks * n)`` with ``(heads, blocks, n, n)`` on their diagonals."""
    count = blocks.shape[1]
    if count == 1:
        return blocks[:, 0]
    places = torch.arange(count, device=blocks.device)
    own = (places[:, None] == places)[:, None, :, None]
    return (blocks[:, :, :, None] * own).flatten(3, 4).flatten(1, 2)


def first_order(keys: Tensor, values: Tensor, means: Tensor, plan: MergePlan, heads: int, scale: float) -> Tensor:
    """Return the matrix M of each head for the correction of first order, which adds ``q M`` to a query's output.

    M, ``(batch, heads, head_dim, head_dim)``, is ``scale / tokens`` times the sum of ``k^T (v - v_g)`` over all tokens.
    ``v_g`` is the token's row of `means`, the groups' mean values. M and `means` are float32 or float64.
    """
    # in each group the differences of values from their mean add up to 0, so the mean key need not be subtracted
    spread = _by_head(to_exact(values) - plan.unmerge(means), heads)
    return _by_head(to_exact(keys), heads).transpose(2, 3) @ spread * (scale / keys.shape[1])


def _attend(q: Tensor, keys: Tensor, values: Tensor, heads: int, scale: float, bias: Tensor | None = None) -> Tensor:
    """Attend to flat keys and values, with queries by head, by torch's own function, so that no host's hook sees it."""
    attend = torch._C._nn.scaled_dot_product_attention
    return attend(q, _by_head(keys, heads), _by_head(values, heads), bias, scale=scale)


def _ridge(q: Tensor, merged: Tensor, left: Tensor, same: float = _LEAST_SPREAD) -> tuple[Tensor, Tensor, Tensor]:
    """Fit `left`, exact outputs minus `merged`, by an affine function of q and merged: weights, a constant, its error.

    The arguments are ``(heads, blocks, queries, n)``, weights ``(heads, blocks, 2n, n)``, those of q first, the
    constant ``(heads, blocks, 1, n)``. The error, ``(heads, blocks)``, is the mean square of what remains of each
    query's `left` if the others alone are fitted: its residual divided by 1 minus its leverage.

    For the fit, q and merged are centred and scaled to an average variance of 1; a spread below the share `same` of the
    size limits the scale, for rounding alone would get unlimited weights and gradients. The constant has no penalty.
    """
    features = torch.cat([q, merged], -1)
    mean, average = features.mean(2, keepdim=True), left.mean(2, keepdim=True)
    x = features - mean
    count, unknowns = x.shape[2:]
    transposed = x.transpose(2, 3)
    normal, cross = transposed @ x, transposed @ left  # sums, not means: the scaling below cancels the divisor
    energy, size = (total.unflatten(2, (2, -1)).mean(3, keepdim=True)
                    for total in (normal.diagonal(dim1=2, dim2=3), features.square().sum(2)))  # fmt: skip
    energy = torch.maximum(energy, size * same**2).clamp(min=_TINY)
    unit = energy.rsqrt().expand(-1, -1, -1, unknowns // 2).flatten(2)[..., None]
    solution = inverse(normal * unit * unit.transpose(2, 3), PENALTY * unknowns / count, unknowns)
    weights, scaled = unit * (solution @ (unit * cross)), x * unit.transpose(2, 3)
    leverage = ((scaled @ solution) * scaled).sum(3, keepdim=True) + 1 / count
    rest = (left - average - x @ weights) / (1 - leverage)
    return weights, average - mean @ weights, rest.square().mean((2, 3))


def inverse(matrix: Tensor, penalty: float, most: float) -> Tensor:
    """Return the inverse of ``matrix + penalty I``; eigenvalues of `matrix`, ``(batch, heads, n, n)``, are 0 to `most`.

    This is Newton's iteration (Schulz 1933), with each step scaled for the known bounds of the eigenvalues (Pan and
    Schreiber 1991, section 2); its relative error before rounding is at most 1e-6. It needs only products: some
    backends have no solver, some solvers wait for the device.
    """
    places = torch.arange(matrix.shape[-1], device=matrix.device)
    unit = (places[:, None] == places).to(matrix.dtype)  # DirectML has no eye
    regular = torch.add(matrix, unit, alpha=penalty).flatten(0, 1)
    step = 2 / (penalty + (most + penalty))
    inverse = torch.sub(2 * step * unit, regular, alpha=step * step)
    for step in _scales(penalty, most):
        inverse = torch.baddbmm(inverse, inverse, regular @ inverse, beta=2 * step, alpha=-step * step)
    return inverse.view_as(matrix)


def inverse_steps(penalty: float, most: float) -> int:
    """Return the number of steps, each of two products, that `inverse` takes."""
    return len(_scales(penalty, most))


@cache
def _scales(penalty: float, most: float) -> tuple[float, ...]:
    """Return the scale of each of Newton's steps after the first guess."""
    low, high, scales = penalty, most + penalty, []  # bounds of the eigenvalues of the matrix
    low = 4 * low * high / (low + high) ** 2  # lower bound of those of its product with the guess; the upper is 1
    while low < _CONVERGED:
        scales.append(2 / (low + 1.0))
        low = 4 * low / (low + 1.0) ** 2
    return tuple(scales)


def _by_head(flat: Tensor, heads: int) -> Tensor:
    """Return a view of ``(batch, tokens, heads * head_dim)`` as ``(batch, heads, tokens, head_dim)``."""
    return flat.unflatten(-1, (heads, -1)).transpose(1, 2)
