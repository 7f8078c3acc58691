"""Attention over merged keys and values, taken apart where its inside is known."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ..plan import MergePlan
from .known import KnownAttention
from .sizes import bias_is_cheaper, bias_of, extra_channels, narrow, widen

BIAS, WIDER_HEADS, UNSIZED = "bias", "wider heads", "without sizes"


class Attended(NamedTuple):
    """What came of it: ``out [B, N, C]``, and the way on which keys got to know their sizes."""

    out: torch.Tensor
    way: str


def attend_merged(
    known: KnownAttention, module: nn.Module, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    sizes: MergePlan | None, kwargs: dict[str, Any],
) -> Attended:  # fmt: skip
    """``to_out(softmax(scale q k^T + log n) v)`` with the module's projections and the host's own function.

    x: ``[B, N, C]``, what queries are made from. keys, values: ``[B, G, C]``, merged. sizes: the plan that merged them,
    None where its sizes are not to count. kwargs: the call's other arguments.
    """
    q, k, v = known.project(module, x, keys, values, kwargs)
    if sizes is None:
        return Attended(known.finish(module, known.attend(module, q, k, v, None, kwargs)), UNSIZED)
    if known.takes_bias(module, q, k, kwargs) and bias_is_cheaper(q.shape[1], k.shape[1], q.device.type):
        out = known.attend(module, q, k, v, bias_of(sizes, q), kwargs)
        return Attended(known.finish(module, out), BIAS)
    heads = known.heads(module)
    width = q.shape[-1] // heads
    extra = extra_channels(width)
    q, k, v = widen(q, k, v, heads, known.scale(module, width), known.scale(module, width + extra), sizes)
    out = narrow(known.attend(module, q, k, v, None, kwargs), heads, extra)
    return Attended(known.finish(module, out), WIDER_HEADS)
