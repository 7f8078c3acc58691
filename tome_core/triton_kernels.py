"""The two kernels in Triton (3.0 or newer, which torch 2.4 brings along). `tome_core.kernels` imports this file
when a tensor comes by that it can serve, and nobody else does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Fixed, not tuned at run time: another tile adds in another order, and equal inputs would give other bits.
# Small tiles, because SD1.5 at 512 px has 3,072 sources: 48 tiles a sample, on GPUs of 60 to 140 processors.
_QUERIES, _KEYS, _CHANNELS = 64, 64, 32
_ROWS, _WIDEST = 8, 256
_PARTS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


def parts_of(queries: torch.dtype, keys: torch.dtype) -> int:
    """How many numbers of the queries' dtype a key is written as: a float32's 24 bits are 1 x 24, 2 x 11 or 3 x 8."""
    return 1 if keys == queries else _PARTS[queries]


@triton.jit
def _best_keys(
    x, rows, keys, bias, score, index, num_queries, num_keys, channels, tiles,
    x_sample, x_row, x_channel, rows_sample, rows_query,
    keys_sample, keys_key, keys_channel, bias_sample, bias_key,
    PARTS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr,
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
    to = sample * num_queries + query
    tl.store(score + to, best, mask=inside)
    tl.store(index + to, best_key.to(tl.int64), mask=inside)


@triton.jit
def _mean_rows(
    x, order, offsets, mean, channels, x_row, x_channel, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """One program: some channels of one group. Row i of the group is added to sum i % ROWS; then those are added."""
    group = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    held = channel < channels
    start, stop = tl.load(offsets + group), tl.load(offsets + group + 1)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for first in range(start, stop, ROWS):
        place = first + tl.arange(0, ROWS)
        row = tl.load(order + place, mask=place < stop, other=0)
        mask = (place < stop)[:, None] & held[None, :]
        total += tl.load(x + row[:, None] * x_row + channel[None, :] * x_channel, mask=mask, other=0.0).to(tl.float32)
    size = tl.maximum(stop - start, 1).to(tl.float32)
    tl.store(mean + group * channels + channel, tl.sum(total, 0) / size, mask=held)


def best_keys(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    keys: torch.Tensor,
    bias: torch.Tensor | None,
    score: torch.Tensor,
    index: torch.Tensor,
) -> None:
    """See `tome_core.kernels.best_keys`; fills ``score`` and ``index`` ``[B, Q]``. Others expanded to batch B."""
    batch, queries = score.shape
    tiles = triton.cdiv(queries, _QUERIES)
    _best_keys[(tiles * batch,)](
        x, rows, keys, bias, score, index, queries, keys.shape[1], keys.shape[2], tiles,
        *x.stride(), *(rows.stride() if rows is not None else (0, 0)),
        *keys.stride(), *(bias.stride() if bias is not None else (0, 0)),
        PARTS=parts_of(x.dtype, keys.dtype), QUERIES=_QUERIES, KEYS=_KEYS, CHANNELS=_CHANNELS,
    )  # fmt: skip


def mean_rows(x: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, mean: torch.Tensor) -> None:
    """See `tome_core.kernels.mean_rows`; fills ``mean``."""
    groups, channels = mean.shape
    width = min(triton.next_power_of_2(channels), _WIDEST)
    _mean_rows[(groups, triton.cdiv(channels, width))](
        x, order, offsets, mean, channels, *x.stride(), ROWS=_ROWS, CHANNELS=width
    )
