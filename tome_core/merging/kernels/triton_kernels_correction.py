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

ON_AMD = torch.version.hip is not None
_TOKENS, _COLUMNS = 64, 64
_WIDE = 128  # a tile of more channels has fewer tokens, so that a desktop's shared memory holds it
_TINY = tl.constexpr(1e-12)
_PARTS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # 11 or 8 bits each hold the 24 of float32


def parts_of(part: torch.dtype, whole: torch.dtype) -> int:
    """Return how many numbers of the dtype `part` hold all digits of a number of the dtype `whole`.

    It is 1 for equal dtypes. Else `whole` is float32, which takes 2 numbers of float16 or 3 of bfloat16.
    """
    return 1 if whole == part else _PARTS[part]


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


@triton.jit
def _first_order(
    keys, values, group, means, column, is_column, first, stop, channels, at_head,
    keys_row, keys_channel, values_row, values_channel,
    width: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return the sum of ``k^T (v - v_g)`` over tokens ``first`` to ``stop - 1``, (WIDTH, COLUMNS) of a head's square.

    Pointers are to a sample's; ``at_head`` is the head's first channel of ``channels``, ``column`` has channels of the
    head. PARTS: see `parts_of`.
    """
    channel = tl.arange(0, WIDTH)
    is_channel = channel < width
    total = tl.zeros([WIDTH, COLUMNS], tl.float32)
    for start in range(first, stop, TOKENS):
        token = start + tl.arange(0, TOKENS)
        is_token = token < stop
        row = token.to(tl.int64)
        at_key = keys + row[None, :] * keys_row + (at_head + channel)[:, None] * keys_channel
        key = tl.load(at_key, mask=is_channel[:, None] & is_token[None, :], other=0.0)
        mask = is_token[:, None] & is_column[None, :]
        at_value = values + row[:, None] * values_row + (at_head + column)[None, :] * values_channel
        value = tl.load(at_value, mask=mask, other=0.0).to(tl.float32)
        number = tl.load(group + token, mask=is_token, other=0)
        rest = value - tl.load(means + number[:, None] * channels + (at_head + column)[None, :], mask=mask, other=0.0)
        # tensor cores multiply half precision exactly; the next parts hold the digits that the first part lacks
        for _part in tl.static_range(PARTS):
            part = rest.to(key.dtype)
            total = tl.dot(key, part, total)
            rest = rest - part.to(tl.float32)
    return total


@direct
@triton.jit
def _answer(
    q, places, keys, values, merged_keys, merged_values, bias, group, means, merged, full, logs, first,
    count, tokens, groups, heads, tiles, span, scale, share,
    q_sample, q_row, q_head, q_channel, keys_sample, keys_row, keys_channel, values_sample, values_row, values_channel,
    bias_sample, group_sample,
    width: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Fill ``merged`` to ``first``, the fields of `kernels.Answers`.

    A program serves a head (axis 0) and a span of tokens, after the last span the merged keys (axis 1): for a tile of
    the head's queries, or after the last of ``tiles`` for some columns of ``first`` (axis 2), whose sums are multiplied
    by ``share``. In all kernels of this file, ``width`` is a head's number of channels, WIDTH that of a tile
    (`_padded`), COLUMNS that of a tile of some of them, and TOKENS a tile's number of rows.
    """
    number, part, piece = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    sample, head, spans = number // heads, number % heads, tl.num_programs(1) - 1
    channel = tl.arange(0, WIDTH)
    is_channel, column = channel < width, head * width + channel
    keys += sample * keys_sample
    values += sample * values_sample
    if piece < tiles:
        query = piece * TOKENS + tl.arange(0, TOKENS)
        is_query = query < count
        mask = is_query[:, None] & is_channel[None, :]
        row = tl.load(places + query, mask=is_query, other=0)
        at_query = q + sample * q_sample + head * q_head + row[:, None] * q_row + channel[None, :] * q_channel
        queries = tl.load(at_query, mask=mask, other=0.0)
        at = query[:, None] * width + channel[None, :]
        if part < spans:
            answer, log = _attend(
                queries, keys, values, None, part * span, tl.minimum(part * span + span, tokens), scale,
                keys_row, keys_channel, values_row, values_channel, column, is_channel, TOKENS, WIDTH, TOKENS,
            )  # fmt: skip
            number += part.to(tl.int64) * tl.num_programs(0)
            tl.store(full + number * count * width + at, answer, mask=mask)
            tl.store(logs + number * count + query, log, mask=is_query)
        else:
            first_key = sample * groups * heads * width
            answer, log = _attend(
                queries, merged_keys + first_key, merged_values + first_key, bias + sample * bias_sample, 0, groups,
                scale, heads * width, 1, heads * width, 1, column, is_channel, TOKENS, WIDTH, TOKENS,
            )  # fmt: skip
            tl.store(merged + number * count * width + at, answer, mask=mask)
    elif part < spans:
        some = (piece - tiles) * COLUMNS + tl.arange(0, COLUMNS)
        total = _first_order(
            keys, values, group + sample * group_sample, means + sample * groups * heads * width, some, some < width,
            part * span, tl.minimum(part * span + span, tokens), heads * width, head * width,
            keys_row, keys_channel, values_row, values_channel, width, PARTS, WIDTH, COLUMNS, TOKENS,
        )  # fmt: skip
        to = first + (part.to(tl.int64) * tl.num_programs(0) + number) * width * width
        mask = is_channel[:, None] & (some < width)[None, :]
        tl.store(to + channel[:, None] * width + some[None, :], total * share, mask=mask)


@triton.jit
def _join(
    full, logs, number, programs, query, is_query, column, is_column, count, width: tl.constexpr, SPANS: tl.constexpr
):  # fmt: skip
    """Return outputs over all keys: the sum of the spans' outputs, each times the span's share of the weights.

    ``full`` and ``logs`` are those of `kernels.Answers`, with SPANS spans and ``count`` queries. ``number`` is
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
def _product(a, b):
    """Return the product of two float32 matrices of numbers below 65,504, each held by two numbers of half precision.

    Tensor cores multiply these exactly. Of each number 22 bits count.
    """
    a_high, b_high = a.to(tl.float16), b.to(tl.float16)
    a_low, b_low = (a - a_high.to(tl.float32)).to(tl.float16), (b - b_high.to(tl.float32)).to(tl.float16)
    return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))


@triton.jit
def _invert(matrix, is_same, penalty, most, steps):
    """Return the inverse of ``matrix + penalty I`` by Newton's iteration, see `correction.inverse`; square tiles."""
    matrix += tl.where(is_same, penalty, 0.0)
    high = most + penalty
    scale = 2.0 / (penalty + high)
    inverse = tl.where(is_same, 2.0 * scale, 0.0) - scale * scale * matrix
    low = 4.0 * penalty * high / ((penalty + high) * (penalty + high))
    for _ in range(steps):
        scale = 2.0 / (low + 1.0)
        inverse = 2.0 * scale * inverse - scale * scale * _product(inverse, _product(matrix, inverse))
        low = 4.0 * low / ((low + 1.0) * (low + 1.0))
    return inverse


@triton.jit
def _load_features(
    q, merged, places, query, count, first, width, q_row, q_channel, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Return BLOCK channels from ``first`` on of queries and, in the second half of the columns, of their answers.

    ``q`` and ``merged`` are pointers to a head's, ``query`` has the numbers of queries. Float32, 0 elsewhere.
    """
    place = tl.arange(0, COLUMNS)
    of_q, column = place < COLUMNS // 2, place & (COLUMNS // 2 - 1)
    is_query, mask = (query < count)[:, None], (column < BLOCK)[None, :]
    token = tl.load(places + query, mask=query < count, other=0)
    at = q + token[:, None] * q_row + (first + column)[None, :] * q_channel
    queries = tl.load(at, mask=is_query & mask & of_q[None, :], other=0.0).to(tl.float32)
    at = merged + query[:, None] * width + (first + column)[None, :]
    return queries + tl.load(at, mask=is_query & mask & (place >= COLUMNS // 2)[None, :], other=0.0)


@direct
@triton.jit
def _ridge(
    q, places, merged, full, logs, first, matrix, constant, error, left, count, heads, steps, penalty, least,
    q_sample, q_row, q_head, q_channel,
    width: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
    SPANS: tl.constexpr,
):  # fmt: skip
    """Fill the results of `kernels.ridge`. A program serves BLOCK channels (axis 1) of a head (axis 0).

    From the queries and the answers over merged keys, it fits what ``first`` leaves of the answers over all keys less
    those, which it keeps in ``left``, of the shape of ``merged``. Factors are rounded to the dtype of the queries after
    they are centred, which is a smaller error than the rounding of the answers. There are ``count`` queries and SPANS
    spans. COLUMNS is twice BLOCK, padded.
    """
    number, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    q += number // heads * q_sample + number % heads * q_head
    merged += number * count * width
    left += number * count * width
    channel, own, place = tl.arange(0, WIDTH), tl.arange(0, COLUMNS // 2), tl.arange(0, COLUMNS)
    start_of_block = tl.program_id(1) * BLOCK
    is_channel, is_own, column = channel < width, own < BLOCK, start_of_block + own
    known = tl.zeros([WIDTH, COLUMNS // 2], tl.float32)
    known_of_block = tl.zeros([COLUMNS, COLUMNS // 2], tl.float32)  # the block's rows, above zeros
    is_q, in_half = place < COLUMNS // 2, place & (COLUMNS // 2 - 1)
    is_weight = (in_half < BLOCK)[:, None] & is_own[None, :]
    at_known = channel[:, None] * width + column[None, :]
    is_known = is_channel[:, None] & is_own[None, :]
    at_block = (start_of_block + in_half)[:, None] * width + column[None, :]
    for span in tl.static_range(SPANS):
        of_span = first + (span * programs + number) * width * width
        known += tl.load(of_span + at_known, mask=is_known, other=0.0)
        known_of_block += tl.load(of_span + at_block, mask=is_weight & is_q[:, None], other=0.0)
    rounded = known.to(q.dtype.element_ty)
    # The compiler for AMD (LLVM in Triton 3.9) ends the process at some sums inside of loops: over an axis, and of
    # products too small for tensor cores. So there are no sums over an axis, and few warps, see `ridge`.
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    total_rest = tl.zeros([TOKENS, COLUMNS // 2], tl.float32)
    for start in range(0, count, TOKENS):
        query = start + tl.arange(0, TOKENS)
        is_query = query < count
        mask, at = is_query[:, None] & is_own[None, :], query[:, None] * width + column[None, :]
        token = tl.load(places + query, mask=is_query, other=0)
        at_query = q + token[:, None] * q_row + channel[None, :] * q_channel
        queries = tl.load(at_query, mask=is_query[:, None] & is_channel[None, :], other=0.0)
        rest = _join(full, logs, number, programs, query, is_query, column, is_own, count, width, SPANS)
        rest -= tl.load(merged + at, mask=mask, other=0.0) + tl.dot(queries, rounded)
        tl.store(left + at, rest, mask=mask)
        total_rest += rest  # 0 outside of the mask
        total += _load_features(
            q, merged, places, query, count, start_of_block, width, q_row, q_channel, BLOCK, COLUMNS
        )
    mean, average = tl.sum(total, 0) / count, tl.sum(total_rest, 0) / count
    tl.debug_barrier()  # all threads see what all have stored
    normal = tl.zeros([COLUMNS, COLUMNS], tl.float32)
    cross = tl.zeros([COLUMNS, COLUMNS // 2], tl.float32)
    squares = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in range(0, count, TOKENS):
        query = start + tl.arange(0, TOKENS)
        is_query = (query < count)[:, None]
        at = query[:, None] * width + column[None, :]
        features = _load_features(
            q, merged, places, query, count, start_of_block, width, q_row, q_channel, BLOCK, COLUMNS
        )
        squares += features * features
        x = tl.where(is_query, features - mean[None, :], 0.0).to(rounded.dtype)
        across = tl.trans(x)
        normal = tl.dot(across, x, normal)
        rest = tl.load(left + at, mask=is_query & is_own[None, :], other=0.0)
        cross = tl.dot(across, rest.to(rounded.dtype), cross)
    is_same = place[:, None] == place[None, :]
    energy, size = tl.sum(tl.where(is_same, normal, 0.0), 1), tl.sum(squares, 0)
    of_q, of_answers = tl.sum(tl.where(is_q, energy, 0.0), 0), tl.sum(tl.where(is_q, 0.0, energy), 0)
    size_of_q, size_of_answers = tl.sum(tl.where(is_q, size, 0.0), 0), tl.sum(tl.where(is_q, 0.0, size), 0)
    of_q, of_answers = tl.maximum(of_q, least * size_of_q), tl.maximum(of_answers, least * size_of_answers)
    energy = tl.maximum(tl.where(is_q, of_q, of_answers) / BLOCK, _TINY)
    unit = 1.0 / tl.sqrt(energy)  # beyond BLOCK channels features are 0
    inverse = _invert(normal * unit[:, None] * unit[None, :], is_same, penalty, 2 * BLOCK, steps)
    cross = cross * unit[:, None]
    largest = tl.maximum(tl.max(tl.max(tl.abs(cross), 1), 0), _TINY)
    weights = _product(inverse, cross / largest) * (largest * unit)[:, None]
    # if the plan loses nothing, the rest is rounding
    lost = tl.where(tl.max(tl.max(tl.abs(rounded.to(tl.float32)), 1), 0) > 0, 1.0, 0.0)
    to = matrix + number * 2 * width * width
    is_other = (channel < start_of_block) | (channel >= start_of_block + BLOCK)
    tl.store(to + at_known, known, mask=is_known & is_other[:, None])
    tl.store(to + at_block, known_of_block + weights * lost, mask=is_weight & is_q[:, None])
    for block in tl.static_range(width // BLOCK):
        at_answer = to + (width + block * BLOCK + in_half)[:, None] * width + column[None, :]
        tl.store(
            at_answer, tl.where(tl.program_id(1) == block, weights * lost, 0.0),
            mask=is_weight & (place >= COLUMNS // 2)[:, None],
        )  # fmt: skip
    shift = (average - tl.sum(mean[:, None] * weights, 0)) * lost
    tl.store(constant + number * width + column, shift, mask=is_own)
    rests = tl.zeros([TOKENS, COLUMNS // 2], tl.float32)
    solution, weights = inverse.to(rounded.dtype), weights.to(rounded.dtype)
    ones = tl.full([COLUMNS, COLUMNS // 2], 1.0, rounded.dtype)
    for start in range(0, count, TOKENS):
        query = start + tl.arange(0, TOKENS)
        is_query = (query < count)[:, None]
        mask, at = is_query & is_own[None, :], query[:, None] * width + column[None, :]
        features = _load_features(
            q, merged, places, query, count, start_of_block, width, q_row, q_channel, BLOCK, COLUMNS
        )
        x = tl.where(is_query, features - mean[None, :], 0.0)
        rest = tl.load(left + at, mask=mask, other=0.0) - average[None, :] - tl.dot(x.to(rounded.dtype), weights)
        x = x * unit[None, :]
        terms = tl.dot(x.to(rounded.dtype), solution) * x
        leverage = tl.dot(terms.to(rounded.dtype), ones) + 1.0 / count  # their sum, in each column
        rest = tl.where(mask, rest / (1.0 - leverage), 0.0)
        rests += rest * rest
    scale = 1.0 / (count * BLOCK)
    to_error = error + (number * (width // BLOCK) + tl.program_id(1)) * 2
    tl.store(to_error, tl.sum(tl.sum(rests, 1), 0) * scale * lost)
    tl.store(to_error + 1, size_of_answers * scale)


@direct
@triton.jit
def _correct(
    out, q, matrix, constant, to, tokens, heads, tiles,
    out_sample, out_row, out_head, out_channel, q_sample, q_row, q_head, q_channel,
    width: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Fill ``to``, see `kernels.correct`. A program serves TOKENS tokens, and BLOCK channels (axis 1) of a head."""
    number = (tl.program_id(0) // tiles).to(tl.int64)
    sample, head = number // heads, number % heads
    token = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    channel, place = tl.arange(0, WIDTH), tl.arange(0, COLUMNS)
    first = tl.program_id(1) * BLOCK
    is_channel, is_column, column = channel < width, place < BLOCK, first + place
    is_token, row = token < tokens, token.to(tl.int64)[:, None]
    mask = is_token[:, None] & is_column[None, :]
    at_query = q + sample * q_sample + head * q_head + row * q_row + channel[None, :] * q_channel
    queries = tl.load(at_query, mask=is_token[:, None] & is_channel[None, :], other=0.0)
    at_answer = out + sample * out_sample + head * out_head + row * out_row + column[None, :] * out_channel
    answer = tl.load(at_answer, mask=mask, other=0.0)
    matrix += number * 2 * width * width + column[None, :]
    known = tl.load(matrix + channel[:, None] * width, mask=is_channel[:, None] & is_column[None, :], other=0.0)
    fitted = tl.load(
        matrix + (width + column)[:, None] * width, mask=is_column[:, None] & is_column[None, :], other=0.0
    )
    change = tl.dot(answer, fitted, tl.dot(queries, known))
    change += tl.load(constant + number * width + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = to + (sample * tokens + row) * (heads * width) + (head * width + column)[None, :]
    tl.store(at, answer.to(tl.float32) + change, mask=mask)


def power_of_two(number: int) -> int:
    """Return the lowest power of two that is not below a number. Triton's own function takes the host 2 us."""
    return 1 << (number - 1).bit_length()


def _padded(width: int) -> int:
    """Return the width of a tile for `width` channels: a power of two, at least 16."""
    return max(16, power_of_two(width))


def _sizes(width: int) -> dict[str, int]:
    """Return tiles and Triton's options for a kernel that holds all channels of a head of `width`."""
    padded = _padded(width)
    few, stages = padded > _WIDE, 3 if padded <= 64 else 2 if padded <= _WIDE else 1
    return {"width": width, "WIDTH": padded, "TOKENS": _TOKENS // 2 if few else _TOKENS,
            "num_warps": 4 if padded <= 64 else 8, "num_stages": stages}  # fmt: skip


def answer(
    q: Tensor, places: Tensor, keys: Tensor, values: Tensor, merged_keys: Tensor, merged_values: Tensor, bias: Tensor,
    group: Tensor, means: Tensor, span: int, scale: float,
    merged: Tensor, full: Tensor, logs: Tensor, first: Tensor,
) -> None:  # fmt: skip
    """Fill ``merged`` to ``first``, the fields of `kernels.Answers`, for spans of ``span`` tokens.

    `kernels.answer` describes the other arguments; ``bias`` and ``group`` have the full batch.
    """
    (spans, programs, count, width), sizes = full.shape, _sizes(full.shape[3])
    tiles, columns = -(-count // sizes["TOKENS"]), min(sizes["WIDTH"], _COLUMNS)
    _answer[(programs, spans + 1, tiles - (-width // columns))](
        q, places, keys, values, merged_keys, merged_values, bias, group, means, merged, full, logs, first,
        count, keys.shape[1], means.shape[1], q.shape[2], tiles, span, scale, scale / keys.shape[1],
        *q.stride(), *keys.stride(), *values.stride(), bias.stride(0), group.stride(0),
        PARTS=parts_of(keys.dtype, means.dtype), COLUMNS=columns, **sizes,
    )  # fmt: skip


def ridge(
    q: Tensor, places: Tensor, merged: Tensor, full: Tensor, logs: Tensor, first: Tensor, block: int, steps: int,
    penalty: float, least: float, matrix: Tensor, constant: Tensor, error: Tensor, left: Tensor,
) -> None:  # fmt: skip
    """Fill ``matrix``, ``constant`` and ``error``, the result of `kernels.ridge`, and ``left``; see `_ridge`.

    `kernels.ridge` describes the other arguments; ``merged`` to ``first`` are the fields of `kernels.Answers`.
    """
    (programs, count, width), sizes = merged.shape, _sizes(merged.shape[2])
    # the loop loads a tile of every span: more stages exceed a desktop's shared memory
    options = {"num_warps": 2 if ON_AMD else 4, "num_stages": 1}
    _ridge[(programs, width // block)](
        q, places, merged, full, logs, first, matrix, constant, error, left, count, q.shape[2], steps, penalty, least,
        *q.stride(), BLOCK=block, COLUMNS=2 * _padded(block), SPANS=first.shape[0], **sizes | options,
    )  # fmt: skip


def correct(out: Tensor, q: Tensor, matrix: Tensor, constant: Tensor, block: int, to: Tensor) -> None:
    """Fill ``to``, contiguous, the result of `kernels.correct`, which describes the other arguments."""
    (batch, tokens, heads, width), sizes = out.shape, _sizes(out.shape[3])
    tiles = -(-tokens // sizes["TOKENS"])
    _correct[(tiles * heads * batch, width // block)](
        out, q, matrix, constant, to, tokens, heads, tiles, *out.stride(), *q.stride(),
        BLOCK=block, COLUMNS=_padded(block), **sizes,
    )  # fmt: skip
