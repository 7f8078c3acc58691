"""The kernels of a match in Triton (3.0 or newer, which torch 2.4 brings along). `tome_core.kernels` imports this file
when a tensor comes by that it can serve, and nobody else does. None uses atomics: equal inputs give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_kernels_correction import corrected, first_order, ridge

__all__ = [
    "best_keys", "corrected", "first_order", "mean_rows", "moments", "parts_of", "placed", "ridge", "segments",
    "spread",
]  # fmt: skip

# Fixed, not tuned at run time: another tile adds in another order, and equal inputs would give other bits.
# Small tiles, because SD1.5 at 512 px has 3,072 sources: 48 tiles a sample, on GPUs of 60 to 140 processors.
_QUERIES, _KEYS, _CHANNELS = 64, 64, 32
_ROWS, _WIDEST, _WIDEST_ALONE = 8, 256, 1024
_COUNTED_TOKENS, _COUNTED_GROUPS = 512, 16
_SPREAD_TOKENS, _SPREAD_CHANNELS = 32, 128
_PLACED = 256
_PARTS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


def parts_of(queries: torch.dtype, keys: torch.dtype) -> int:
    """How many numbers of the queries' dtype a key is written as: a float32's 24 bits are 1 x 24, 2 x 11 or 3 x 8."""
    return 1 if keys == queries else _PARTS[queries]


@triton.jit
def _best_keys(
    x, rows, keys, bias, score, index, num_queries, num_keys, channels, tiles,
    x_sample, x_row, x_channel, rows_sample, rows_query,
    keys_sample, keys_key, keys_channel, bias_sample, bias_key,
    PARTS: tl.constexpr, LENGTHS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program: a tile of queries of one sample, against all keys. What ends in _<axis> is a stride."""
    sample = (tl.program_id(0) // tiles).to(tl.int64)
    query = (tl.program_id(0) % tiles) * QUERIES + tl.arange(0, QUERIES)
    inside = query < num_queries
    row = query.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + sample * rows_sample + row * rows_query, mask=inside, other=0)
    own = x + sample * x_sample + row[:, None] * x_row
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    best_key = tl.zeros([QUERIES], tl.int32)
    for first in range(0, num_keys, KEYS):
        key = first + tl.arange(0, KEYS)
        there = key < num_keys
        scores = tl.zeros([QUERIES, KEYS], tl.float32)
        for start in range(0, channels, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            held = channel < channels
            tile = tl.load(own + channel[None, :] * x_channel, mask=inside[:, None] & held[None, :], other=0.0)
            theirs = keys + sample * keys_sample + key[None, :] * keys_key + channel[:, None] * keys_channel
            rest = tl.load(theirs, mask=held[:, None] & there[None, :], other=0.0)
            # tensor cores multiply halves exactly; what a key loses to its first part is in the next ones
            for _part in tl.static_range(PARTS):
                part = rest.to(tile.dtype)
                scores = tl.dot(tile, part, scores, input_precision="ieee")
                rest = rest.to(tl.float32) - part.to(tl.float32)
        if bias is not None:
            scores += tl.load(bias + sample * bias_sample + key * bias_key, mask=there, other=0.0)[None, :]
        # what equals itself is no NaN, which reductions order at will: the best key has to be one there is
        scores = tl.where(there[None, :] & (scores == scores), scores, float("-inf"))
        top, place = tl.max(scores, 1, return_indices=True)  # the first of equals
        better = top > best
        best = tl.where(better, top, best)
        best_key = tl.where(better, first + place, best_key)
    if LENGTHS:
        squared = tl.zeros([QUERIES], tl.float32)
        for start in range(0, channels, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            mask = inside[:, None] & (channel < channels)[None, :]
            tile = tl.load(own + channel[None, :] * x_channel, mask=mask, other=0.0).to(tl.float32)
            squared += tl.sum(tile * tile, 1)
        best -= squared * 0.5
    to = sample * num_queries + query
    tl.store(score + to, best, mask=inside)
    tl.store(index + to, best_key.to(tl.int64), mask=inside)


@triton.jit
def _mean_rows(
    x, order, offsets, mean, exact, bias, groups, tokens, channels, x_row, x_channel,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program: one group of one copy, or some of its channels where nobody asks for its length.

    Row i of the group is added to sum i % ROWS; then those are added.
    """
    number = tl.program_id(0).to(tl.int64)
    group, own = number % groups, x + number // groups * tokens * x_row
    start, stop = tl.load(offsets + group), tl.load(offsets + group + 1)
    size = tl.maximum(stop - start, 1).to(tl.float32)
    squared = 0.0
    for first_channel in range(tl.program_id(1) * CHANNELS, channels, CHANNELS * tl.num_programs(1)):
        channel = first_channel + tl.arange(0, CHANNELS)
        held = channel < channels
        total = tl.zeros([ROWS, CHANNELS], tl.float32)
        for first in range(start, stop, ROWS):
            place = first + tl.arange(0, ROWS)
            row = tl.load(order + place, mask=place < stop, other=0)
            mask = (place < stop)[:, None] & held[None, :]
            its = tl.load(own + row[:, None] * x_row + channel[None, :] * x_channel, mask=mask, other=0.0)
            total += its.to(tl.float32)
        found = tl.sum(total, 0) / size
        rounded = found.to(mean.dtype.element_ty)
        tl.store(mean + number * channels + channel, rounded, mask=held)
        if exact is not None:
            tl.store(exact + number * channels + channel, found, mask=held)
        if bias is not None:
            kept = tl.where(held, rounded.to(tl.float32), 0.0)
            squared += tl.sum(kept * kept, 0)
    if bias is not None:
        tl.store(bias + number, tl.where(stop > start, squared * -0.5, float("-inf")))


@triton.jit
def _segments(
    group, order, offsets, sizes, logs, tokens, groups, tiles, empty, TOKENS: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """One program: some groups of one row. What lies in lower groups tells where they start, so no other is asked."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * GROUPS
    number = first + tl.arange(0, GROUPS)
    there = number < groups
    count = tl.zeros([GROUPS], tl.int32)
    lower = tl.zeros([TOKENS], tl.int32)
    for start in range(0, tokens, TOKENS):
        token = start + tl.arange(0, TOKENS)
        its = tl.load(group + row * tokens + token, mask=token < tokens, other=2147483647).to(tl.int32)
        count += tl.sum((its[:, None] == number[None, :]).to(tl.int32), 0)
        lower += (its < first).to(tl.int32)
    place = row * tokens + tl.sum(lower, 0) + tl.cumsum(count, 0) - count
    tl.store(offsets + row * groups + number, place, mask=there)
    tl.store(offsets + row * groups + number + 1, place + count, mask=number == groups - 1)
    size = count.to(tl.float32)
    tl.store(sizes + row * groups + number, size, mask=there)
    tl.store(logs + row * groups + number, tl.where(count > 0, tl.log(tl.maximum(size, 1.0)), empty), mask=there)
    for start in range(0, tokens, TOKENS):
        token = start + tl.arange(0, TOKENS)
        its = tl.load(group + row * tokens + token, mask=token < tokens, other=2147483647).to(tl.int32)
        same = its[:, None] == number[None, :]
        rank = tl.cumsum(same.to(tl.int32), 0)
        held = same & there[None, :]
        tl.store(order + place[None, :] + (rank - 1), (row * tokens + token)[:, None] + tl.zeros_like(rank), mask=held)
        place += tl.sum(same.to(tl.int32), 0)


@triton.jit
def _moments(
    x, moments, tokens, channels, span, x_sample, x_row, x_channel, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """One program: some channels of one span of one sample's tokens: their mean, and squared distances from it."""
    sample, part = tl.program_id(2).to(tl.int64), tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    held = channel < channels
    own = x + sample * x_sample + channel[None, :] * x_channel
    first, stop = part * span, tl.minimum(part * span + span, tokens)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for start in range(first, stop, TOKENS):
        token = start + tl.arange(0, TOKENS)
        mask = (token < stop)[:, None] & held[None, :]
        total += tl.load(own + token.to(tl.int64)[:, None] * x_row, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / (stop - first).to(tl.float32)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for start in range(first, stop, TOKENS):
        token = start + tl.arange(0, TOKENS)
        mask = (token < stop)[:, None] & held[None, :]
        away = tl.load(own + token.to(tl.int64)[:, None] * x_row, mask=mask, other=0.0).to(tl.float32) - mean[None, :]
        total += tl.where(mask, away * away, 0.0)
    to = moments + (sample * tl.num_programs(1) + part) * 2 * channels + channel
    tl.store(to, mean, mask=held)
    tl.store(to + channels, tl.sum(total, 0), mask=held)


@triton.jit
def _mean_of(moments, channel, held, tokens, channels, span, spans):
    """Mean of these channels over all spans."""
    mean = tl.zeros_like(channel).to(tl.float32)
    for part in range(0, spans):
        size = tl.minimum(tokens - part * span, span).to(tl.float32)
        mean += tl.load(moments + part * 2 * channels + channel, mask=held, other=0.0) * (size / tokens)
    return mean


@triton.jit
def _spread(
    x, moments, out, tokens, channels, span, spans, least, x_sample, x_row, x_channel,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program: some tokens of one sample. Each puts the spans' moments together by itself (Chan et al. 1983)."""
    sample = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = token.to(tl.int64)[:, None]
    own, moments = x + sample * x_sample, moments + sample * spans * 2 * channels
    width = channels // PARTS
    for part in tl.static_range(PARTS):
        squared = tl.zeros([CHANNELS], tl.float32)
        for start in range(0, width, CHANNELS):
            held = start + tl.arange(0, CHANNELS) < width
            channel = part * width + start + tl.arange(0, CHANNELS)
            mean = _mean_of(moments, channel, held, tokens, channels, span, spans)
            for one in range(0, spans):
                its = moments + one * 2 * channels + channel
                away = tl.load(its, mask=held, other=0.0) - mean
                size = tl.minimum(tokens - one * span, span).to(tl.float32)
                squared += tl.load(its + channels, mask=held, other=0.0) + away * away * size
        unit = tl.sqrt(tl.sum(squared, 0) / (width * tokens.to(tl.float32)))
        unit = tl.maximum(unit, least)
        for start in range(0, width, CHANNELS):
            held = start + tl.arange(0, CHANNELS) < width
            channel = part * width + start + tl.arange(0, CHANNELS)
            mean = _mean_of(moments, channel, held, tokens, channels, span, spans)
            mask = (token < tokens)[:, None] & held[None, :]
            its = tl.load(own + row * x_row + channel[None, :] * x_channel, mask=mask, other=0.0).to(tl.float32)
            to = out + (sample * tokens + row) * channels + channel[None, :]
            tl.store(to, (its - mean[None, :]) / unit, mask=mask)


@triton.jit
def _placed(
    order, index, sources, destinations, group, representative, count, cells, removed,
    sources_sample, destinations_sample, PLACES: tl.constexpr,
):  # fmt: skip
    """One program: some sources in the order in which they merge, or some destinations, which come after them."""
    sample = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    tokens, groups = count + cells, count + cells - removed
    is_source = place < count
    source = tl.load(order + sample * count + place, mask=is_source, other=0)
    token = tl.load(sources + sample * sources_sample + source, mask=is_source, other=0)
    merges = is_source & (place < removed)
    theirs = tl.load(index + sample * count + source, mask=merges, other=0)
    number = tl.where(merges, theirs, cells + place - removed)
    tl.store(group + sample * tokens + token, number, mask=is_source)
    tl.store(representative + sample * groups + number, token, mask=is_source & (place >= removed))
    cell = place - count
    is_cell = (cell >= 0) & (cell < cells)
    token = tl.load(destinations + sample * destinations_sample + cell, mask=is_cell, other=0)
    tl.store(group + sample * tokens + token, cell.to(tl.int64), mask=is_cell)
    tl.store(representative + sample * groups + cell, token, mask=is_cell)


def best_keys(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    keys: torch.Tensor,
    bias: torch.Tensor | None,
    score: torch.Tensor,
    index: torch.Tensor,
    lengths: bool,
) -> None:
    """See `tome_core.kernels.best_keys`; fills ``score`` and ``index`` ``[B, Q]``. Others expanded to batch B."""
    batch, queries = score.shape
    tiles = triton.cdiv(queries, _QUERIES)
    _best_keys[(tiles * batch,)](
        x, rows, keys, bias, score, index, queries, keys.shape[1], keys.shape[2], tiles,
        *x.stride(), *(rows.stride() if rows is not None else (0, 0)),
        *keys.stride(), *(bias.stride() if bias is not None else (0, 0)),
        PARTS=parts_of(x.dtype, keys.dtype), LENGTHS=lengths, QUERIES=_QUERIES, KEYS=_KEYS, CHANNELS=_CHANNELS,
    )  # fmt: skip


def mean_rows(
    x: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, tokens: int, mean: torch.Tensor,
    exact: torch.Tensor | None, bias: torch.Tensor | None,
) -> None:  # fmt: skip
    """See `tome_core.kernels.mean_rows`; fills ``mean``, ``exact`` ``[K * G, C]`` and ``bias`` ``[K * G]``."""
    numbers, channels = mean.shape
    width = min(triton.next_power_of_2(channels), _WIDEST if bias is None else _WIDEST_ALONE)
    _mean_rows[(numbers, triton.cdiv(channels, width) if bias is None else 1)](
        x, order, offsets, mean, exact, bias, offsets.shape[0] - 1, tokens, channels, *x.stride(),
        ROWS=_ROWS, CHANNELS=width, num_warps=4 if width <= _WIDEST else 8,
    )  # fmt: skip


def segments(
    group: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, sizes: torch.Tensor, logs: torch.Tensor,
    empty: float,
) -> None:  # fmt: skip
    """See `tome_core.kernels.segments`; fills all but ``group``, which lies row by row."""
    (rows, tokens), groups = group.shape, sizes.shape[1]
    tiles = triton.cdiv(groups, _COUNTED_GROUPS)
    _segments[(rows * tiles,)](
        group, order, offsets, sizes, logs, tokens, groups, tiles, empty,
        TOKENS=_COUNTED_TOKENS, GROUPS=_COUNTED_GROUPS,
    )  # fmt: skip


def moments(x: torch.Tensor, found: torch.Tensor, span: int) -> None:
    """Fills ``found [B, spans, 2, C]``: mean and squared distances from it of each channel of ``x [B, N, C]``."""
    batch, tokens, channels = x.shape
    _moments[(triton.cdiv(channels, _SPREAD_CHANNELS), found.shape[1], batch)](
        x, found, tokens, channels, span, *x.stride(), TOKENS=_SPREAD_TOKENS, CHANNELS=_SPREAD_CHANNELS,
    )  # fmt: skip


def spread(x: torch.Tensor, found: torch.Tensor, span: int, parts: int, least: float, out: torch.Tensor) -> None:
    """See `tome_core.kernels.spread`; fills ``out``, with what `moments` found."""
    batch, tokens, channels = x.shape
    _spread[(triton.cdiv(tokens, _SPREAD_TOKENS), batch)](
        x, found, out, tokens, channels, span, found.shape[1], least, *x.stride(),
        PARTS=parts, TOKENS=_SPREAD_TOKENS, CHANNELS=_SPREAD_CHANNELS,
    )  # fmt: skip


def placed(
    order: torch.Tensor, index: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, removed: int,
    group: torch.Tensor, representative: torch.Tensor,
) -> None:  # fmt: skip
    """See `tome_core.kernels.placed`; fills ``group`` and ``representative``."""
    (batch, count), cells = index.shape, destinations.shape[1]
    _placed[(triton.cdiv(count + cells, _PLACED), batch)](
        order, index, sources, destinations, group, representative, count, cells, removed,
        sources.stride(0), destinations.stride(0), PLACES=_PLACED,
    )  # fmt: skip
