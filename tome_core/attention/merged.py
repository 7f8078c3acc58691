"""Attention with merged keys and values: what an adapter says of one call, and what is computed in its place.

Proportional attention lets a merged key weigh as much as the tokens it stands for: attention over keys of which the
j-th is repeated ``n_j`` times is attention over the keys alone with ``log n_j`` added to their logits (ToMe, arXiv
2210.09461, section 3). If a function adds no bias, torch's own function answers in its place: with a sixteenth of the
keys that costs less than the other with all of them.

Intermediate tensors are made for some heads, or some tokens, at a time, so that merging needs no more memory than the
unmerged call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..merging import kernels
from ..merging.grid import Layout, reuse, tokens_in
from ..merging.plan import MergePlan
from .correction import Correction, Pair, fit_correction, pick_asked

BIAS, OWN_BIAS, UNSIZED = "bias", "bias, by torch's own function", "without sizes"
_HELD = 16 << 20  # bytes of what is made for some heads or tokens at a time, a few times over
_AT_ONCE = 64 << 20  # bytes in float32 of keys that merge in one piece: SDXL's at 1024 px do, a film's do not


class Attention(NamedTuple):
    """One self-attention call, as its host would compute it.

    q, k, v: views ``[B, S, H, d]`` of all tokens, after norms and positions. k and v may have fewer heads, each of
    which serves several of the queries' in a row. function: ``(q, k, v, bias) -> out``, the host's own, all of this
    shape, bias ``[B, 1, 1, G]`` or None. scale: what the logits are multiplied by. takes_bias: does the function add a
    bias?
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    function: Callable[..., torch.Tensor]
    scale: float
    takes_bias: bool = True


class Merge(NamedTuple):
    """How the keys and values of an attention merge.

    proportional: sizes count. queries: they merge by the same plan.
    """

    plan: MergePlan
    proportional: bool = True
    queries: bool = False
    correction: Correction | None = None


def attend(attention: Attention, how: Merge, made: Pair | None = None) -> tuple[torch.Tensor, str]:
    """``softmax(scale q k^T + log n) v`` for all queries with merged keys and values; and the way of the sizes.

    Args:
        attention: the unmerged call.
        how: the plan, and what else holds.
        made: keys and values ``[B, G, H*d]`` that the plan has merged already, or None.

    Returns:
        The output ``[B, S, H, d]``; `BIAS`, `OWN_BIAS`, or `UNSIZED`.
    """
    q, k, v, function, scale, takes_bias = attention
    plan, batch, heads = how.plan, k.shape[0], k.shape[2]
    if made is None and (k.device.type in kernels.DEVICES or k.numel() * 4 <= _AT_ONCE):
        made = plan.merge_pair(k.flatten(2), v.flatten(2))[:2]
    if made is not None:
        shape = batch, plan.num_groups, heads, -1
        k, v = made[0].view(shape), made[1].view(shape)
    else:
        k, v = merge(k, plan), merge(v, plan)
    if how.queries:
        q = merge(q, plan)
    if not how.proportional:
        out, way = function(q, k, v, None), UNSIZED
    else:
        bias = plan.derived.get(("logits", q.dtype))
        bias = (plan.logits_in(q.dtype) if bias is None else bias)[:, None, None]
        bias = bias if bias.shape[0] == q.shape[0] else bias.expand(q.shape[0], -1, -1, -1)
        out, way = (function(q, k, v, bias), BIAS) if takes_bias else (_by_torch(q, k, v, bias, scale), OWN_BIAS)
    if how.correction is not None:
        small = out.numel() * out.element_size() <= _HELD
        out = (add_correction if small else _correct)(out, q, how.correction)
    if how.queries:
        out = plan.unmerge(out.flatten(2)).unflatten(2, out.shape[2:])
    return out, way


