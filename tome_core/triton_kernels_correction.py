"""The kernels of a correction in Triton, and of adding it; `tome_core.triton_kernels` passes them on.

For half precision, which tensor cores multiply; sums and solutions in float32. A model has few widths of heads: each
is compiled as a constant, because rows of 40 channels can be loaded in pieces of 8 only where that is known.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS, _QUERIES = 64, 32
_TINY = tl.constexpr(1e-12)


@triton.jit
def _first_order(
    both, group, means, found, tokens, groups, heads, span, scale,
    both_sample, both_row, both_channel, group_sample,
    width: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: one head, one span of its tokens; the sum over them of ``k^T (v - v_g) scale``."""
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    channel = tl.arange(0, WIDTH)
    held = channel < width
    own = both + sample * both_sample
    first, stop = tl.program_id(1) * span, tl.minimum(tl.program_id(1) * span + span, tokens)
    total = tl.zeros([WIDTH, WIDTH], tl.float32)
    for start in range(first, stop, TOKENS):
        token = start + tl.arange(0, TOKENS)
        there = token < stop
        row = token.to(tl.int64) * both_row
        at_key = own + row[None, :] + (head * width + channel)[:, None] * both_channel
        key = tl.load(at_key, mask=held[:, None] & there[None, :], other=0.0)
        mask = there[:, None] & held[None, :]
        at_value = own + row[:, None] + ((heads + head) * width + channel)[None, :] * both_channel
        value = tl.load(at_value, mask=mask, other=0.0).to(tl.float32)
        number = tl.load(group + sample * group_sample + token, mask=there, other=0) + sample * groups
        at_mean = means + number[:, None] * (2 * heads * width) + ((heads + head) * width + channel)[None, :]
        rest = value - tl.load(at_mean, mask=mask, other=0.0)
        # tensor cores multiply halves exactly; what a value loses to its first part is in the next ones
        for _part in tl.static_range(PARTS):
            part = rest.to(key.dtype)
            total = tl.dot(key, part, total)
            rest = rest - part.to(tl.float32)
    to = found + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * width * width
    mask = held[:, None] & held[None, :]
    tl.store(to + channel[:, None] * width + channel[None, :], total * scale, mask=mask)


