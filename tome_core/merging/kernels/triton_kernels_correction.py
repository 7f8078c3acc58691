"""The Triton kernels that fit a correction and add it. `triton_kernels` exports them.

Inputs are in half precision, which tensor cores multiply; sums and solutions are in float32. The width of a head is a
constant of a compiled kernel, because rows of 40 channels can be loaded in pieces of 8 only if the width is known.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_kernels_direct import direct

_TOKENS, _QUERIES = 64, 32
_TINY = tl.constexpr(1e-12)
_PARTS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # 11 or 8 bits each hold the 24 of float32


def parts_of(part: torch.dtype, whole: torch.dtype) -> int:
    """Return how many numbers of the dtype `part` hold all digits of a number of the dtype `whole`.

    It is 1 for equal dtypes. Else `whole` is float32, which takes 2 numbers of float16 or 3 of bfloat16.
    """
    return 1 if whole == part else _PARTS[part]


@direct
@triton.jit
def _first_order(
    keys, values, group, means, found, tokens, groups, heads, span, scale,
    keys_sample, keys_row, keys_channel, values_sample, values_row, values_channel, group_sample,
    width: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Fill ``found``, the sums of `kernels.first_order`. A program serves a sample's head (axis 0) and a span (axis 1).

    ``span`` is the number of tokens in a span; PARTS: see `parts_of`. In all kernels of this file, ``width`` is a
    head's number of channels, WIDTH that of a tile (`_padded`), and TOKENS or QUERIES a tile's number of rows.
    """
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    channel = tl.arange(0, WIDTH)
    is_channel = channel < width
    column = head * width + channel
    first, stop = tl.program_id(1) * span, tl.minimum(tl.program_id(1) * span + span, tokens)
    total = tl.zeros([WIDTH, WIDTH], tl.float32)
    for start in range(first, stop, TOKENS):
        token = start + tl.arange(0, TOKENS)
        is_token = token < stop
        row = token.to(tl.int64)
        at_key = keys + sample * keys_sample + row[None, :] * keys_row + column[:, None] * keys_channel
        key = tl.load(at_key, mask=is_channel[:, None] & is_token[None, :], other=0.0)
        mask = is_token[:, None] & is_channel[None, :]
        at_value = values + sample * values_sample + row[:, None] * values_row + column[None, :] * values_channel
        value = tl.load(at_value, mask=mask, other=0.0).to(tl.float32)
        number = tl.load(group + sample * group_sample + token, mask=is_token, other=0) + sample * groups
        rest = value - tl.load(means + number[:, None] * (heads * width) + column[None, :], mask=mask, other=0.0)
        # tensor cores multiply half precision exactly; the next parts hold the digits that the first part lacks
        for _part in tl.static_range(PARTS):
            part = rest.to(key.dtype)
            total = tl.dot(key, part, total)
            rest = rest - part.to(tl.float32)
    to = found + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * width * width
    mask = is_channel[:, None] & is_channel[None, :]
    tl.store(to + channel[:, None] * width + channel[None, :], total * scale, mask=mask)


