"""Steps of a correction as one GPU kernel each, as `kernels` has those of a match."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .kernels import ran

# channels of a head whose equations, and whose matrix, fit one program's registers
RIDGE_WIDEST, WIDEST_HEAD = 64, 128


def first_order(
    keys: torch.Tensor, values: torch.Tensor, group: torch.Tensor, means: torch.Tensor, heads: int, scale: float
) -> torch.Tensor | None:
    """Sums over tokens of ``k^T (v - v_g) scale``: float32 ``[P, B*H, d, d]``, to be added up.

    None if it could not run, or heads are too wide. keys, values: ``[B, N, H*d]``, half precision, any strides. group:
    int64 ``[B or 1, N]``. means: of the groups' values, float32 ``[B, G, H*d]``, contiguous. P spans of tokens, which
    depend on N alone. Differences are multiplied in parts that together hold float32's digits.
    """
    batch, tokens, channels = keys.shape
    width, span = channels // heads, _span(tokens)
    if width > WIDEST_HEAD:
        return None
    found = torch.empty(-(-tokens // span), batch * heads, width, width, dtype=torch.float32, device=keys.device)
    group = group.contiguous().expand(batch, -1)
    return found if ran(keys, "first_order", keys, values, group, means, span, scale, found) else None


class Answers(NamedTuple):
    """Of n queries of each head, float32: merged ``[B*H, n, d]``, from merged keys; full ``[P, B*H, n, d]``, from each
    of P spans of all keys; logs ``[P, B*H, n]``, the logarithms of what the weights in each add up to.
    """

    merged: torch.Tensor
    full: torch.Tensor
    logs: torch.Tensor


def answered(
    q: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, merged_keys: torch.Tensor,
    merged_values: torch.Tensor, bias: torch.Tensor, heads: int, scale: float,
) -> Answers | None:  # fmt: skip
    """Attention of a few queries over merged and over all keys, in one kernel; None if it could not run.

    q: ``[B, N, H*d]``, half precision, any strides, as keys and values are. rows: int64 ``[n]``, which of its rows are
    asked. merged_keys, merged_values: ``[B, G, H*d]``, contiguous. bias: of the merged keys, ``[B or 1, G]``, finite.
    All but rows of one dtype. Spans as `first_order` has them, so that few queries keep a whole GPU busy.
    """
    batch, tokens, channels = keys.shape
    width, span, count = channels // heads, _span(tokens), rows.shape[0]
    real = {"dtype": torch.float32, "device": q.device}
    full = torch.empty(-(-tokens // span), batch * heads, count, width, **real)
    found = Answers(torch.empty(full.shape[1:], **real), full, torch.empty(full.shape[:3], **real))
    made = q, rows, keys, values, merged_keys, merged_values, bias.contiguous().expand(batch, -1)
    return found if ran(q, "answered", *made, span, scale, *found) else None


def _span(tokens: int) -> int:
    return max(512, -(-tokens // 32))


def ridge(
    q: torch.Tensor, rows: torch.Tensor, answers: Answers, first: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The correction that `attention.correction` describes, in the dtype of q; None if it could not run.

    q, rows: as `answered` has them, with its answers. first: as `first_order` gives it. d is at most `RIDGE_WIDEST`.
    Returns ``[B*H, 2d, d]`` and ``[B*H, 1, d]``.
    """
    width = first.shape[2]
    matrix = torch.empty(first.shape[1], 2 * width, width, dtype=q.dtype, device=q.device)
    constant = torch.empty(first.shape[1], 1, width, dtype=q.dtype, device=q.device)
    return (matrix, constant) if ran(q, "ridge", q, rows, *answers, first, matrix, constant) else None


def corrected(out: torch.Tensor, q: torch.Tensor, matrix: torch.Tensor, constant: torch.Tensor) -> torch.Tensor | None:
    """``out + q M1 + out M2 + b`` in each head; None if it could not run, or heads are too wide.

    out, q: ``[B, N, H*d]``, half precision. matrix: ``[B*H, 2d, d]``, constant: ``[B*H, 1, d]``, contiguous. All of one
    dtype.
    """
    if matrix.shape[2] > WIDEST_HEAD:
        return None
    to = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    return to if ran(out, "corrected", out, q, matrix, constant, to) else None
