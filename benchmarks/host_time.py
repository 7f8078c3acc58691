"""``python -m benchmarks.host_time``: what merging costs the host, on tensors too small for arithmetic to matter.

On a fast GPU the time of Python and of dispatching operators is what a call of the UNet waits for. Process time of one
thread, variants taking turns, beside the unpatched model and tomesd; and the calls of our own Python functions,
counted. Prints the table and keeps nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count, cycle
from typing import Any

import tomesd
import torch

from benchmarks import models, results, timing
from benchmarks.attention_work import one_thread
from benchmarks.python_calls import beyond, watch
from benchmarks.sd_block import as_ldm_model
from benchmarks.tiny_unet import BATCH, CHANNELS, SIDE, make_inputs, make_unet
from tome_core import MergeConfig, patch
from tome_core.patching import Patch
from tome_core.settings.presets import DEFAULT

_BLOCKS = 16  # of the UNet that is timed: as many as SD1.5 has, one a transformer, but all at the finest level
_WARM_UP = 4  # calls that are not counted
_REPEATS = 41
_IN_A_ROW = 3  # calls of which the fastest counts: the first finds in the caches what another variant has left there

_KEEP = 100.0
_PRESET_LIKE = {"side": "kv", "metric": "keys+values", "refine": 1, "keep": _KEEP, "ratio": 0.9375, "sx": 4, "sy": 4,
                "use_rand": False}  # fmt: skip
# without a gate, which would leave so few tokens alone
_MERGING, _GATED = MergeConfig(**_PRESET_LIKE), MergeConfig(**_PRESET_LIKE, only_if_it_pays=True)
_UNCORRECTED = MergeConfig(**_PRESET_LIKE, correction=False)
UNMERGED, TOMESD = "unmerged", "tomesd, ratio 0.5"
KEPT, RENEWED, ANEW = "match kept", "match renewed", "match made anew"
WITHOUT = ", without the correction"
CLOSED, OFF = "left alone by the gate", "switched off"

# what `Patch.set_time` is told before each call: steps that are closer together than a match is kept, such as are not,
# and each of a picture of its own
_one_moment = partial(cycle, [{"timestep": 500.0, "sampling": "picture"}, {"timestep": 499.0, "sampling": "picture"}])
_far_apart = partial(
    cycle, [{"timestep": 500.0, "sampling": "picture"}, {"timestep": 500.0 - _KEEP - 1, "sampling": "picture"}]
)


def _pictures() -> Iterator[dict[str, Any]]:
    return ({"timestep": 500.0, "sampling": number} for number in count())


# case -> settings and times
_CASES: dict[str, tuple[MergeConfig, Callable[[], Iterator[dict[str, Any]]]]] = {
    KEPT: (_MERGING, _one_moment), RENEWED: (_MERGING, _far_apart), ANEW: (_MERGING, _pictures),
    KEPT + WITHOUT: (_UNCORRECTED, _one_moment), RENEWED + WITHOUT: (_UNCORRECTED, _far_apart),
    ANEW + WITHOUT: (_UNCORRECTED, _pictures), CLOSED: (_GATED, _one_moment), OFF: (_MERGING, _one_moment),
}  # fmt: skip


def make_run(case: str, blocks: int = 1) -> Callable[[], torch.Tensor]:
    """One call of a UNet of so many blocks, as a host makes it, each time it is called; warmed up."""
    unet, inputs = make_unet(blocks), make_inputs()
    if case == TOMESD:
        tomesd.apply_patch(as_ldm_model(unet), ratio=0.5, use_rand=False)
    if case in (UNMERGED, TOMESD):
        return _warm(lambda: unet(*inputs))
    config, moments = _CASES[case][0], _CASES[case][1]()
    handle = patch(unet, config, host_clock=True)

    def run() -> torch.Tensor:
        handle.set_time(**next(moments))
        with handle.unmerged() if case == OFF else nullcontext():
            return unet(*inputs)

    return _warm(run)


def _warm(run: Callable[[], Any]) -> Callable[[], Any]:
    for _ in range(_WARM_UP):
        run()
    return run


def measure(repeats: int) -> dict[str, Any]:
    """All of it, as plain data."""
    return {
        "blocks": _BLOCKS,
        "block_us": time_blocks(repeats),
        "patch_ms": {name: time_patching(name, repeats) for name in models.SHAPES},
        "calls": {case: count_calls(case) for case in (KEPT, CLOSED, OFF)},
    }


@torch.inference_mode()
def time_blocks(repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds of an unmerged block, and what a block in each other case takes beyond that.

    median: over rounds, of the difference to that round's unmerged call, because a machine's speed changes.
    tenth: the difference between the 10 % quantiles, which another program's load reaches least.
    """
    variants = {case: make_run(case, _BLOCKS) for case in (UNMERGED, *_CASES, TOMESD)}
    seconds = timing.in_turns(variants, repeats, _fastest)
    plain = seconds.pop(UNMERGED)
    result = {UNMERGED: _each(statistics.median(plain), _tenth(plain))}
    for case, values in seconds.items():
        difference = statistics.median(own - other for own, other in zip(values, plain, strict=True))
        result[case] = _each(difference, _tenth(values) - _tenth(plain))
    return result


