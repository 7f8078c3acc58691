"""``python -m benchmarks.cards``: what calls of SD1.5's and SDXL's UNets would take on graphics cards, by a model.

`card_trace` finds what a call launches. A launch costs what its multiplications, elements and bytes take, by shares of
a card's data sheet that were fitted to the rows of an H200. The command prints what is predicted beside each of these
rows, and how many times as fast merging would be on three cards. It takes minutes, and needs no card.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from statistics import mean
from typing import Any, NamedTuple
from unittest import mock

import torch

import tome_core
from benchmarks import card_trace, models, report, results
from benchmarks.card_trace import Launch, Operand
from benchmarks.gpu_rows import ALONE, STEPS, STRENGTHS, TOMESD, UNMERGED, WHEN, Patched
from benchmarks.models import BLOCK
from benchmarks.report import markdown
from benchmarks.work import LABELS, PIXELS
from tome_core.engine import state
from tome_core.patching import curve_of

Trace = Counter[Launch]  # how often a call has each launch


class Card(NamedTuple):
    """A card's data sheet. A rate is in operations, or bytes, a microsecond."""

    half: float  # of products in half precision, dense, with sums in float32
    single: float  # of operations in float32
    bandwidth: float  # of the memory, bytes
    processors: int
    ghz: float  # the processors' boost clock
    shared: int  # KiB of shared memory in a processor


H200 = "H200"
CARDS = {H200: Card(989e6, 67e6, 4.80e6, 132, 1.98, 228),
         "RTX 4090": Card(165e6, 82.6e6, 1.01e6, 128, 2.52, 100),
         "RTX 3060": Card(25.6e6, 12.7e6, 0.36e6, 28, 1.78, 100)}  # fmt: skip
_MEASURED = results.ROOT / "benchmarks" / "results" / "card-h200-2026-11-26.json"
ROWS = {f"block of 320 channels, {side}x{side} tokens": (BLOCK, 8 * side) for side in (64, 128)} | {
    f"{name} call, {pixels} px": (name, pixels) for name in LABELS for pixels in (1024, 2048)}  # fmt: skip
# Measured calls of `ALONE`, and their timesteps in turn
MEASURED = {"new": (900.0,), "renewed": (900.0, 800.0), "kept": (900.0, 890.0)}
# Rows whose launches the present engine makes too. When the card was measured, a match and a fit had other kernels.
UNCHANGED = (UNMERGED, TOMESD, "kept")


class Kind(NamedTuple):
    """What kernels of a kind reach. The longest of three times counts: computing, bytes, and `_LEAST`."""

    half: float = 0.0  # share of the card's rate in half precision; 0: no products
    single: float = 0.0  # share of its rate in float32
    per_million: float = 0.0  # microseconds of an H200's processors for 10^6 elements, in addition to products
    start: float = 0.0  # microseconds in addition
    programs: int = 10**6  # the most processors that it can use


_LEAST, _OF_BANDWIDTH = 1.8, 0.85  # microseconds of the shortest kernel, and the share of the bandwidth that is reached
_ZEROS = "memset"
_KINDS = {
    "product": Kind(half=0.75, start=4.0), "float32 product": Kind(single=0.4, start=3.5),
    "attention": Kind(half=0.85, per_million=0.24, start=4.0), "convolution": Kind(half=0.755, start=12.0),
    "elementwise": Kind(), "broadcast": Kind(per_million=1.33), "half of rows": Kind(per_million=3.73),
    "transposed": Kind(per_million=9.75),
    "to channels last": Kind(per_million=2.0), "weights to channels last": Kind(per_million=5.3),
    "group norm": Kind(per_million=11.4, programs=64), "layer norm": Kind(per_million=1.41, start=1.2),
    "reduction": Kind(per_million=1.15), "gather": Kind(per_million=4.6), "sort": Kind(per_million=600.0, start=22.0),
    _ZEROS: Kind(),
}  # fmt: skip
# A fused attention takes as long as with so many more keys, and a key with a bias as long as several without. Its
# elements are scores: a processor makes 16 exponentials in a cycle.
_MORE_KEYS, _WITH_BIAS, _WIDTH, _QUERIES = 204, 1.7, 64, 128  # widths and queries are rounded up to these
_ROW_OF_NORM = 760  # elements as which a layer norm's row costs more
_MANY_ROWS = 16384  # from these on a product sets a counter to zero first
_SORTS, _LONG_SORT, _MEANS_BY_SCATTER = (6, 19), 8192, 7  # kernels of a short and a long sort, of scatter_reduce


