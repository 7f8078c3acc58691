"""What merging costs the host: the time of Python, and of dispatching operators on tensors too small to matter.

On a fast GPU this is what a call of the UNet waits for. Process time of one thread, variants taking turns, beside the
unpatched model and tomesd where that is installed; and the calls of our own Python functions, counted.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle
from types import ModuleType
from typing import Any

import torch

from benchmarks.python_calls import beyond, watch
from benchmarks.sd_block import as_ldm_model
from benchmarks.tiny_layouts import BATCH, CHANNELS, LAYOUTS, SIDE, UNetLayout, make_inputs, make_unet
from tome_core import MergeConfig, patch
from tome_core.patching.handle import Patch
from tome_core.settings.presets import DEFAULT

_BLOCKS = 16  # of the UNet that is timed: as many as SD1.5 has, one a transformer, but all at the finest level
_WARM_UP = 4  # calls that are not counted
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


def make_run(case: str, blocks: int = 1, tomesd: ModuleType | None = None) -> Callable[[], torch.Tensor]:
    """One call of a UNet of so many blocks, as a host makes it, each time it is called; warmed up."""
    unet, inputs = make_unet(UNetLayout(((1,),) * blocks, (), ())), make_inputs()
    if case == TOMESD:
        tomesd.apply_patch(as_ldm_model(unet), ratio=0.5, use_rand=False)
    if case in (UNMERGED, TOMESD):
        return _warm(lambda: unet(*inputs))
    config, moments = _CASES[case][0], _CASES[case][1]()
    handle = patch(unet, config, host_clock=True)
    if case == OFF:
        handle.uninstall()
        handle.attach()

    def run() -> torch.Tensor:
        handle.set_time(**next(moments))
        return unet(*inputs)

    return _warm(run)


def _warm(run: Callable[[], Any]) -> Callable[[], Any]:
    for _ in range(_WARM_UP):
        run()
    return run


def measure(tomesd: ModuleType | None, repeats: int) -> dict[str, Any]:
    """All of it, as plain data."""
    return {
        "blocks": _BLOCKS,
        "block_us": time_blocks(tomesd, repeats),
        "patch_ms": {name: time_patching(layout, tomesd, repeats) for name, layout in LAYOUTS.items()},
        "calls": {case: count_calls(case) for case in (KEPT, CLOSED, OFF)},
    }


@torch.inference_mode()
def time_blocks(tomesd: ModuleType | None, repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds of an unmerged block, and what a block in each other case takes beyond that.

    median: over rounds, of the difference to that round's unmerged call, because a machine's speed changes.
    tenth: the difference between the 10 % quantiles, which another program's load reaches least.
    """
    cases = (UNMERGED, *_CASES, *(() if tomesd is None else (TOMESD,)))
    variants = {case: make_run(case, _BLOCKS, tomesd) for case in cases}
    seconds = _in_turns(variants, repeats)
    plain = seconds.pop(UNMERGED)
    result = {UNMERGED: _each(statistics.median(plain), _tenth(plain))}
    for case, values in seconds.items():
        difference = statistics.median(own - other for own, other in zip(values, plain, strict=True))
        result[case] = _each(difference, _tenth(values) - _tenth(plain))
    return result


def _each(median: float, tenth: float) -> dict[str, float]:
    """Seconds of a call as microseconds of a block."""
    return {"median": median / _BLOCKS * 1e6, "tenth": tenth / _BLOCKS * 1e6}


def _tenth(values: list[float]) -> float:
    return sorted(values)[len(values) // 10]


def time_patching(layout: UNetLayout, tomesd: ModuleType | None, repeats: int) -> dict[str, float]:
    """Milliseconds of what a host does for a sampling, for a step and for a call, with the default preset."""
    off, on = unets = make_unet(layout), make_unet(layout)
    handle, installed = patch(off, DEFAULT, host_clock=True), patch(on, DEFAULT, host_clock=True)
    handle.uninstall()
    moments = _one_moment()
    variants = {
        "on and off, once a sampling": lambda: (handle.attach(), handle.detach()),
        "on where it is on already": installed.attach,
        "time told, once a step": lambda: installed.set_time(**next(moments)),
        "switched to and back, once a call": lambda: _switch(installed),
    }
    if tomesd is not None:
        model = as_ldm_model(make_unet(layout))
        put_on = partial(tomesd.apply_patch, model, ratio=0.5, use_rand=False)
        variants["tomesd's on and off"] = lambda: (put_on(), tomesd.remove_patch(model))
    for run in variants.values():
        _warm(run)
    seconds = _in_turns(variants, repeats)
    del unets  # a handle alone does not keep its UNet alive
    return {name: statistics.median(values) * 1e3 for name, values in seconds.items()}


def _switch(handle: Patch) -> None:
    with handle.merging():
        pass


def _in_turns(variants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of process time of each variant in each round; in another order each time."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(variants), len(variants)):
            seconds[name].append(min(time_run(variants[name]) for _ in range(_IN_A_ROW)))
    return seconds


def time_run(run: Callable[[], Any], device: str = "cpu") -> float:
    """Seconds: of process time on a CPU, else until the device is done."""
    if device == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.inference_mode()
def count_calls(case: str) -> dict[str, Any]:
    """What one block and its transformer call in this case: what a UNet of two calls beyond a UNet of one."""
    return beyond(watch(make_run(case, 2)), watch(make_run(case, 1)))


def table(result: dict[str, Any]) -> str:
    """The measurements for a reader."""
    blocks = dict(result["block_us"])
    plain = blocks.pop(UNMERGED)
    lines = [
        "",
        "host time, " + ", ".join(f"{name} {value}" for name, value in result["environment"].items()),
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
    if TOMESD not in blocks:
        lines.append("tomesd is not installed, so there is nothing to compare with: pip install tomesd==0.1.3")
    return "\n".join(lines)