@triton.jit
def _told(q, merged, query, column, mask, width: tl.constexpr, q_row, q_channel, merged_row, merged_channel):
    """Queries and merged answers side by side, float32."""
    own = column < width
    left = tl.load(q + query[:, None] * q_row + column[None, :] * q_channel, mask=mask & own[None, :], other=0.0)
    at = merged + query[:, None] * merged_row + (column - width)[None, :] * merged_channel
    return left.to(tl.float32) + tl.load(at, mask=mask & (column >= width)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _ridge(
    q, merged, full, first, matrix, constant, count, heads, spans,
    q_sample, q_row, q_channel, merged_sample, merged_head, merged_row, merged_channel,
    full_sample, full_head, full_row, full_channel,
    width: tl.constexpr, WIDTH: tl.constexpr, UNKNOWNS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """One program: one head. Its normal equations, solved by elimination, which the penalty makes safe without pivots.

    What is multiplied is rounded to the queries' dtype after it is centred: less than what rounded the answers.
    """
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    q += sample * q_sample + head * width * q_channel
    merged += sample * merged_sample + head * merged_head
    full += sample * full_sample + head * full_head
    row, column = tl.arange(0, UNKNOWNS), tl.arange(0, WIDTH)
    unknowns = 2 * width
    held, wide = row < unknowns, column < width
    block = (row < width)[:, None] & wide[None, :]
    known = tl.zeros([UNKNOWNS, WIDTH], tl.float32)  # of first order, below it zeros
    for span in range(0, spans):
        at = first + (span * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * width * width
        known += tl.load(at + row[:, None] * width + column[None, :], mask=block, other=0.0)
    rounded = known.to(q.dtype.element_ty)
    mean = tl.zeros([UNKNOWNS], tl.float32)
    for start in range(0, count, QUERIES):
        query = start + tl.arange(0, QUERIES)
        mask = (query < count)[:, None] & held[None, :]
        mean += tl.sum(_told(q, merged, query, row, mask, width, q_row, q_channel, merged_row, merged_channel), 0)
    mean = mean / count
    normal = tl.zeros([UNKNOWNS, UNKNOWNS], tl.float32)
    cross = tl.zeros([UNKNOWNS, WIDTH], tl.float32)
    left_mean = tl.zeros([WIDTH], tl.float32)
    for start in range(0, count, QUERIES):
        query = start + tl.arange(0, QUERIES)
        there = query < count
        mask = there[:, None] & held[None, :]
        told = _told(q, merged, query, row, mask, width, q_row, q_channel, merged_row, merged_channel)
        narrow = there[:, None] & wide[None, :]
        at_full = full + query[:, None] * full_row + column[None, :] * full_channel
        at_merged = merged + query[:, None] * merged_row + column[None, :] * merged_channel
        left = tl.load(at_full, mask=narrow, other=0.0).to(tl.float32)
        left -= tl.load(at_merged, mask=narrow, other=0.0).to(tl.float32)
        left -= tl.dot(told.to(rounded.dtype), rounded)
        left_mean += tl.sum(left, 0)
        told = tl.where(mask, told - mean[None, :], 0.0).to(rounded.dtype)
        across = tl.trans(told)
        normal = tl.dot(across, told, normal)
        cross = tl.dot(across, left.to(rounded.dtype), cross)
    left_mean = left_mean / count
    energy = tl.sum(tl.where(row[:, None] == row[None, :], normal, 0.0), 1)
    of_q = tl.sum(tl.where(row < width, energy, 0.0), 0) / width
    of_merged = tl.sum(tl.where(row < width, 0.0, energy), 0) / width
    energy = tl.maximum(tl.where(row < width, of_q, of_merged), _TINY)
    unit = tl.where(held, 1.0 / tl.sqrt(energy), 0.0)
    penalty = unknowns / count.to(tl.float32)
    normal = normal * unit[:, None] * unit[None, :] + tl.where(row[:, None] == row[None, :], penalty, 0.0)
    weights = cross * unit[:, None]
    for step in range(0, unknowns):
        is_pivot = row == step
        own = tl.sum(tl.where(is_pivot[:, None], normal, 0.0), 0)
        theirs = tl.sum(tl.where(is_pivot[None, :], normal, 0.0), 1)
        pivot = tl.sum(tl.where(is_pivot, own, 0.0), 0)
        share = tl.where(is_pivot, 1.0 - 1.0 / pivot, theirs / pivot)
        right = tl.sum(tl.where(is_pivot[:, None], weights, 0.0), 0)
        normal -= share[:, None] * own[None, :]
        weights -= share[:, None] * right[None, :]
    weights = weights * unit[:, None]
    known = rounded.to(tl.float32)
    lost = tl.where(tl.max(tl.max(tl.abs(known), 1), 0) > 0, 1.0, 0.0)  # nothing was: then rounding is all
    shift = (left_mean - tl.sum(mean[:, None] * weights, 0)) * lost
    to = matrix + tl.program_id(0).to(tl.int64) * unknowns * width
    mask = held[:, None] & wide[None, :]
    tl.store(to + row[:, None] * width + column[None, :], weights * lost + known, mask=mask)
    tl.store(constant + tl.program_id(0) * width + column, shift, mask=wide)


@triton.jit
def _corrected(
    out, q, matrix, constant, to, tokens, heads, tiles,
    out_sample, out_row, out_channel, q_sample, q_row, q_channel,
    width: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: some tokens of one head. Neighbouring programs share a head's matrix."""
    which = tl.program_id(0) // tiles
    sample, head = (which // heads).to(tl.int64), which % heads
    token = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, WIDTH)
    held = channel < width
    mask = (token < tokens)[:, None] & held[None, :]
    row, column = token.to(tl.int64)[:, None], (head * width + channel)[None, :]
    asked = tl.load(q + sample * q_sample + row * q_row + column * q_channel, mask=mask, other=0.0)
    answer = tl.load(out + sample * out_sample + row * out_row + column * out_channel, mask=mask, other=0.0)
    at = matrix + which.to(tl.int64) * 2 * width * width + channel[:, None] * width + channel[None, :]
    square = held[:, None] & held[None, :]
    more = tl.dot(asked, tl.load(at, mask=square, other=0.0))
    more = tl.dot(answer, tl.load(at + width * width, mask=square, other=0.0), more)
    more += tl.load(constant + which * width + channel, mask=held, other=0.0).to(tl.float32)[None, :]
    at = to + (sample * tokens + row) * (heads * width) + column
    tl.store(at, answer.to(tl.float32) + more, mask=mask)


def _wide(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _warps(width: int) -> int:
    return 4 if width <= 64 else 8


def first_order(
    both: torch.Tensor, group: torch.Tensor, means: torch.Tensor, span: int, parts: int, scale: float,
    found: torch.Tensor,
) -> None:  # fmt: skip
    """See `tome_core.kernels.first_order`; fills ``found``. group: ``[B, N]``, expanded."""
    batch, tokens, _ = both.shape
    spans, programs, width, _ = found.shape
    heads = programs // batch
    _first_order[(programs, spans)](
        both, group, means, found, tokens, means.shape[1], heads, span, scale,
        *both.stride(), group.stride(0),
        width=width, PARTS=parts, WIDTH=_wide(width), TOKENS=_TOKENS, num_warps=_warps(width),
    )  # fmt: skip


def ridge(
    q: torch.Tensor, merged: torch.Tensor, full: torch.Tensor, first: torch.Tensor,
    matrix: torch.Tensor, constant: torch.Tensor,
) -> None:  # fmt: skip
    """See `tome_core.kernels.ridge`; fills ``matrix`` and ``constant``."""
    _, heads, count, width = merged.shape
    _ridge[(matrix.shape[0],)](
        q, merged, full, first, matrix, constant, count, heads, first.shape[0],
        *q.stride(), *merged.stride(), *full.stride(),
        width=width, WIDTH=_wide(width), UNKNOWNS=_wide(2 * width), QUERIES=_QUERIES, num_warps=8,
    )  # fmt: skip


def corrected(
    out: torch.Tensor, q: torch.Tensor, matrix: torch.Tensor, constant: torch.Tensor, to: torch.Tensor
) -> None:
    """See `tome_core.kernels.corrected`; fills ``to``."""
    batch, tokens, _ = out.shape
    heads, width = matrix.shape[0] // batch, matrix.shape[2]
    tiles = triton.cdiv(tokens, _TOKENS)
    _corrected[(tiles * heads * batch,)](
        out, q, matrix, constant, to, tokens, heads, tiles, *out.stride(), *q.stride(),
        width=width, WIDTH=_wide(width), TOKENS=_TOKENS, num_warps=_warps(width),
    )  # fmt: skip
