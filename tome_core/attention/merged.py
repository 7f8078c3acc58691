"""Attention with merged keys and values: the description of a call, and the computation that replaces it.

Proportional attention lets a merged key weigh as much as its tokens did. If the j-th key is repeated ``n_j`` times,
attention over all repetitions equals attention over the keys alone with ``log n_j`` added to their logits (ToMe, arXiv
2210.09461, section 3). If the host's function cannot add a bias, torch's own function runs instead: with a sixteenth of
the keys it is faster than the host's function with all of them. Intermediate tensors are computed for some heads or
some tokens at a time, so merging needs no more memory than the unmerged call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..merging import kernels
from ..merging.grid import Layout, cached_result, tokens_in
from ..merging.plan import MergePlan
from .correction import Correction, Pair, block_of, fit_correction, pick_queries

BIAS, OWN_BIAS, UNSIZED = "bias", "bias, by torch's own function", "without sizes"
_HELD = 16 << 20  # bytes of an intermediate tensor for some heads or tokens, of which a few exist at a time
_AT_ONCE = 64 << 20  # bytes in float32 up to which keys merge in one piece: SDXL's at 1024 px do, a film's do not


class Attention(NamedTuple):
    """A self-attention call: its tensors, and the function of the host, which runs the model, for its output."""

    q: torch.Tensor  # of all tokens, after norms and position encodings: a view (batch, tokens, heads, head_dim)
    k: torch.Tensor  # of the same form; may have fewer heads, each of which serves several consecutive heads of `q`
    v: torch.Tensor  # of the shape of `k`
    # takes q, k, v and a bias (batch, 1, 1, keys) or None, and returns an output of the shape of q
    function: Callable[..., torch.Tensor]
    scale: float  # factor of the logits in `function`
    takes_bias: bool = True  # `function` adds the bias to the logits; if False, it is only called with None


class MergeOptions(NamedTuple):
    """The settings with which an attention call merges."""

    plan: MergePlan  # the groups of tokens whose keys and values merge
    proportional: bool = True  # add the logarithm of a group's size to its key's logits
    queries: bool = False  # merge the queries by the same plan, and unmerge the output; if False, keep all queries
    correction: Correction | None = None  # is added to the output


def attend(attention: Attention, merging: MergeOptions, merged_pair: Pair | None = None) -> tuple[torch.Tensor, str]:
    """Compute attention with merged keys and values, ``softmax(scale q k^T + log n) v``, and add any correction.

    n are the sizes of groups; ``log n`` is left out without `merging.proportional`. `merged_pair` are keys and values
    that are merged already; None to merge here. If queries merge too, the output is corrected and then unmerged.

    Returns:
        The output ``(batch, tokens, heads, head_dim)``, for every token. The way in which sizes were used: `BIAS` if
        the host's function added their logarithms, `OWN_BIAS` if torch's function ran instead because the host's takes
        no bias, `UNSIZED` without proportional attention.
    """
    q, k, v, function, scale, takes_bias = attention
    plan, batch, heads = merging.plan, k.shape[0], k.shape[2]
    if merged_pair is None and (k.device.type in kernels.DEVICES or k.numel() * 4 <= _AT_ONCE):
        merged_pair = plan.merge_pair(k.flatten(2), v.flatten(2))[:2]
    if merged_pair is not None:
        shape = batch, plan.num_groups, heads, -1
        k, v = merged_pair[0].view(shape), merged_pair[1].view(shape)
    else:
        k, v = merge(k, plan), merge(v, plan)
    if merging.queries:
        q = merge(q, plan)
    if not merging.proportional:
        out, way = function(q, k, v, None), UNSIZED
    else:
        bias = plan.cache.get(("logits", q.dtype))
        bias = (plan.log_sizes(q.dtype) if bias is None else bias)[:, None, None]
        bias = bias if bias.shape[0] == q.shape[0] else bias.expand(q.shape[0], -1, -1, -1)
        if takes_bias:
            out, way = function(q, k, v, bias), BIAS
        else:
            out, way = _attend_by_torch(q, k, v, bias, scale), OWN_BIAS
    if merging.correction is not None:
        out = add_correction(out, q, merging.correction)
    if merging.queries:
        out = plan.unmerge(out.flatten(2)).unflatten(2, out.shape[2:])
    return out, way


def correction_of(attention: Attention, plan: MergePlan, layout: Layout) -> tuple[Correction, Pair | None]:
    """Return the correction, see `fit_correction`, of a call that merges by a plan, from `pick_queries_in`'s tokens.

    The second result is the merged keys and values; None if these have fewer heads than the queries.
    """
    q, k, v = attention[:3]
    (places,) = cached_result(pick_queries_in, q, layout, q.shape[1], q.shape[3])
    shares = q.shape[2] // k.shape[2]
    in_one = shares == 1 and kernels.corrects(q) and not kernels.needs_gradient(q)
    fits: list[tuple[Correction, Pair]] = []
    for first, last in [(0, k.shape[2])] if in_one else _runs_of_heads(k, shares):
        pair = tuple(tensor[:, :, first:last] for tensor in (k, v))
        if shares > 1:
            pair = tuple(tensor.repeat_interleave(shares, 2) for tensor in pair)
        flat = tuple(tensor.flatten(2) for tensor in pair)
        fits.append(fit_correction(q[:, :, first * shares : last * shares], places, flat, plan, attention.scale))
    merged = None if shares > 1 else tuple(_join([pair[part] for _, pair in fits], 2) for part in (0, 1))
    batch = q.shape[0]
    matrix, constant, error = (
        _join([part.unflatten(0, (batch, -1)) for part in parts], 1).flatten(0, 1)
        for parts in zip(*((fit.matrix, fit.constant, fit.error) for fit, _ in fits), strict=True)
    )
    return Correction(matrix, constant, len(places), error), merged


def pick_queries_in(layout: Layout, tokens: int, width: int, device: torch.device) -> tuple[torch.Tensor]:
    """Return tokens to fit a correction to, int64 ``(queries,)`` in a tuple for `grid.cached_result`.

    They are those of `pick_queries` for the picture, then up to a quarter as many others, evenly spread: the queries of
    text may differ in kind. `tokens` is the length of the sequence, `width` the channels of a head.
    """
    (places,) = pick_queries(layout.grid, width, device)
    last, num_others = layout.first + tokens_in(layout), tokens - tokens_in(layout)
    count = min(num_others, places.shape[1] // 4)
    others = (torch.arange(count, device=device) * 2 + 1) * num_others // max(1, 2 * count)
    others = others + (others >= layout.first) * (last - layout.first)
    return (torch.cat([places[0] + layout.first, others]),)


def merge(x: torch.Tensor, plan: MergePlan) -> torch.Tensor:
    """Return the groups' means ``(batch, groups, heads, d)`` of ``(batch, tokens, heads, d)``, some heads at a time."""
    parts = (plan.merge(x[:, :, a:b].flatten(2)).unflatten(2, (b - a, -1)) for a, b in _runs_of_heads(x))
    return _join(list(parts), 2)