def correction_of(attention: Attention, plan: MergePlan, layout: Layout) -> tuple[Correction, Pair | None]:
    """The correction of a plan for these keys and values, see `correction.fit_correction`.

    Returns:
        The correction; and keys and values ``[B, G, H*d]`` as the plan merges them, None if they have fewer heads than
        the queries.
    """
    q, k, v = attention[:3]
    (places,) = reuse(pick_asked_in, q, layout, q.shape[1], q.shape[3])
    asking = q[:, places]
    shares = q.shape[2] // k.shape[2]
    found: list[tuple[Correction, Pair]] = []
    for first, last in [(0, k.shape[2])] if shares == 1 and kernels.fit_whole(q) else _some_heads(k, shares):
        pair = tuple(one[:, :, first:last] for one in (k, v))
        if shares > 1:
            pair = tuple(one.repeat_interleave(shares, 2) for one in pair)
        own = asking[:, :, first * shares : last * shares]
        flat = tuple(one.flatten(2) for one in pair)
        found.append(fit_correction(own.flatten(2), flat, plan, own.shape[2], attention.scale))
    merged = None if shares > 1 else tuple(_join([pair[part] for _, pair in found], 2) for part in (0, 1))
    batch = q.shape[0]
    matrix, constant = (
        _join([one[part].unflatten(0, (batch, -1)) for one, _ in found], 1).flatten(0, 1) for part in (0, 1)
    )
    return Correction(matrix, constant, len(places)), merged


def pick_asked_in(layout: Layout, tokens: int, width: int, device: torch.device) -> tuple[torch.Tensor]:
    """The tokens of a sequence that are answered exactly: int64 ``[n]``, the picture's, and a quarter as many others.

    Text is asked too because a trained model's queries for it may be of another kind than the picture's.
    """
    (places,) = pick_asked(layout.grid, width, device)
    last, beside = layout.first + tokens_in(layout), tokens - tokens_in(layout)
    count = min(beside, places.shape[1] // 4)
    others = (torch.arange(count, device=device) * 2 + 1) * beside // max(1, 2 * count)
    others = others + (others >= layout.first) * (last - layout.first)
    return (torch.cat([places[0] + layout.first, others]),)


def merge(x: torch.Tensor, plan: MergePlan) -> torch.Tensor:
    """``[B, S, H, d]`` to ``[B, G, H, d]``."""
    parts = (plan.merge(x[:, :, a:b].flatten(2)).unflatten(2, (b - a, -1)) for a, b in _some_heads(x))
    return _join(list(parts), 2)


def add_correction(out: torch.Tensor, q: torch.Tensor, correction: Correction) -> torch.Tensor:
    """``out + q M1 + out M2 + b`` in each head. out, q: ``[B, N, H, d]``."""
    told, (matrix, constant, _) = out, correction
    if not matrix.dtype == out.dtype == q.dtype:  # of another step's autocast
        told, matrix, constant = (one.to(q.dtype) for one in (out, matrix, constant))
    elif out.device.type in kernels.DEVICES and kernels.ready_for_halves(out) \
            and not kernels.needs_gradient(out, q, matrix, constant):  # fmt: skip
        found = kernels.correct(out.flatten(2), q.flatten(2), matrix, constant)
        if found is not None:
            return found.view_as(out)
    batch, tokens, heads, _ = q.shape
    told = torch.cat([q.transpose(1, 2), told.transpose(1, 2)], -1).flatten(0, 1)
    more = torch.baddbmm(constant, told, matrix).view(batch, heads, tokens, -1)
    return out + more.transpose(1, 2)


def _by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    shares = q.shape[1] // k.shape[1]
    if shares > 1:
        k, v = (one.repeat_interleave(shares, 1) for one in (k, v))
    return torch._C._nn.scaled_dot_product_attention(q, k, v, bias, scale=scale).transpose(1, 2)


def _correct(out: torch.Tensor, q: torch.Tensor, correction: Correction) -> torch.Tensor:
    """``out [B, S, H, d]`` corrected, in pieces and in place if no gradient is needed."""
    if torch.is_grad_enabled() and (out.requires_grad or q.requires_grad):
        return add_correction(out, q, correction)
    step = max(1, _HELD // (out[:, :1].numel() * out.element_size()))
    for start in range(0, out.shape[1], step):
        told = out[:, start : start + step]
        told.copy_(add_correction(told, q[:, start : start + step], correction))
    return out


def _some_heads(x: torch.Tensor, times: int = 1) -> Iterator[tuple[int, int]]:
    """First and last of so many heads of ``[B, S, H, d]`` as hold `_HELD` bytes in float32, ``times`` over."""
    heads = x.shape[2]
    step = max(1, _HELD // (4 * times * x[:, :, 0].numel()))
    for first in range(0, heads, step):
        yield first, min(first + step, heads)


def _join(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