@triton.jit
def _attend(
    queries, keys, values, bias, first, stop, scale, keys_row, keys_channel, values_row, values_channel,
    column, is_channel,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return outputs for a tile of queries over keys ``first`` to ``stop - 1``, and the logsumexps of their logits.

    ``queries`` is a loaded tile (QUERIES, WIDTH). ``keys``, ``values`` and ``bias``, a number for each key or None, are
    pointers to a sample's. ``column`` has the head's channels in a row, ``is_channel`` masks those beyond the head.
    Results are float32, (QUERIES, WIDTH) and (QUERIES,).
    """
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(first, stop, TOKENS):
        token = start + tl.arange(0, TOKENS)
        is_token = token < stop
        row = token.to(tl.int64)
        at_key = keys + row[None, :] * keys_row + column[:, None] * keys_channel
        scores = tl.dot(queries, tl.load(at_key, mask=is_channel[:, None] & is_token[None, :], other=0.0)) * scale
        if bias is not None:
            scores += tl.load(bias + token, mask=is_token, other=0.0).to(tl.float32)[None, :]
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weight, fade = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        at_value = values + row[:, None] * values_row + column[None, :] * values_channel
        value = tl.load(at_value, mask=is_token[:, None] & is_channel[None, :], other=0.0)
        out = tl.dot(weight.to(value.dtype), value, out * fade[:, None])
        total = total * fade + tl.sum(weight, 1)
        top = higher
    return out / total[:, None], top + tl.log(total)


@direct
@triton.jit
def _attend_sample(
    q, keys, values, merged_keys, merged_values, bias, merged, full, logs,
    count, tokens, groups, heads, tiles, span, scale,
    q_sample, q_row, q_channel, keys_sample, keys_row, keys_channel, values_sample, values_row, values_channel,
    bias_sample, width: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Fill ``merged``, ``full`` and ``logs``. A program serves a tile of a head's queries, and a span or merged keys.

    A head has ``tiles`` tiles of queries. The programs of the merged keys come after those of the last span, and store
    no logsumexps. These three are the fields of `kernels.SampleAttention`.
    """
    head_number = (tl.program_id(0) // tiles).to(tl.int64)
    sample, head = head_number // heads, head_number % heads
    query = tl.program_id(0) % tiles * QUERIES + tl.arange(0, QUERIES)
    channel = tl.arange(0, WIDTH)
    is_channel, column = channel < width, head * width + channel
    is_query = query < count
    mask = is_query[:, None] & is_channel[None, :]
    queries = tl.load(
        q + sample * q_sample + query[:, None] * q_row + column[None, :] * q_channel, mask=mask, other=0.0
    )
    at = query[:, None] * width + channel[None, :]
    part = tl.program_id(1)
    if part < tl.num_programs(1) - 1:
        answer, log = _attend(
            queries, keys + sample * keys_sample, values + sample * values_sample, None, part * span,
            tl.minimum(part * span + span, tokens), scale, keys_row, keys_channel, values_row, values_channel, column,
            is_channel, QUERIES, WIDTH, TOKENS,
        )  # fmt: skip
        number = part * (tl.num_programs(0) // tiles) + head_number
        tl.store(full + number * count * width + at, answer, mask=mask)
        tl.store(logs + number * count + query, log, mask=is_query)
    else:
        first_key = sample * groups * heads * width
        answer, log = _attend(
            queries, merged_keys + first_key, merged_values + first_key, bias + sample * bias_sample, 0, groups, scale,
            heads * width, 1, heads * width, 1, column, is_channel, QUERIES, WIDTH, TOKENS,
        )  # fmt: skip
        tl.store(merged + head_number * count * width + at, answer, mask=mask)


@triton.jit
def _load_features(q, merged, query, column, mask, width: tl.constexpr, q_row, q_channel):
    """Return queries and their outputs over merged keys side by side, in float32, 0 outside the mask.

    ``q`` and ``merged`` are pointers to a head's, ``query`` has the numbers of queries. ``column``, from 0 to
    ``2 * width - 1``, chooses: below ``width`` a query's channel, else an output's. ``mask`` and result have a row for
    each query and a column for each number in ``column``.
    """
    of_q = column < width
    left = tl.load(q + query[:, None] * q_row + column[None, :] * q_channel, mask=mask & of_q[None, :], other=0.0)
    at = merged + query[:, None] * width + (column - width)[None, :]
    return left.to(tl.float32) + tl.load(at, mask=mask & (column >= width)[None, :], other=0.0)


@triton.jit
def _join(
    full, logs, number, programs, query, is_query, column, is_column, count, width: tl.constexpr, SPANS: tl.constexpr
):  # fmt: skip
    """Return outputs over all keys: the sum of the spans' outputs, each times the span's share of the weights.

    ``full`` and ``logs`` are those of `kernels.SampleAttention`, with SPANS spans and ``count`` queries. ``number`` is
    the number of the head among the heads of all samples, ``programs`` the number of these heads. The result, float32,
    has a row for each number in ``query`` and a column for each channel in ``column``; it is 0 outside of ``is_query``
    and ``is_column``.
    """
    top = tl.load(logs + number * count + query, mask=is_query, other=0.0)
    for span in tl.static_range(1, SPANS):
        top = tl.maximum(top, tl.load(logs + (span * programs + number) * count + query, mask=is_query, other=0.0))
    total = tl.zeros_like(top)
    answer = tl.zeros_like(query[:, None] * column[None, :]).to(tl.float32)
    for span in tl.static_range(SPANS):
        row = span * programs + number
        share = tl.exp(tl.load(logs + row * count + query, mask=is_query, other=0.0) - top)
        at = full + row * count * width + query[:, None] * width + column[None, :]
        answer += share[:, None] * tl.load(at, mask=is_query[:, None] & is_column[None, :], other=0.0)
        total += share
    return answer / total[:, None]


@triton.jit
def _left(
    merged, full, logs, known, features, number, programs, query, is_query, column, is_column, count,
    width: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Return what ``features`` times ``known`` leave of outputs over all keys less ``merged``; see `_join`."""
    left = _join(full, logs, number, programs, query, is_query, column, is_column, count, width, SPANS)
    at = merged + query[:, None] * width + column[None, :]
    left -= tl.load(at, mask=is_query[:, None] & is_column[None, :], other=0.0)
    return left - tl.dot(features.to(known.dtype), known)


@direct
@triton.jit
def _ridge(
    q, merged, full, logs, first, matrix, constant, error, count, heads, q_sample, q_row, q_channel,
    width: tl.constexpr, WIDTH: tl.constexpr, UNKNOWNS: tl.constexpr, QUERIES: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Fill the results of `kernels.ridge`. A program solves a head's normal equations by elimination.

    From the queries and ``merged``, it fits what ``first`` leaves of the output over all keys less ``merged``, and adds
    ``first`` to the solution. The penalty makes elimination safe without a search for pivots. Factors are rounded to
    the dtype of the queries after they are centred, which is a smaller error than the rounding of the answers. There
    are ``count`` queries and SPANS spans; UNKNOWNS is ``2 * width``, padded.
    """
    number, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    q += number // heads * q_sample + number % heads * width * q_channel
    merged += number * count * width
    row, column = tl.arange(0, UNKNOWNS), tl.arange(0, WIDTH)
    unknowns = 2 * width
    is_unknown, is_column = row < unknowns, column < width
    block = (row < width)[:, None] & is_column[None, :]
    known = tl.zeros([UNKNOWNS, WIDTH], tl.float32)  # the matrix of first order, with zeros below it
    for span in tl.static_range(SPANS):
        at = first + (span * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * width * width
        known += tl.load(at + row[:, None] * width + column[None, :], mask=block, other=0.0)
    rounded = known.to(q.dtype.element_ty)
    mean = tl.zeros([UNKNOWNS], tl.float32)
    for start in range(0, count, QUERIES):
        query = start + tl.arange(0, QUERIES)
        mask = (query < count)[:, None] & is_unknown[None, :]
        mean += tl.sum(_load_features(q, merged, query, row, mask, width, q_row, q_channel), 0)
    mean = mean / count
    normal = tl.zeros([UNKNOWNS, UNKNOWNS], tl.float32)
    cross = tl.zeros([UNKNOWNS, WIDTH], tl.float32)
    left_mean = tl.zeros([WIDTH], tl.float32)
    for start in range(0, count, QUERIES):
        query = start + tl.arange(0, QUERIES)
        is_query = query < count
        mask = is_query[:, None] & is_unknown[None, :]
        features = _load_features(q, merged, query, row, mask, width, q_row, q_channel)
        left = _left(
            merged, full, logs, rounded, features, number, programs, query, is_query, column, is_column, count, width,
            SPANS,
        )  # fmt: skip
        left_mean += tl.sum(left, 0)
        features = tl.where(mask, features - mean[None, :], 0.0).to(rounded.dtype)
        across = tl.trans(features)
        normal = tl.dot(across, features, normal)
        cross = tl.dot(across, left.to(rounded.dtype), cross)
    left_mean = left_mean / count
    energy = tl.sum(tl.where(row[:, None] == row[None, :], normal, 0.0), 1)
    of_q = tl.sum(tl.where(row < width, energy, 0.0), 0) / width
    of_merged = tl.sum(tl.where(row < width, 0.0, energy), 0) / width
    energy = tl.maximum(tl.where(row < width, of_q, of_merged), _TINY)
    unit = tl.where(is_unknown, 1.0 / tl.sqrt(energy), 0.0)
    penalty = unknowns / (count * 1.0)
    normal = normal * unit[:, None] * unit[None, :] + tl.where(row[:, None] == row[None, :], penalty, 0.0)
    weights = cross * unit[:, None]
    for step in range(0, unknowns):
        is_pivot = row == step
        pivot_row = tl.sum(tl.where(is_pivot[:, None], normal, 0.0), 0)
        pivot_column = tl.sum(tl.where(is_pivot[None, :], normal, 0.0), 1)
        pivot = tl.sum(tl.where(is_pivot, pivot_row, 0.0), 0)
        share = tl.where(is_pivot, 1.0 - 1.0 / pivot, pivot_column / pivot)
        right = tl.sum(tl.where(is_pivot[:, None], weights, 0.0), 0)
        normal -= share[:, None] * pivot_row[None, :]
        weights -= share[:, None] * right[None, :]
        # the column that is solved holds the inverse's from now on
        normal = tl.where(is_pivot[None, :], tl.where(is_pivot, 1.0, 0.0)[:, None] - share[:, None], normal)
    weights = weights * unit[:, None]
    known = rounded.to(tl.float32)
    lost = tl.where(
        tl.max(tl.max(tl.abs(known), 1), 0) > 0, 1.0, 0.0
    )  # if the plan loses nothing, the rest is rounding
    shift = (left_mean - tl.sum(mean[:, None] * weights, 0)) * lost
    to = matrix + tl.program_id(0).to(tl.int64) * unknowns * width
    is_weight = is_unknown[:, None] & is_column[None, :]
    tl.store(to + row[:, None] * width + column[None, :], weights * lost + known, mask=is_weight)
    tl.store(constant + tl.program_id(0) * width + column, shift, mask=is_column)
    answers = tl.zeros([UNKNOWNS], tl.float32)
    rests = tl.zeros([WIDTH], tl.float32)
    solution, rounded_weights = normal.to(rounded.dtype), weights.to(rounded.dtype)
    for start in range(0, count, QUERIES):
        query = start + tl.arange(0, QUERIES)
        is_query = query < count
        mask = is_query[:, None] & is_unknown[None, :]
        features = _load_features(q, merged, query, row, mask, width, q_row, q_channel)
        answers += tl.sum(tl.where((row >= width)[None, :], features * features, 0.0), 0)
        left = _left(
            merged, full, logs, rounded, features, number, programs, query, is_query, column, is_column, count, width,
            SPANS,
        )  # fmt: skip
        features = tl.where(mask, features - mean[None, :], 0.0)
        rest = left - left_mean[None, :] - tl.dot(features.to(rounded.dtype), rounded_weights)
        features = features * unit[None, :]
        leverage = tl.sum(tl.dot(features.to(rounded.dtype), solution) * features, 1) + 1.0 / count
        rest = tl.where(is_query[:, None] & is_column[None, :], rest / (1.0 - leverage)[:, None], 0.0)
        rests += tl.sum(rest * rest, 0)
    scale = 1.0 / (count * width)
    tl.store(error + tl.program_id(0) * 2, tl.sum(rests, 0) * scale * lost)
    tl.store(error + tl.program_id(0) * 2 + 1, tl.sum(answers, 0) * scale)


@direct
@triton.jit
def _correct(
    out, q, matrix, constant, to, tokens, heads, tiles,
    out_sample, out_row, out_channel, q_sample, q_row, q_channel,
    width: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Fill ``to`` with ``out + q M1 + out M2 + b``, see `kernels.correct`. A program serves TOKENS tokens of a head."""
    head_number = tl.program_id(0) // tiles
    sample, head = (head_number // heads).to(tl.int64), head_number % heads
    token = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, WIDTH)
    is_channel = channel < width
    mask = (token < tokens)[:, None] & is_channel[None, :]
    row, column = token.to(tl.int64)[:, None], (head * width + channel)[None, :]
    queries = tl.load(q + sample * q_sample + row * q_row + column * q_channel, mask=mask, other=0.0)
    answer = tl.load(out + sample * out_sample + row * out_row + column * out_channel, mask=mask, other=0.0)
    at = matrix + head_number.to(tl.int64) * 2 * width * width + channel[:, None] * width + channel[None, :]
    square = is_channel[:, None] & is_channel[None, :]
    change = tl.dot(queries, tl.load(at, mask=square, other=0.0))
    change = tl.dot(answer, tl.load(at + width * width, mask=square, other=0.0), change)
    change += tl.load(constant + head_number * width + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    at = to + (sample * tokens + row) * (heads * width) + column
    tl.store(at, answer.to(tl.float32) + change, mask=mask)


def power_of_two(number: int) -> int:
    """Return the lowest power of two that is not below a number. Triton's own function takes the host 2 us."""
    return 1 << (number - 1).bit_length()


def _padded(width: int) -> int:
    """Return the width of a tile for `width` channels: a power of two, at least 16."""
    return max(16, power_of_two(width))


def _warps(width: int) -> int:
    """Return the number of warps for heads of `width` channels: 4 up to 64 channels, else 8."""
    return 4 if width <= 64 else 8


def first_order(
    keys: Tensor, values: Tensor, group: Tensor, means: Tensor, span: int, scale: float, found: Tensor
) -> None:
    """Fill ``found``, the sums of `kernels.first_order`, for spans of ``span`` tokens. ``group`` has the full batch."""
    batch, tokens, _ = keys.shape
    spans, programs, width, _ = found.shape
    heads = programs // batch
    _first_order[(programs, spans)](
        keys, values, group, means, found, tokens, means.shape[1], heads, span, scale,
        *keys.stride(), *values.stride(), group.stride(0),
        width=width, PARTS=parts_of(keys.dtype, means.dtype), WIDTH=_padded(width), TOKENS=_TOKENS,
        num_warps=_warps(width),
    )  # fmt: skip


def attend_sample(
    q: Tensor, keys: Tensor, values: Tensor, merged_keys: Tensor, merged_values: Tensor, bias: Tensor, span: int,
    scale: float, merged: Tensor, full: Tensor, logs: Tensor,
) -> None:  # fmt: skip
    """Fill ``merged``, ``full`` and ``logs``, the fields of `kernels.SampleAttention`, for spans of ``span`` keys.

    `kernels.attend_sample` describes the other arguments; ``bias`` has the full batch.
    """
    spans, programs, count, width = full.shape
    heads = programs // q.shape[0]
    tiles = -(-count // _TOKENS)
    _attend_sample[(programs * tiles, spans + 1)](
        q, keys, values, merged_keys, merged_values, bias, merged, full, logs,
        count, keys.shape[1], merged_keys.shape[1], heads, tiles, span, scale,
        *q.stride(), *keys.stride(), *values.stride(), bias.stride(0),
        width=width, QUERIES=_TOKENS, WIDTH=_padded(width), TOKENS=_TOKENS, num_warps=_warps(width),
    )  # fmt: skip


def ridge(
    q: Tensor, merged: Tensor, full: Tensor, logs: Tensor, first: Tensor, matrix: Tensor, constant: Tensor,
    error: Tensor,
) -> None:  # fmt: skip
    """Fill ``matrix``, ``constant`` and ``error``, the result of `kernels.ridge`; it describes ``q`` and ``first``.

    ``merged``, ``full`` and ``logs`` are the fields of `kernels.SampleAttention` for these queries.
    """
    programs, count, width = merged.shape
    _ridge[(programs,)](
        q, merged, full, logs, first, matrix, constant, error, count, programs // q.shape[0], *q.stride(),
        width=width, WIDTH=_padded(width), UNKNOWNS=_padded(2 * width), QUERIES=_QUERIES, SPANS=first.shape[0],
        num_warps=8, num_stages=1,  # the loop loads a tile of every span: more stages exceed a desktop's shared memory
    )  # fmt: skip


def correct(out: Tensor, q: Tensor, matrix: Tensor, constant: Tensor, to: Tensor) -> None:
    """Fill ``to``, contiguous, the result of `kernels.correct`, which describes the other arguments."""
    batch, tokens, _ = out.shape
    heads, width = matrix.shape[0] // batch, matrix.shape[2]
    tiles = -(-tokens // _TOKENS)
    _correct[(tiles * heads * batch,)](
        out, q, matrix, constant, to, tokens, heads, tiles, *out.stride(), *q.stride(),
        width=width, WIDTH=_padded(width), TOKENS=_TOKENS, num_warps=_warps(width),
    )  # fmt: skip