def add_correction(out: torch.Tensor, q: torch.Tensor, correction: Correction) -> torch.Tensor:
    """Return ``out + q M1 + out M2 + b`` in each sample's heads, ``(batch, tokens, heads, head_dim)``.

    `out` and `q` have this form; `out` may be overwritten. M1 and M2 are the upper and the lower half of the
    correction's matrix, b its constant.
    """
    matrix, constant = correction[:2]
    if not matrix.dtype == out.dtype == q.dtype:  # the correction is of a step with another autocast
        matrix, constant = matrix.to(q.dtype), constant.to(q.dtype)
    elif out.device.type in kernels.DEVICES and kernels.corrects(q) \
            and not kernels.needs_gradient(out, q, matrix, constant):  # fmt: skip
        corrected = kernels.correct(out, q, matrix, constant, block_of(out.shape[3]))
        if corrected is not None:
            return corrected
    if out.numel() * out.element_size() > _HELD and not kernels.needs_gradient(out, q, matrix, constant):
        step = max(1, _HELD // (out[:, :1].numel() * out.element_size()))
        for start in range(0, out.shape[1], step):
            piece = out[:, start : start + step]
            piece.copy_(add_correction(piece, q[:, start : start + step], correction))
        return out
    batch, tokens, heads, _ = q.shape
    features = torch.cat([q.transpose(1, 2), out.to(q.dtype).transpose(1, 2)], -1).flatten(0, 1)
    change = torch.baddbmm(constant, features, matrix).view(batch, heads, tokens, -1)
    return out + change.transpose(1, 2)


def _attend_by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute attention with torch's function in the form of `Attention`; keys may have fewer heads than queries."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    shares = q.shape[1] // k.shape[1]
    if shares > 1:
        k, v = (tensor.repeat_interleave(shares, 1) for tensor in (k, v))
    return torch._C._nn.scaled_dot_product_attention(q, k, v, bias, scale=scale).transpose(1, 2)


def _runs_of_heads(x: torch.Tensor, times: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of runs of heads: `times` times in float32, a run has at most `_HELD` bytes, or one head."""
    heads = x.shape[2]
    step = max(1, _HELD // (4 * times * x[:, :, 0].numel()))
    for first in range(0, heads, step):
        yield first, min(first + step, heads)


def _join(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate tensors along a dimension; return a single tensor itself."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