class Part(NamedTuple):
    """Kernels of one kind that an operator launches, and what they do in all."""

    kind: str
    flops: float = 0
    elements: float = 0
    moved: float = 0  # bytes read and written
    kernels: int = 1
    programs: float = math.inf  # that run at a time


def parts_of(launch: Launch) -> Iterator[Part]:
    """Yield what an operator of torch's launches."""
    name, operands = launch.name, launch.operands
    first, out, moved = operands[0], operands[-1], sum(one.bytes for one in operands)
    if name == card_trace.ATTENTION:
        batch, heads, queries, width = first.shape
        _, key, _, bias = launch.inputs
        keys = key.shape[2] * (1 if bias is None else _WITH_BIAS) + _MORE_KEYS
        scores = batch * heads * queries * keys
        flops = 4 * scores * _WIDTH * -(-width // _WIDTH)
        yield Part("attention", flops, scores, moved, programs=batch * heads * -(-queries // _QUERIES))
        yield Part(_ZEROS, kernels=2)
    elif name in ("mm", "addmm", "bmm", "baddbmm", "matmul"):
        left = launch.inputs[-2]
        kind = "float32 product" if left.width == 4 else "product"
        yield Part(kind, 2 * out.elements * left.shape[-1], 0, moved)
        if left.shape[-2] >= _MANY_ROWS:
            yield Part(_ZEROS)
    elif name == "convolution":
        weight = launch.inputs[1]
        is_product = weight.shape[2:] == (1, 1)
        flops = 2 * out.elements * weight.elements // weight.shape[0]
        yield Part("product" if is_product else "convolution", flops, 0, moved)
        for kind, one in () if is_product else (("", first), ("weights ", weight), ("", out)):
            yield Part(f"{kind}to channels last", 0, one.elements, 2 * one.bytes)
        yield Part("broadcast", 0, out.elements, 2 * out.bytes)
    elif name == "native_group_norm":
        yield Part("group norm", 0, first.elements, first.bytes)
        yield Part("elementwise")
        yield Part("broadcast", 0, first.elements, 2 * first.bytes)
    elif name == "native_layer_norm":
        yield Part("layer norm", 0, first.elements * (1 + _ROW_OF_NORM / first.shape[-1]), moved)
    elif name == "sort":
        yield Part("sort", 0, first.elements, moved, _SORTS[first.elements > _LONG_SORT])
    elif "scatter" in name:
        count, is_mean = math.prod(launch.inputs[1].shape), "reduce" in name
        yield Part("gather", 0, count * (1 + is_mean), 0, _MEANS_BY_SCATTER if is_mean else 1)
    elif name in ("gather", "index", "index_select", "embedding"):
        yield Part("gather", 0, out.elements, moved)
    else:
        is_reduction = out.elements < first.elements and name != "cat"
        yield Part("reduction" if is_reduction else _layout(launch), 0, max(first.elements, out.elements), moved)


def _layout(launch: Launch) -> str:
    """Return the kind of an elementwise operator: how its inputs lie in memory, compared with its output."""
    out, kind = launch.operands[-1], "elementwise"
    for one in launch.operands if launch.name != "cat" else ():
        if one.elements == out.elements and one.strides != out.strides:
            is_copy = launch.name in ("copy_", "clone", "_to_copy")
            return "transposed" if one.strides[-1] != 1 else "broadcast" if is_copy else "half of rows"
        if 1 < one.elements < out.elements:
            kind = "broadcast"
    return kind


def _waves(card: Card, programs: float, at_once: float = 1.0) -> float:
    """Return how many times as long as on an idle H200 a kernel of so many programs takes."""
    return max(1.0, programs / (at_once * card.processors)) * CARDS[H200].ghz / card.ghz


def _products(card: Card, count: float, *widths: int) -> float:
    """Return the time of products in half precision, of which a tile has `widths`, rounded up to powers of two."""
    return 2 * count * math.prod(1 << (width - 1).bit_length() for width in widths) / card.half / _OURS_OF_HALF


def _answer(card: Card, *inputs: Any) -> float:
    """Add what two kernels took that did the same: a program goes through a span of tokens, or all merged keys."""
    _, places, keys, _, merged, *_, span, _, _, _, _, first = inputs
    (spans, heads, width, _), tokens, groups = first.shape, keys.shape[1], merged.shape[1]
    fewer, slower = (3, 1.5) if width > _WIDE else (1, 1)  # wide heads have more programs, of more warps
    passed = (0.044 + 0.020 * (width / 40) ** 0.6) * slower * max(span, groups)
    products = _products(card, 2 * heads * places.shape[0] * (tokens + groups), width)
    products += _products(card, 2 * heads * tokens, width, width)
    return max(passed * _waves(card, spans * heads, min(2.5, card.shared // 58) / fewer), products)


def _ridge(card: Card, q: Operand, places: Operand, merged: Operand, *rest: Any) -> float:
    """Estimate, not measured: a warp takes 11,000 to 14,000 instructions, 17,000 at 160 channels, compiled for Hopper.

    At 3.45 cycles each, as in the measured kernel before, these are up to 28 and 33 us. More is taken, so as not to be
    too kind. A processor has registers for two programs, each of which solves a block of a head.
    """
    programs = merged.shape[0] * merged.shape[2] // rest[3]
    return (50.0 if merged.shape[2] > _WIDE else 40.0) * math.ceil(programs / 2 / card.processors) * _waves(card, 0)


def _spread(card: Card, keys: Operand, values: Operand, places: Operand, *_: Any) -> float:
    """Add to what was measured that each program, of 32 tokens, now reads the rows at `places` twice from a cache."""
    read_again = keys.bytes / 32 * 4 * places.shape[0]
    return (4e-6 * keys.bytes + read_again / 5.5e6) * _waves(card, 132)


def _correct(card: Card, out: Operand, q: Operand, matrix: Operand, constant: Operand, block: int, *_: Any) -> float:
    rows, width = out.elements // out.shape[3], out.shape[3]
    return _products(card, rows, width, width) + _products(card, rows, width, block)


def _best_keys(card: Card, x: Operand, rows: Operand | None, keys: Operand, *_: object) -> float:
    programs = keys.shape[0] * -(-(rows or x).shape[1] // 64)
    passed = 0.18 * -(-keys.shape[1] // 64) * -(-keys.shape[2] // 32) * _waves(card, programs, 1.44)
    return max(passed, _products(card, programs * 64 * keys.elements / keys.shape[0] * max(1, keys.width // 2)))


def _mean_rows(card: Card, x: Operand, values: Operand, order: Operand, offsets: Operand, tokens: int,
               means: Operand, *rest: Any) -> float:  # fmt: skip
    """Add to what was measured that programs with `group` go through all tokens twice: estimated, with a margin."""
    group, programs = rest[3], means.shape[0] * -(-means.shape[1] // 512)
    counted = 0.0 if group is None else 1e-3 * group.shape[1] * _waves(card, programs, 4)
    summed = 0.011 * math.prod(means.shape) / 132 * _waves(card, 132) if order.shape[0] >= offsets.shape[0] else 0.0
    return counted + summed


# By name: microseconds of a kernel of the engine's, beside what its bytes take, by its arguments. Measured on the H200,
# but for `ridge`. On cards that multiply slower its products count, with the share of fused attention on the H200.
_OURS: dict[str, Callable[..., float]] = {
    "answer": _answer, "ridge": _ridge, "spread": _spread, "correct": _correct,
    "best_keys": _best_keys, "mean_rows": _mean_rows,
    "assign_groups": lambda card, score, *_: 0.5e-6 * score.shape[1] ** 2 * _waves(card, 132),
}  # fmt: skip
_OURS_OF_BANDWIDTH, _OURS_OF_HALF, _WIDE = 0.5, 0.475, 128


def kernels_of(trace: Trace) -> int:
    """Return how many kernels and settings of memory to zero a traced call launches."""
    return sum(times * (1 if one.is_ours else sum(part.kernels for part in parts_of(one)))
               for one, times in trace.items())  # fmt: skip


def of_card(trace: Trace, card: Card) -> float:
    """Return the milliseconds in which a card works on a traced call."""
    return sum(times * (_of_ours(one, card) if one.is_ours else sum(_of(part, card) for part in parts_of(one)))
               for one, times in trace.items()) / 1e3  # fmt: skip


def _of_ours(launch: Launch, card: Card) -> float:
    """Return the microseconds of a kernel of the engine's."""
    used = launch.operands[launch.name in ("answer", "ridge") :]  # which read few of the queries, their first operand
    moved = sum(one.bytes for one in used) / card.bandwidth / _OURS_OF_BANDWIDTH
    return _LEAST + moved + _OURS[launch.name](card, *launch.inputs)


def _of(part: Part, card: Card) -> float:
    """Return the microseconds of an operator's part."""
    kind, known = _KINDS[part.kind], CARDS[H200]
    if part.kind == _ZEROS:
        return part.kernels * 0.8
    busy = min(1.0, part.programs / card.processors) * (kind.half * card.half + kind.single * card.single)
    used = min(card.processors, kind.programs, part.programs)
    processors = used / min(known.processors, kind.programs) * card.ghz / known.ghz
    computed = (part.flops / busy if busy else 0.0) + part.elements * kind.per_million / 1e6 / processors
    return max(_LEAST, kind.start + max(computed, part.moved / card.bandwidth / _OF_BANDWIDTH))


# Microseconds of the H200's host: an operator of the model with its modules' Python, an operator of a merge, a kernel
# of the engine's, and a self-attention that is patched. Fitted to rows of SD1.5 and SDXL by an earlier version.
_HOST, _HOST_MORE, _HOST_OURS, _HOST_PATCHED = 46.0, 25.0, 60.0, 190.0


def of_host(trace: Trace, unmerged: Trace, is_patched: bool) -> float:
    """Return the milliseconds in which the H200's host launches a traced call of a UNet."""
    before, ours = unmerged.total(), sum(times for one, times in trace.items() if one.is_ours)
    attentions = sum(times for one, times in unmerged.items() if one.name == card_trace.ATTENTION) / 2  # to the picture
    return (_HOST * before + _HOST_MORE * (trace.total() - before - ours) + _HOST_OURS * ours
            + _HOST_PATCHED * attentions * is_patched) / 1e3  # fmt: skip


@cache
def call(name: str, pixels: int, way: str, times: tuple[float, ...] = WHEN["new"]) -> Trace:
    """Trace a call of one of `models.NAMES`. `way` and `times` are those of `gpu_rows.Patched`."""
    patched = Patched(models.copy_sharing_weights(card_trace.network(name)), way)
    run = patched.call(card_trace.inputs(name, pixels), times)
    trace = card_trace.trace(run, 1 if way in (UNMERGED, TOMESD) else 2)[-1]
    if name == BLOCK:  # what was measured is the block without what is around it in a UNet
        trace = trace[[one.name for one in trace].index("clone") + 1 : -2]
    return Counter(trace)


class Prediction(NamedTuple):
    """What the model tells of a measured call, and beside it what was measured, in pairs."""

    card_ms: tuple[float, float]
    launches: tuple[float, float]
    clock_ms: tuple[float, float] | None  # None for a block, whose host is not modelled
    more: int  # operators and kernels of the engine's more than in the unmerged call


def predict(row: str, way: str) -> Prediction:
    """Predict a call of a row of `ROWS`: `UNMERGED`, `TOMESD`, or one of `MEASURED` by ``balanced``."""
    (name, pixels), of = ROWS[row], next(one["of"][way] for one in _measured() if one["key"] == row)
    trace = call(name, pixels, *((ALONE, MEASURED[way]) if way in MEASURED else (way,)))
    ms, unmerged = of_card(trace, CARDS[H200]), call(name, pixels, UNMERGED)
    clock = None if name == BLOCK else (max(ms, of_host(trace, unmerged, way in MEASURED)), of["ms"])
    more = trace.total() - unmerged.total()
    return Prediction((ms, of["card_ms"]), (kernels_of(trace), of["launches"]), clock, more)


@cache
def _measured() -> list[dict]:
    """Read the H200's rows."""
    return results.load(_MEASURED)["rows"]


@cache
def sampling(name: str, pixels: int, strength: str) -> tuple[tuple[bool, ...], tuple[Trace, ...]]:
    """Trace the `STEPS` calls of a picture, merged as a strength merges: attention, and SDXL's whole blocks.

    The error of random weights is not bounded, and calls that would wait for the host merge too. The first result tells
    in which steps an attention matched its tokens.
    """
    unet = models.copy_sharing_weights(card_trace.network(name))
    config = replace(tome_core.preset(strength, curve_of(unet)), max_error=None)
    handle, picture, matched = tome_core.patch(unet, config, host_clock=True), object(), []
    handle.pays = None
    arguments, timesteps = card_trace.inputs(name, pixels), iter([999.0 - 1000 / STEPS * step for step in range(STEPS)])

    def step() -> None:
        handle.set_time(timestep=next(timesteps), sampling=picture, pictures=1)
        with mock.patch.object(state, "correction_of", wraps=state.correction_of) as fitted:
            unet(*arguments)
        matched.append(fitted.called)

    traces = tuple(map(Counter, card_trace.trace(step, STEPS)))
    return tuple(matched), traces


def gains(name: str, pixels: int, strength: str, card: Card) -> tuple[float, float, float, float]:
    """Return how many times as fast merged steps are: kept ones, renewed ones, all of a picture, and all by the clock.

    The first three are of the card's own time. By the clock a call takes as long as the card or the H200's host,
    whichever takes longer. A step is renewed if attention matches again; whole blocks often do in the steps between.
    """
    unmerged, (matched, steps) = call(name, pixels, UNMERGED), sampling(name, pixels, strength)
    whole, times = of_card(unmerged, card), [of_card(trace, card) for trace in steps]
    clock = mean(max(time, of_host(trace, unmerged, True)) for time, trace in zip(times, steps, strict=True))
    kinds = ([time for time, renewed in zip(times[1:], matched[1:], strict=True) if renewed == wanted] or [whole]
             for wanted in (False, True))  # fmt: skip
    kept, renewed, every = (whole / mean(kind) for kind in (*kinds, times))
    return kept, renewed, every, max(whole, of_host(unmerged, unmerged, False)) / clock


def _pair(pair: tuple[float, float] | None, how: str) -> str:
    """Format a predicted and a measured value, and their ratio: ``39.1 / 38.7 (1.01)``."""
    return report.ABSENT if pair is None else f"{pair[0]:{how}} / {pair[1]:{how}} ({pair[0] / pair[1]:.2f})"


def predicted_table() -> str:
    """Make the Markdown table of `predict`: predicted / measured (ratio)."""
    heads = "row", "call", "ms of the card: predicted / measured", "launches", "ms by the clock", "operators added"
    rows = []
    for row in ROWS:
        for way in (UNMERGED, TOMESD, *MEASURED):
            ms, launches, clock, more = predict(row, way)
            named = way if way in UNCHANGED else f"{way} (other kernels then)"
            rows.append((row, named, _pair(ms, ".2f"), _pair(launches, ",.0f"), _pair(clock, ".0f"), f"{more:+,}"))
    return markdown(heads, rows)


def gains_table() -> str:
    """Make the Markdown table of `gains`, a line for a card, a UNet and a size."""
    of_strength = (f"`{strength}`: kept, renewed, 20 steps (by the clock)" for strength in STRENGTHS)
    heads, rows = ("card", "UNet", "pixels", "unmerged, ms", "tomesd", *of_strength), []
    for label, card in CARDS.items():
        for name in LABELS:
            for pixels in PIXELS:
                ms, tomesd = (of_card(call(name, pixels, way), card) for way in (UNMERGED, TOMESD))
                found = ("{:.2f}, {:.2f}, {:.2f} ({:.2f})".format(*gains(name, pixels, strength, card))
                         for strength in STRENGTHS)  # fmt: skip
                rows.append((label, LABELS[name], str(pixels), f"{ms:.0f}", f"{ms / tomesd:.2f}", *found))
    return markdown(heads, rows)


def execute(options: argparse.Namespace, command: str) -> None:
    """Print the tables, and what to know of them."""
    torch.set_num_threads(1)
    print("Predicted and measured on the H200, which ran an earlier version: its matches and fits had other kernels. "
          "new, renewed and kept are of attention alone by `balanced`.\n", predicted_table(), sep="\n")  # fmt: skip
    print("\nHow many times as fast, all modelled. The RTX cards are their data sheets with the H200's shares; every "
          "host is the H200's.\n", gains_table(), sep="\n")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 2 after an error, 130 if stopped. None means ``sys.argv[1:]``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cards", description=__doc__.partition("\n\n")[2])
    return report.run("cards", parser, arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
