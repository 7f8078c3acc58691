"""``python -m benchmarks.cards``: what calls of SD1.5's and SDXL's UNets would take on graphics cards, modelled.

Each launch that `card_trace` finds costs what the card's data sheet and the measured shares of an H200 say. The
command prints what it predicts beside all that was measured on the H200, then the gains of merging on three cards.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import mean
from typing import NamedTuple

import torch

import tome_core
from benchmarks import card_trace, models, report
from benchmarks.card_trace import Launch, Operand
from benchmarks.gpu_rows import STEPS, TOMESD, UNMERGED, Patched
from benchmarks.models import BLOCK, SD15, SDXL
from benchmarks.report import markdown
from benchmarks.results import ROOT
from benchmarks.work import LABELS, PIXELS
from tome_core.patching import curve_of


class Card(NamedTuple):
    """A card by its data sheet."""

    tensor: float  # 10^6 operations a microsecond in half precision, dense, summed in float32
    single: float  # in float32, without tensor cores
    bandwidth: float  # of the memory, bytes a microsecond
    processors: int
    ghz: float

    @property
    def rate(self) -> float:
        """How many instructions it runs, relative to the H200."""
        return self.processors * self.ghz / (132 * 1.98)


H200 = "H200"
CARDS = {H200: Card(989e6, 67e6, 4.8e6, 132, 1.98), "RTX 4090": Card(165e6, 82.6e6, 1.008e6, 128, 2.52),
         "RTX 3060": Card(25.6e6, 12.7e6, 0.36e6, 28, 1.78)}  # fmt: skip


class Kind(NamedTuple):
    """What kernels of a kind reach, as the H200's rows say."""

    tensor: float = 0.0  # of the card's rate in half precision; 0: the kernels multiply no matrices
    single: float = 0.0  # of its rate in float32
    elements: float = 0.0  # microseconds of the H200 for 10^6 elements, if more than the memory takes
    start: float = 0.0  # microseconds in addition
    most: int = 10**6  # processors that it can use


_LEAST = 1.8  # microseconds of the shortest kernel
_OF_BANDWIDTH = 0.85
KINDS = {
    "product": Kind(tensor=0.75, start=1.0), "float32 product": Kind(single=0.4, start=2.0),
    "attention": Kind(tensor=0.475, start=1.0), "convolution": Kind(tensor=0.755, start=12.0),
    "elementwise": Kind(), "part of rows": Kind(elements=3.73), "repeated": Kind(elements=1.33),
    "transposed": Kind(elements=9.75), "to channels last": Kind(elements=2.0),
    "weights to channels last": Kind(elements=5.3), "group norm": Kind(elements=11.4, most=64),
    "layer norm": Kind(elements=1.41), "reduction": Kind(elements=1.06), "gather": Kind(elements=3.0),
    "sort": Kind(start=8.0), "memset": Kind(),
}  # fmt: skip
_LAYOUT_TRAFFIC = 3040  # bytes that a row of a layer norm costs beside its own
# keys that a fused attention's setting up costs as much as, for each query
_KEYS_MORE = 294
_MANY_ROWS = 16384  # from so many rows a product also sets a counter of its tiles to zero
_SHORT_SORT, _SORT_LAUNCHES, _SCATTER_LAUNCHES = 4096, (6, 19), 7


class Part(NamedTuple):
    """What some kernels of one launch do: multiplications and additions, elements written, bytes moved."""

    kind: str
    flops: float = 0
    elements: float = 0
    moved: float = 0
    kernels: int = 1