def _fastest(run: Callable[[], Any]) -> float:
    return min(timing.seconds(run) for _ in range(_IN_A_ROW))


def _each(median: float, tenth: float) -> dict[str, float]:
    """Seconds of a call as microseconds of a block."""
    return {"median": median / _BLOCKS * 1e6, "tenth": tenth / _BLOCKS * 1e6}


def _tenth(values: list[float]) -> float:
    return sorted(values)[len(values) // 10]


def time_patching(name: str, repeats: int) -> dict[str, float]:
    """Milliseconds of what a host does for a sampling, for a step and for a call, with the default preset."""
    off, on, other = [models.make(name, "cpu", torch.float32, tiny=True) for _ in range(3)]
    handle, installed = patch(off, DEFAULT, host_clock=True), patch(on, DEFAULT, host_clock=True)
    handle.uninstall()
    moments, model = _one_moment(), as_ldm_model(other)
    put_on = partial(tomesd.apply_patch, model, ratio=0.5, use_rand=False)
    variants = {
        "on and off, once a sampling": lambda: (handle.install(), handle.uninstall()),
        "on where it is on already": installed.install,
        "time told, once a step": lambda: installed.set_time(**next(moments)),
        "switched off and on, once a call": lambda: _switch(installed),
        "tomesd's on and off": lambda: (put_on(), tomesd.remove_patch(model)),
    }
    seconds = timing.in_turns({one: _warm(run) for one, run in variants.items()}, repeats, _fastest)
    del off, on  # until here: a handle alone does not keep its UNet alive
    return {name: statistics.median(values) * 1e3 for name, values in seconds.items()}


def _switch(handle: Patch) -> None:
    with handle.unmerged():
        pass


@torch.inference_mode()
def count_calls(case: str) -> dict[str, Any]:
    """What one block and its transformer call in this case: what a UNet of two calls beyond a UNet of one."""
    return beyond(watch(make_run(case, 2)), watch(make_run(case, 1)))


def table(result: dict[str, Any]) -> str:
    """The measurements for a reader."""
    blocks = dict(result["block_us"])
    plain = blocks.pop(UNMERGED)
    lines = [
        f"a UNet of {result['blocks']} blocks, {SIDE}x{SIDE} tokens of {CHANNELS} channels, batch {BATCH}",
        f"{'':<42} {'median':>12} {'10 % quantile':>15}",
        f"{'a block, ' + UNMERGED:<42} {plain['median']:9.0f} us {plain['tenth']:12.0f} us",
        *(f"{'  ' + case:<42} {us['median']:+9.0f} us {us['tenth']:+12.0f} us" for case, us in blocks.items()),
    ]
    lines.append(f"{'the patch, preset ' + DEFAULT:<42} " + " ".join(f"{name:>12}" for name in result["patch_ms"]))
    for name in next(iter(result["patch_ms"].values())):
        values = " ".join(f"{times[name]:9.3f} ms" for times in result["patch_ms"].values())
        lines.append(f"{'  ' + name:<42} {values}")
    lines.append(f"{'Python functions called for one block':<42} {'calls':>12} {'files':>7} {'changes of file':>17}")
    for case, way in result["calls"].items():
        lines.append(f"{'  ' + case:<42} {way['calls']:12} {way['files']:7} {way['changes']:17}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--repeats", type=int, default=_REPEATS, metavar="N", help="rounds of which the median is "
                        f"printed (default {_REPEATS})")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: give a number from 1 up")
    with one_thread(True):
        print(", ".join(f"{name} {version}" for name, version in results.versions().items()))
        print(table(measure(options.repeats)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
