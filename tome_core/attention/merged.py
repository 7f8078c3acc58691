"""Attention over a sequence whose picture's keys and values are merged: from q, k and v alone, by anybody's function.

Heads are never widened: transformers' are 64 or 128 wide, beyond which flash kernels run a wider class. A function that
takes no bias is not asked, and torch's own answers: with a sixteenth of the keys that costs less than its own with all.
What is made on the way is made for some heads, or some tokens, at a time, so that a film's tokens fit where they did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..attention.core import BIAS, UNSIZED, Attended, add_correction
from ..attention.correction import Correction, Fitted, Pair, fit_correction, pick_asked
from ..attention.sizes import bias_of
from ..merging.grid import reuse
from ..merging.plan import MergePlan
from .layout import Layout, Tensors, by_token, in_form, tokens_in

OWN_BIAS = "bias, by torch's own function"
_HELD = 16 << 20  # bytes of what is made for some heads or tokens at a time, a few times over


class Host(NamedTuple):
    """A host's attention. function: ``(q, k, v, bias) -> out`` in the host's form, bias ``[B, 1, 1, G]`` or None.

    form: of q, k and v; out_form: of what it returns. takes_bias: does it add a bias to the scaled logits? scale: by
    which it scales.
    """

    function: Callable[..., torch.Tensor]
    form: str
    out_form: str
    scale: float
    takes_bias: bool = True


def correction_of(
    tensors: Tensors, plan: MergePlan, layout: Layout, scale: float
) -> tuple[Correction, Pair | None]:
    """What the plan loses of these keys and values, for queries of all tokens; see `correction.fit_correction`.

    And keys and values merged, ``[B, G, H*d]``; None where they have fewer heads than the queries.
    """
    q, k, v = tensors
    (places,) = reuse(pick_asked_in, q, layout, q.shape[1], q.shape[3])
    asking = q[:, places]
    shares = q.shape[2] // k.shape[2]
    found: list[Fitted] = []
    for first, last in _some_heads(k, shares):
        pair = tuple(one[:, :, first:last] for one in (k, v))
        if shares > 1:
            pair = tuple(one.repeat_interleave(shares, 2) for one in pair)
        own = asking[:, :, first * shares : last * shares]
        found.append(fit_correction(own.flatten(2), tuple(one.flatten(2) for one in pair), plan, own.shape[2], scale))
    merged_pair = None if shares > 1 else tuple(_join([one.merged[part] for one in found], 2) for part in (0, 1))
    batch = q.shape[0]
    matrix, constant = (
        _join([one.correction[part].unflatten(0, (batch, -1)) for one in found], 1).flatten(0, 1) for part in (0, 1)
    )
    return Correction(matrix, constant), merged_pair


def pick_asked_in(layout: Layout, tokens: int, width: int, device: torch.device) -> tuple[torch.Tensor]:
    """Which of a sequence's tokens are answered exactly: int64 ``[n]``, of the picture and, a quarter as many, others.

    Text is asked too because a trained model's queries for it may be of another kind than the picture's.
    """
    (places,) = pick_asked(layout.grid, width, device)
    last, beside = layout.first + tokens_in(layout), tokens - tokens_in(layout)
    count = min(beside, places.shape[1] // 4)
    others = (torch.arange(count, device=device) * 2 + 1) * beside // max(1, 2 * count)
    others = others + (others >= layout.first) * (last - layout.first)
    return (torch.cat([places[0] + layout.first, others]),)


def attend(
    host: Host, tensors: Tensors, plan: MergePlan, proportional: bool = True, correction: Correction | None = None,
    made: Pair | None = None,
) -> Attended:  # fmt: skip
    """``softmax(scale q k^T + log n) v`` for all queries, with merged keys and values, in the host's form.

    proportional: is it proportional attention? correction: the plan's, where it has one. made: keys and values
    ``[B, G, H*d]`` as the plan merges them, where they are there.
    """
    q, k, v = tensors
    heads = k.shape[2]
    k, v = (merge(one, plan) for one in (k, v)) if made is None else (one.unflatten(2, (heads, -1)) for one in made)
    bias = bias_of(plan, q)[:, None] if proportional else None  # [B, 1, 1, G]
    if bias is None or host.takes_bias:
        out = host.function(in_form(q, host.form), in_form(k, host.form), in_form(v, host.form), bias)
        way = UNSIZED if bias is None else BIAS
    else:
        out, way = in_form(_by_torch(Tensors(q, k, v), bias, host.scale), host.out_form), OWN_BIAS
    if correction is not None:
        told = by_token(out, host.out_form, q.shape[2])
        out = in_form(_correct(told, q, correction), host.out_form)
    return Attended(out, way)


def merge(x: torch.Tensor, plan: MergePlan) -> torch.Tensor:
    """``[B, S, H, d]`` to ``[B, G, H, d]``."""
    return _join([plan.merge(x[:, :, a:b].flatten(2)).unflatten(2, (b - a, -1)) for a, b in _some_heads(x)], 2)


def _by_torch(tensors: Tensors, bias: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (one.transpose(1, 2) for one in tensors)
    shares = q.shape[1] // k.shape[1]
    if shares > 1:
        k, v = (one.repeat_interleave(shares, 1) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v, bias, scale=scale).transpose(1, 2)


def _correct(out: torch.Tensor, q: torch.Tensor, correction: Correction) -> torch.Tensor:
    """``out [B, S, H, d]`` corrected, in place where nobody needs a gradient."""
    if torch.is_grad_enabled() and (out.requires_grad or q.requires_grad):
        return add_correction(out.flatten(2), q.flatten(2), correction).view_as(out)
    tokens = out.shape[1]
    step = max(1, _HELD // (out[:, :1].numel() * out.element_size()))
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        told = out[:, rows]
        told.copy_(add_correction(told.flatten(2), q[:, rows].flatten(2), correction).view_as(told))
    return out


def _some_heads(x: torch.Tensor, times: int = 1) -> Iterator[tuple[int, int]]:
    """First and last of so many heads of ``[B, S, H, d]`` as hold `_HELD` bytes in float32, ``times`` over."""
    heads = x.shape[2]
    step = max(1, _HELD // (4 * times * x[:, :, 0].numel()))
    for first in range(0, heads, step):
        yield first, min(first + step, heads)


def _join(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
