"""Attention over merged keys and values, taken apart where its inside is known."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ..merging import kernels
from ..merging.grid import Grid, reuse
from ..merging.plan import MergePlan, take_rows
from .correction import Correction, Fitted, Pair, fit_correction, pick_asked
from .known import KnownAttention
from .sizes import bias_is_cheaper, bias_of, extra_channels, narrow, widen

BIAS, WIDER_HEADS, UNSIZED = "bias", "wider heads", "without sizes"


class Attended(NamedTuple):
    """What came of it: ``out [B, N, C]``, and the way of proportional attention."""

    out: torch.Tensor
    way: str


class Whole(NamedTuple):
    """One call before anything is merged. x, keys, values: ``[B, N, C]``. q: ``[B, N, H*d]``, where all tokens ask."""

    known: KnownAttention
    module: nn.Module
    x: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    kwargs: dict[str, Any]
    q: torch.Tensor | None = None


def correction_of(whole: Whole, made: Pair, plan: MergePlan, grid: Grid) -> Fitted:
    """What the plan loses of keys and values of all tokens, ``[B, N, H*d]``; see `correction.fit_correction`."""
    known, module, q = whole.known, whole.module, whole.q
    heads = known.heads(module)
    width = made[0].shape[-1] // heads
    (places,) = reuse(pick_asked, whole.x, grid, width)
    if q is None:
        q, places = known.queries(module, take_rows(whole.x, places), whole.kwargs), None
    return fit_correction(q, made, plan, heads, known.scale(module, width), places)


def attend_merged(
    known: KnownAttention, module: nn.Module, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    sizes: MergePlan | None, kwargs: dict[str, Any], correction: Correction | None = None,
    q: torch.Tensor | None = None, merged: Pair | None = None,
) -> Attended:  # fmt: skip
    """``to_out(softmax(scale q k^T + log n) v)`` with the module's projections and the host's own function.

    x: ``[B, N, C]``, what queries are made from. keys, values: ``[B, G, C]``, merged. sizes: the plan that merged them,
    None where its sizes are not to count. kwargs: the call's other arguments. correction: the plan's,
    where it has one. q ``[B, N, H*d]``, merged keys and values ``[B, G, H*d]``: where they are projected already.
    """
    q = known.queries(module, x, kwargs) if q is None else q
    k, v = known.keys_and_values(module, keys, values, kwargs) if merged is None else merged
    heads = known.heads(module)
    width = q.shape[-1] // heads
    if sizes is None:
        out, way = known.attend(module, q, k, v, None, kwargs), UNSIZED
    elif known.takes_bias(module, q, k, kwargs) and bias_is_cheaper(q.shape[1], k.shape[1], width, q.device.type):
        out, way = known.attend(module, q, k, v, bias_of(sizes, q), kwargs), BIAS
    else:
        extra = extra_channels(width)
        wide = widen(q, k, v, heads, known.scale(module, width), known.scale(module, width + extra), sizes)
        out, way = narrow(known.attend(module, *wide, None, kwargs), heads, extra), WIDER_HEADS
    if correction is not None:
        out = add_correction(out, q, correction)
    return Attended(known.finish(module, out), way)


def add_correction(out: torch.Tensor, q: torch.Tensor, correction: Correction) -> torch.Tensor:
    """``out + q M1 + out M2 + b`` in each head. out, q: flat ``[B, N, H*d]``."""
    matrix, constant = correction
    alike = out.device.type in kernels.DEVICES and matrix.dtype == out.dtype == q.dtype
    if alike and kernels.ready_for_halves(out) and not kernels.needs_gradient(out, q, matrix, constant):
        found = kernels.correct(out, q, matrix, constant)
        if found is not None:
            return found
    batch, tokens, _ = q.shape
    heads = matrix.shape[0] // batch
    own, merged = q.view(batch, tokens, heads, -1).transpose(1, 2), out.view(batch, tokens, heads, -1)
    told = torch.cat([own, merged.transpose(1, 2).to(q.dtype)], -1).flatten(0, 1)
    matrix, constant = matrix.to(q.dtype), constant.to(q.dtype)  # they may be of another step's autocast
    more = torch.baddbmm(constant, told, matrix).view(batch, heads, tokens, -1)
    return (merged + more.transpose(1, 2)).flatten(2)