def parts_of(launch: Launch) -> Iterator[Part]:
    """Yield what the kernels of an operator of torch's do."""
    name, operands = launch.name, launch.operands
    first, out = operands[0], operands[-1]
    moved = sum(one.bytes for one in operands)
    if name == card_trace.ATTENTION:
        batch, heads, queries, width = first.shape
        keys = launch.inputs[1].shape[2] + _KEYS_MORE
        yield Part("attention", 4 * batch * heads * queries * keys * 32 * -(-width // 32), 0, moved)
        yield Part("memset", kernels=2)
    elif name in ("mm", "addmm", "bmm", "baddbmm"):
        a = launch.inputs[-2]
        kind = "float32 product" if a.width == 4 else "product"
        yield Part(kind, 2 * out.elements * a.shape[-1], 0, moved)
        if a.shape[-2] >= _MANY_ROWS:
            yield Part("memset")
    elif name == "convolution":
        x, weight = launch.inputs[:2]
        is_product = weight.shape[2] == 1
        flops = 2 * out.elements * weight.elements // weight.shape[0]
        yield Part("product" if is_product else "convolution", flops, 0, moved)
        if not is_product:
            yield Part("to channels last", 0, x.elements, 2 * x.bytes)
            yield Part("weights to channels last", 0, weight.elements, 2 * weight.bytes)
            yield Part("to channels last", 0, out.elements, 2 * out.bytes)
        yield Part("repeated", 0, out.elements, 2 * out.bytes)
    elif name == "native_group_norm":
        yield Part("group norm", 0, first.elements, first.bytes)
        yield Part("memset")
        yield Part("repeated", 0, first.elements, 2 * first.bytes)
    elif name == "native_layer_norm":
        rows = first.elements // first.shape[-1]
        yield Part("layer norm", 0, first.elements + rows * 760, moved)
    elif name == "sort":
        yield Part("sort", 0, first.elements, moved, _SORT_LAUNCHES[first.elements > 2 * _SHORT_SORT])
    elif name.startswith(("gather", "scatter", "index", "embedding")):
        count = max(one.elements if 0 not in one.strides else math.prod(one.shape) for one in operands[1:])
        yield Part("gather", 0, count * (2 if "reduce" in name else 1), moved, 7 if "reduce" in name else 1)
    elif out.elements < first.elements and name != "cat":
        yield Part("reduction", 0, first.elements, moved)
    else:
        yield Part(_layout_of(operands), 0, out.elements, moved)


def _layout_of(operands: Sequence[Operand]) -> str:
    """Return the kind of an elementwise kernel."""
    out = operands[-1]
    kind = "elementwise"
    for one in operands:
        if one.elements < out.elements:
            kind = "repeated" if kind == "elementwise" and one.elements > 1 else kind
        elif one.strides != out.strides:
            kind = "part of rows" if one.strides[-1] == 1 else "transposed"
    return kind


def _steps(name: str, arguments: tuple, card: Card) -> float:
    """Return the microseconds of a kernel of the engine's, beside the bytes that it moves."""
    return _OURS.get(name, lambda card, *arguments: 5.0)(card, *arguments)


def _waves(card: Card, programs: int) -> float:
    """Return how many times as long as one program all take."""
    return max(1.0, programs / (1.44 * card.processors))


def _ridge(card, q, merged, *_):
    return 6.15 * merged.shape[2] * math.ceil(merged.shape[0] / card.processors) * 1.98 / card.ghz


_OURS = {
    "ridge": _ridge,
    "best_keys": lambda card, x, rows, keys, *_: 0.19 * -(-keys.shape[1] // 64) * -(-keys.shape[2] // 32) * _waves(card, keys.shape[0] * -(-(rows or x).shape[1] // 64)),
    "mean_rows": lambda card, x, values, order, offsets, tokens, mean, *_: 8.4e-5 * mean.shape[0] * mean.shape[1] / card.rate,
    "segments": lambda card, group, order, offsets, *_: 2.5e-3 * group.shape[1] + 2e-6 * group.shape[1] * offsets.shape[0] / card.rate,
    "first_order": lambda card, keys, values, group, means, span, scale, sums: 0.0244 * span * (sums.shape[3] / 40) ** 0.6 * _waves(card, sums.shape[0] * sums.shape[1] / 2),
    "attend_sample": lambda card, q, k, v, mk, mv, bias, span, scale, merged, full, logs: 0.051 * span * _waves(card, full.shape[0] * full.shape[1]),
    "assign_groups": lambda card, score, *_: 0.5e-6 * score.shape[1] ** 2,
    "correct": lambda card, out, *_: 0,
}


def kernels_of(launch: Launch) -> int:
    """Return how many kernels an operator launches."""
    return 1 if launch.is_ours else sum(part.kernels for part in parts_of(launch))


def microseconds(launch: Launch, card: Card) -> dict[str, float]:
    """Return the time of the card by kind, in microseconds."""
    found: dict[str, float] = {}
    if launch.is_ours:
        moved = sum(one.bytes for one in launch.operands) / card.bandwidth / 0.6
        return {f"_{launch.name}": 2.0 + moved + _steps(launch.name, launch.inputs, card)}
    for part in parts_of(launch):
        kind = KINDS[part.kind]
        rate = kind.tensor * card.tensor + kind.single * card.single
        programs = min(card.processors, kind.most) / min(132, kind.most) * card.ghz / 1.98
        longest = max(part.flops / rate if rate else 0, part.moved / card.bandwidth / _OF_BANDWIDTH,
                      part.elements / 1e6 * kind.elements / programs)
        spent = max(_LEAST, longest + kind.start) if part.kind != "memset" else part.kernels * 0.8
        found[part.kind] = found.get(part.kind, 0) + spent
    return found
