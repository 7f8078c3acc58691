"""The Triton kernels of a match, for Triton 3.0 or newer. Only `kernels` imports this file.

No kernel uses atomics, so equal inputs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .triton_kernels_correction import answer, correct, parts_of, power_of_two, ridge
from .triton_kernels_direct import direct

__all__ = ["answer", "assign_groups", "best_keys", "correct", "mean_rows", "ridge", "spread"]

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
# Tiles are fixed, not tuned at run time: another tile adds in another order, so equal inputs would give other bits.
# They are small, because SD1.5 at 512 px has 3,072 sources: 48 tiles a sample, on GPUs of 60 to 140 processors.
_QUERIES, _KEYS, _CHANNELS, _CHANNELS_OF_HALVES = 64, 64, 32, 64
# Groups are few, and their programs wait for memory. So tiles are wide along the loop, and narrow across it. A launch
# takes as long as its largest group, which has many times the rows of others: large groups have the longest tiles.
_ROWS, _ROWS_OF_LARGE, _LARGE, _ROWS_ALONE, _WIDEST_ALONE = 32, 128, 16, 16, 1024
_WIDEST, _ELEMENTS_COUNTED = 64, 2**14  # a group's programs each list its members, so they are few
_COUNTED_TOKENS = 2048
_PLACED, _OTHERS = 32, 128
_SPREAD_TOKENS, _FEW, _SPREAD_CHANNELS = 32, 64, 128
_TINY = tl.constexpr(1e-12)


@triton.jit
def _spread_tokens(
    source, row_step, channel_step, places, to, token, count, tokens, channels, largest,
    FEW: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Store a tile's tokens, centred and scaled; see `kernels.spread`. ``to`` has the result's columns for ``source``.

    ``token`` has the tile's numbers. There are up to FEW ``places``; CHANNELS are read at a time.
    """
    few = tl.arange(0, FEW)
    row = tl.load(places + few, mask=few < count, other=0)[:, None] * row_step
    squares = tl.zeros([FEW, CHANNELS], tl.float32)
    for start in range(0, channels, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        mask = (few < count)[:, None] & (channel < channels)[None, :]
        rows = tl.load(source + row + channel[None, :] * channel_step, mask=mask, other=0.0).to(tl.float32)
        apart = tl.where(mask, rows - tl.sum(rows, 0)[None, :] / count, 0.0)
        squares += apart * apart
    unit = 1.0 / tl.sqrt(tl.maximum(tl.sum(tl.sum(squares, 1), 0) / (count * channels), _TINY))
    for start in range(0, channels, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        is_channel = (channel < channels)[None, :]
        mask = (few < count)[:, None] & is_channel
        rows = tl.load(source + row + channel[None, :] * channel_step, mask=mask, other=0.0).to(tl.float32)
        mask = (token < tokens)[:, None] & is_channel
        at = source + token[:, None] * row_step + channel[None, :] * channel_step
        x = (tl.load(at, mask=mask, other=0.0).to(tl.float32) - tl.sum(rows, 0)[None, :] / count) * unit
        x = tl.minimum(tl.maximum(x, -largest), largest)
        tl.store(to + token[:, None] * (2 * channels) + channel[None, :], x, mask=mask)


@direct
@triton.jit
def _spread(
    keys, values, places, features, count, tokens, channels, tiles, largest,
    keys_sample, keys_row, keys_channel, values_sample, values_row, values_channel,
    TOKENS: tl.constexpr, FEW: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Fill ``features``, the result of `kernels.spread`. A program serves TOKENS tokens.

    A sample has ``tiles`` tiles of tokens. In all kernels, tensors come as pointers, and names that end in _<axis> are
    strides.
    """
    sample = (tl.program_id(0) // tiles).to(tl.int64)
    token = (tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    to = features + sample * tokens * 2 * channels
    _spread_tokens(
        keys + sample * keys_sample, keys_row, keys_channel, places, to, token, count, tokens, channels, largest,
        FEW, CHANNELS,
    )  # fmt: skip
    _spread_tokens(
        values + sample * values_sample, values_row, values_channel, places, to + channels, token, count, tokens,
        channels, largest, FEW, CHANNELS,
    )  # fmt: skip


@direct
@triton.jit
def _best_keys(
    x, rows, keys, bias, score, index, num_queries, num_keys, channels, tiles,
    x_sample, x_row, x_channel, rows_sample, rows_query,
    keys_sample, keys_key, keys_channel, bias_sample, bias_key,
    PARTS: tl.constexpr, LENGTHS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Fill ``score`` and ``index``, the results of `kernels.best_keys`.

    A program (an instance of the kernel) compares a tile of queries with all keys. A sample has ``tiles`` tiles of
    queries. QUERIES, KEYS and CHANNELS are the lengths of tiles, PARTS the number of parts into which a key is split
    (`parts_of`); LENGTHS subtracts half of a query's squared length.
    """
    sample = (tl.program_id(0) // tiles).to(tl.int64)
    query = (tl.program_id(0) % tiles) * QUERIES + tl.arange(0, QUERIES)
    inside = query < num_queries
    row = query.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + sample * rows_sample + row * rows_query, mask=inside, other=0)
    sample_rows = x + sample * x_sample + row[:, None] * x_row
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    best_key = tl.zeros([QUERIES], tl.int32)
    for first in range(0, num_keys, KEYS):
        key = first + tl.arange(0, KEYS)
        is_key = key < num_keys
        scores = tl.zeros([QUERIES, KEYS], tl.float32)
        for start in range(0, channels, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            is_channel = channel < channels
            tile = tl.load(
                sample_rows + channel[None, :] * x_channel, mask=inside[:, None] & is_channel[None, :], other=0.0
            )
            key_tile = keys + sample * keys_sample + key[None, :] * keys_key + channel[:, None] * keys_channel
            rest = tl.load(key_tile, mask=is_channel[:, None] & is_key[None, :], other=0.0)
            # tensor cores multiply half precision exactly; the next parts hold the digits that the first part lacks
            for _part in tl.static_range(PARTS):
                part = rest.to(tile.dtype)
                scores = tl.dot(tile, part, scores, input_precision="ieee")
                rest = rest.to(tl.float32) - part.to(tl.float32)
        if bias is not None:
            scores += tl.load(bias + sample * bias_sample + key * bias_key, mask=is_key, other=0.0)[None, :]
        # scores == scores removes NaN, for which a reduction could return any key, even one that does not exist
        scores = tl.where(is_key[None, :] & (scores == scores), scores, float("-inf"))
        top, place = tl.max(scores, 1, return_indices=True)  # the first of equals
        better = top > best
        best = tl.where(better, top, best)
        best_key = tl.where(better, first + place, best_key)
    if LENGTHS:
        squared = tl.zeros([QUERIES], tl.float32)
        for start in range(0, channels, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            mask = inside[:, None] & (channel < channels)[None, :]
            tile = tl.load(sample_rows + channel[None, :] * x_channel, mask=mask, other=0.0).to(tl.float32)
            squared += tl.sum(tile * tile, 1)
        best -= squared * 0.5
    to = sample * num_queries + query
    tl.store(score + to, best, mask=inside)
    tl.store(index + to, best_key.to(tl.int64), mask=inside)


@triton.jit
def _list_members(group, order, wanted, first, tokens, TOKENS: tl.constexpr):
    """Store the numbers of the tokens of the group ``wanted`` in ``order``; return where they start and stop there.

    ``group`` has the groups of a row of ``tokens``, the first of which has the number ``first``. Members keep their
    order. The row's tokens in lower groups are counted, so no other program's result is needed.
    """
    lower = tl.zeros([TOKENS], tl.int32)
    same = tl.zeros([TOKENS], tl.int32)
    for begin in range(0, tokens, TOKENS):
        token = begin + tl.arange(0, TOKENS)
        of_token = tl.load(group + token, mask=token < tokens, other=2147483647).to(tl.int32)
        lower += (of_token < wanted).to(tl.int32)
        same += (of_token == wanted).to(tl.int32)
    start = first + tl.sum(lower, 0)
    place = start
    for begin in range(0, tokens, TOKENS):
        token = begin + tl.arange(0, TOKENS)
        of_token = tl.load(group + token, mask=token < tokens, other=2147483647).to(tl.int32)
        is_member = (of_token == wanted).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_member, 0) - 1, first + token, mask=is_member != 0)
        place += tl.sum(is_member, 0)
    return start, start + tl.sum(same, 0)


@direct
@triton.jit
def _mean_rows(
    x, values, order, offsets, mean, mean_values, exact, bias, group, sizes, logs, rounded,
    groups, tokens, channels, group_rows, empty, x_row, x_channel, values_row, values_channel,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Fill ``mean`` to ``bias``, see `kernels.Means`. ``bias`` is minus half the squared length of a mean.

    A program sums one group of one copy; if ``bias`` is None, only some channels of it. Row i of the group is added to
    sum number i % ROWS; then the sums are added. PARTS: 2 with ``values``, else 1. ``tokens`` is the number of rows of
    a copy, ``groups`` that of its groups, CHANNELS the width of a tile.

    With ``group``, a program first fills its part of ``order``, ``offsets`` and ``sizes`` to ``rounded``, the fields of
    `kernels.Segments`. Programs of one group store the same numbers, and read no others.
    """
    number = tl.program_id(0).to(tl.int64)
    of_copy, copy = number % groups, number // groups * tokens
    if group is not None:
        per_row, row_tokens = groups // group_rows, tokens // group_rows
        before, wanted = of_copy // per_row * row_tokens, (of_copy % per_row).to(tl.int32)
        start, stop = _list_members(group + before, order, wanted, before, row_tokens, TOKENS)
        tl.store(offsets + of_copy, start)
        tl.store(offsets + of_copy + 1, stop)
        counted = (stop - start).to(tl.float32)
        log = tl.where(stop > start, tl.log(tl.maximum(counted, 1.0)), empty)
        tl.store(sizes + of_copy, counted)
        tl.store(logs + of_copy, log)
        tl.store(rounded + of_copy, log)
        tl.debug_barrier()  # all threads see what all have stored
    else:
        start, stop = tl.load(offsets + of_copy), tl.load(offsets + of_copy + 1)
    size = tl.maximum(stop - start, 1).to(tl.float32)
    squared = 0.0
    for first_channel in range(tl.program_id(1) * CHANNELS, channels, CHANNELS * tl.num_programs(1)):
        channel = first_channel + tl.arange(0, CHANNELS)
        is_channel = channel < channels
        for part in tl.static_range(PARTS):
            source = x + copy * x_row + channel[None, :] * x_channel
            if part == 1:
                source = values + copy * values_row + channel[None, :] * values_channel
            total = tl.zeros([ROWS, CHANNELS], tl.float32)
            for first in range(start, stop, ROWS):
                place = first + tl.arange(0, ROWS)
                row = tl.load(order + place, mask=place < stop, other=0)
                mask = (place < stop)[:, None] & is_channel[None, :]
                step = x_row if part == 0 else values_row
                total += tl.load(source + row[:, None] * step, mask=mask, other=0.0).to(tl.float32)
            mean_exact = tl.sum(total, 0) / size
            own = mean_exact.to(mean.dtype.element_ty)
            to = number * channels + channel
            if part == 0:
                tl.store(mean + to, own, mask=is_channel)
                if bias is not None:
                    summands = tl.where(is_channel, own.to(tl.float32), 0.0)
                    squared += tl.sum(summands * summands, 0)
            else:
                tl.store(mean_values + to, own, mask=is_channel)
                if exact is not None:
                    tl.store(exact + to, mean_exact, mask=is_channel)
    if bias is not None:
        tl.store(bias + number, tl.where(stop > start, squared * -0.5, float("-inf")))


@triton.jit
def _in_order(score):
    """Turn float32 into int32 numbers that sort as torch sorts the floats: NaN above infinity, both zeros equal."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(score != score, 2147483647, bits ^ ((bits >> 31) & 2147483647))


@direct
@triton.jit
def _place(
    score, index, sources, destinations, group, count, cells, removed,
    score_sample, index_sample, sources_sample, destinations_sample, PLACES: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Fill ``group``, see `kernels.assign_groups`. A program serves PLACES places of a sample.

    Places are those of the ``count`` sources, then those of the ``cells`` destinations. A source's rank is the number
    of sources with higher scores, or equal scores and lower places; it merges if its rank is below ``removed``. Scores
    are compared with OTHERS others at a time.
    """
    sample = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    tokens = count + cells
    is_source = place < count
    own_score = _in_order(tl.load(score + sample * score_sample + place, mask=is_source, other=0.0))
    before = tl.zeros([PLACES, OTHERS], tl.int32)
    stop = tl.where(tl.program_id(0) * PLACES < count, count, 0)
    for start in range(0, stop, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_score = _in_order(tl.load(score + sample * score_sample + other, mask=other < count, other=float("-inf")))
        sooner = (other_score[None, :] > own_score[:, None]) | (
            (other_score[None, :] == own_score[:, None]) & (other[None, :] < place[:, None])
        )
        before += (sooner & (other < count)[None, :]).to(tl.int32)
    rank = tl.sum(before, 1)
    token = tl.load(sources + sample * sources_sample + place, mask=is_source, other=0)
    merges = is_source & (rank < removed)
    destination = tl.load(index + sample * index_sample + place, mask=merges, other=0)
    number = tl.where(merges, destination, cells + rank - removed)
    tl.store(group + sample * tokens + token, number, mask=is_source)
    cell = place - count
    is_cell = (cell >= 0) & (cell < cells)
    token = tl.load(destinations + sample * destinations_sample + cell, mask=is_cell, other=0)
    tl.store(group + sample * tokens + token, cell.to(tl.int64), mask=is_cell)


def spread(keys: Tensor, values: Tensor, places: Tensor, largest: float, features: Tensor) -> None:
    """Fill ``features``; `kernels.spread` describes the arguments."""
    batch, tokens, channels = keys.shape
    tiles = -(-tokens // _SPREAD_TOKENS)
    _spread[(tiles * batch,)](
        keys, values, places, features, places.shape[0], tokens, channels, tiles, largest,
        *keys.stride(), *values.stride(), TOKENS=_SPREAD_TOKENS, FEW=_FEW, CHANNELS=_SPREAD_CHANNELS,
        num_warps=8,
    )  # fmt: skip


def best_keys(
    x: Tensor, rows: Tensor | None, keys: Tensor, bias: Tensor | None, score: Tensor, index: Tensor, lengths: bool
) -> None:
    """Fill ``score`` and ``index``, see `kernels.best_keys`. Batches are full. `lengths` subtracts |query|**2 / 2."""
    batch, queries = score.shape
    tiles = -(-queries // _QUERIES)
    _best_keys[(tiles * batch,)](
        x, rows, keys, bias, score, index, queries, keys.shape[1], keys.shape[2], tiles,
        *x.stride(), *(rows.stride() if rows is not None else (0, 0)),
        *keys.stride(), *(bias.stride() if bias is not None else (0, 0)),
        PARTS=parts_of(x.dtype, keys.dtype), LENGTHS=lengths, QUERIES=_QUERIES, KEYS=_KEYS,
        CHANNELS=_CHANNELS_OF_HALVES if x.dtype.itemsize == 2 else _CHANNELS,
    )  # fmt: skip


def mean_rows(
    x: Tensor, values: Tensor | None, order: Tensor, offsets: Tensor, tokens: int,
    mean: Tensor, mean_values: Tensor | None, exact: Tensor | None, bias: Tensor | None,
    group: Tensor | None, sizes: Tensor | None, logs: Tensor | None, rounded: Tensor | None, empty: float,
) -> None:  # fmt: skip
    """Fill the tensors from ``mean`` to ``bias``, which are the fields of `kernels.Means`, except those that are None.

    ``mean_values`` is the field ``values``. With ``group``, contiguous ``(rows, tokens)``, fill ``order``, ``offsets``
    and ``sizes`` to ``rounded``, the fields of `kernels.Segments`, too; ``empty`` is the logarithm for an empty group.
    `kernels.mean_rows` describes the other arguments.
    """
    numbers, channels = mean.shape
    alone, groups = bias is not None, offsets.shape[0] - 1
    rows = _ROWS_ALONE if alone else _ROWS_OF_LARGE if tokens > _LARGE * groups else _ROWS
    widest = _WIDEST_ALONE if alone else _WIDEST if group is None else _ELEMENTS_COUNTED // rows
    width = min(power_of_two(channels), widest)
    _mean_rows[(numbers, 1 if alone else -(-channels // width))](
        x, values, order, offsets, mean, mean_values, exact, bias, group, sizes, logs, rounded,
        groups, tokens, channels, 1 if group is None else len(group), empty,
        *x.stride(), *(x if values is None else values).stride(),
        ROWS=rows, CHANNELS=width, PARTS=1 if values is None else 2, TOKENS=_COUNTED_TOKENS,
        num_warps=8 if rows * width > _ROWS * _WIDEST else 4,
    )  # fmt: skip


def assign_groups(
    score: Tensor, index: Tensor, sources: Tensor, destinations: Tensor, removed: int, group: Tensor
) -> None:
    """Fill ``group``. `kernels.assign_groups` describes the arguments, but here all have the full batch."""
    (batch, count), cells = index.shape, destinations.shape[1]
    _place[(-(-(count + cells) // _PLACED), batch)](
        score, index, sources, destinations, group, count, cells, removed,
        score.stride(0), index.stride(0), sources.stride(0), destinations.stride(0), PLACES=_PLACED, OTHERS=_OTHERS,
    )  # fmt: skip
