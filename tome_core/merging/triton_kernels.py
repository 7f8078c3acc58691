"""The kernels of a match in Triton (3.0 or newer, which torch 2.4 brings along). `kernels` imports this file
when a tensor comes by that it can serve, and nobody else does. None uses atomics: equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .triton_kernels_correction import answer_few, correct, first_order, parts_of, ridge
from .triton_kernels_groups import mean_rows, place_tokens, segments

__all__ = ["answer_few", "best_keys", "correct", "first_order", "mean_rows", "moments", "parts_of", "place_tokens",
           "ridge", "segments", "spread"]  # fmt: skip

# Fixed, not tuned at run time: another tile adds in another order, and equal inputs would give other bits.
# Small tiles, because SD1.5 at 512 px has 3,072 sources: 48 tiles a sample, on GPUs of 60 to 140 processors.
_QUERIES, _KEYS, _CHANNELS, _CHANNELS_OF_HALVES = 64, 64, 32, 64
_MOMENT_TOKENS, _MOMENT_CHANNELS = 128, 32
_SPREAD_TOKENS, _SPREAD_CHANNELS = 32, 128


def channels_at_once(queries: torch.dtype) -> int:
    """How many channels of queries of this dtype a program multiplies at once."""
    return _CHANNELS_OF_HALVES if queries.itemsize == 2 else _CHANNELS


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
def _moments(
    x, values, moments, tokens, channels, span, x_sample, x_row, x_channel, values_sample, values_row, values_channel,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program: some channels of one span of one sample's tokens: their mean, and squared distances from it."""
    sample, spans = tl.program_id(2).to(tl.int64), tl.num_programs(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    held = channel < channels
    first, stop = tl.program_id(1) * span, tl.minimum(tl.program_id(1) * span + span, tokens)
    for part in tl.static_range(PARTS):
        own, step = x + sample * x_sample + channel[None, :] * x_channel, x_row
        if part == 1:
            own, step = values + sample * values_sample + channel[None, :] * values_channel, values_row
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for start in range(first, stop, TOKENS):
            token = start + tl.arange(0, TOKENS)
            mask = (token < stop)[:, None] & held[None, :]
            total += tl.load(own + token.to(tl.int64)[:, None] * step, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(total, 0) / (stop - first).to(tl.float32)
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for start in range(first, stop, TOKENS):
            token = start + tl.arange(0, TOKENS)
            mask = (token < stop)[:, None] & held[None, :]
            its = tl.load(own + token.to(tl.int64)[:, None] * step, mask=mask, other=0.0).to(tl.float32)
            away = its - mean[None, :]
            total += tl.where(mask, away * away, 0.0)
        to = moments + (sample * spans + tl.program_id(1)) * 2 * PARTS * channels + part * channels + channel
        tl.store(to, mean, mask=held)
        tl.store(to + PARTS * channels, tl.sum(total, 0), mask=held)


@triton.jit
def _of_all_spans(moments, channel, held, tokens, channels, span, spans, SPANS: tl.constexpr):
    """Mean of these channels over all spans, and the squared distances from it added up (Chan et al. 1983)."""
    one = tl.arange(0, SPANS)
    size = tl.maximum(tl.minimum(tokens - one * span, span), 0).to(tl.float32)
    at = moments + one[:, None] * 2 * channels + channel[None, :]
    mask = (one < spans)[:, None] & held[None, :]
    means = tl.load(at, mask=mask, other=0.0)
    squares = tl.load(at + channels, mask=mask, other=0.0)
    mean = tl.sum(means * (size / tokens)[:, None], 0)
    away = tl.where(mask, means - mean[None, :], 0.0)
    return mean, tl.sum(squares + away * away * size[:, None], 0)


@triton.jit
def _spread(
    x, values, moments, out, tokens, width, span, spans, least,
    x_sample, x_row, x_channel, values_sample, values_row, values_channel,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """One program: some tokens of one sample. Each puts the spans' moments together by itself."""
    sample = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = token.to(tl.int64)[:, None]
    channels = width * PARTS
    moments += sample * spans * 2 * channels
    for part in tl.static_range(PARTS):
        own = x + sample * x_sample + row * x_row
        if part == 1:
            own = values + sample * values_sample + row * values_row
        step = x_channel if part == 0 else values_channel
        squared = tl.zeros([CHANNELS], tl.float32)
        for start in range(0, width, CHANNELS):
            column = start + tl.arange(0, CHANNELS)
            its = moments + part * width
            _, more = _of_all_spans(its, column, column < width, tokens, channels, span, spans, SPANS)
            squared += more
        unit = tl.sqrt(tl.sum(squared, 0) / (width * tokens * 1.0))
        unit = tl.maximum(unit, least)
        for start in range(0, width, CHANNELS):
            column = start + tl.arange(0, CHANNELS)
            held = column < width
            mean, _ = _of_all_spans(moments + part * width, column, held, tokens, channels, span, spans, SPANS)
            mask = (token < tokens)[:, None] & held[None, :]
            its = tl.load(own + column[None, :] * step, mask=mask, other=0.0).to(tl.float32)
            to = out + (sample * tokens + row) * channels + part * width + column[None, :]
            tl.store(to, (its - mean[None, :]) / unit, mask=mask)


def best_keys(
    x: torch.Tensor, rows: torch.Tensor | None, keys: torch.Tensor, bias: torch.Tensor | None, score: torch.Tensor,
    index: torch.Tensor, lengths: bool,
) -> None:  # fmt: skip
    """See `kernels.best_keys`; fills ``score`` and ``index`` ``[B, Q]``. Others expanded to batch B."""
    batch, queries = score.shape
    tiles = triton.cdiv(queries, _QUERIES)
    _best_keys[(tiles * batch,)](
        x, rows, keys, bias, score, index, queries, keys.shape[1], keys.shape[2], tiles,
        *x.stride(), *(rows.stride() if rows is not None else (0, 0)),
        *keys.stride(), *(bias.stride() if bias is not None else (0, 0)),
        PARTS=parts_of(x.dtype, keys.dtype), LENGTHS=lengths, QUERIES=_QUERIES, KEYS=_KEYS,
        CHANNELS=channels_at_once(x.dtype),
    )  # fmt: skip


def moments(parts: Sequence[torch.Tensor], found: torch.Tensor, span: int) -> None:
    """Fills ``found [B, spans, 2, P*C]``: mean and squared distances from it of each channel of P ``[B, N, C]``."""
    x, values = parts[0], parts[-1]
    batch, tokens, channels = x.shape
    _moments[(triton.cdiv(channels, _MOMENT_CHANNELS), found.shape[1], batch)](
        x, values, found, tokens, channels, span, *x.stride(), *values.stride(),
        PARTS=len(parts), TOKENS=_MOMENT_TOKENS, CHANNELS=_MOMENT_CHANNELS,
    )  # fmt: skip


def spread(parts: Sequence[torch.Tensor], found: torch.Tensor, span: int, least: float, out: torch.Tensor) -> None:
    """See `kernels.spread`; fills ``out``, with what `moments` found."""
    x, values = parts[0], parts[-1]
    batch, tokens, channels = x.shape
    _spread[(triton.cdiv(tokens, _SPREAD_TOKENS), batch)](
        x, values, found, out, tokens, channels, span, found.shape[1], least, *x.stride(), *values.stride(),
        PARTS=len(parts), TOKENS=_SPREAD_TOKENS, CHANNELS=_SPREAD_CHANNELS,
        SPANS=triton.next_power_of_2(found.shape[1]),
    )  # fmt: skip
