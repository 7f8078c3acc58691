"""Is merging worth it on this machine? ``python -m tome_core.bench`` measures it, beside tomesd where it is installed.

Medians of one process on one thread, variants taking turns, as process time on a CPU, which another program costs its
evenness, not its value. ``--host-time`` measures what merging costs the host instead (`host_time`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from ..merging import kernels
from ..merging.grid import Grid
from ..merging.methods import METHODS, MatchOptions
from ..merging.plan import MergePlan
from ..patching import patch
from ..settings.config import MergeConfig
from ..settings.presets import DEFAULT, preset
from . import host_time
from .sd_block import CHANNELS, as_ldm_model, make_block, make_inputs

_OPTIONS = MatchOptions(ratio=0.5, sx=2, sy=2)
# of the block: tomesd's way, and what goes further
_TOMESDS = MergeConfig(ratio=_OPTIONS.ratio, use_rand=False, proportional=False)
_SIZED = {
    "k+v .75 sized": MergeConfig(ratio=0.75, side="kv", use_rand=False),
    "k+v .9375 sized": MergeConfig(ratio=0.9375, sx=4, sy=4, side="kv", use_rand=False),
}
_PRESET = replace(preset(DEFAULT), only_if_it_pays=False)  # whether that pays is the question
_REPEATS, _HOST_REPEATS = 7, 41
_STEPS = 20  # of a picture, over whose average a preset is timed: its steps differ, and share matches
_MEMORY_MODES = ("ours", "tomesd")  # what `--measure-memory` runs in a fresh process


def medians(variants: dict[str, Callable[[], Any]], repeats: int, device: str = "cpu") -> dict[str, float]:
    """Median seconds of each variant; they take turns, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(repeats + 1):
        for name, run in variants.items():
            spent = host_time.time_run(run, device)
            if round_number:
                seconds[name].append(spent)
    return {name: statistics.median(values) for name, values in seconds.items()}


def time_block(repeats: int = 3, side: int = 64) -> tuple[float, float]:
    """Seconds of one SD1.5 block on ``side * side`` tokens, batch 2, float32: (as it is, with the default preset).

    The preset's are the mean over the steps of a picture.
    """
    block, inputs = make_block(), _guide(make_inputs(side, 2, "cpu", torch.float32))
    variants = {"vanilla": lambda: block(*inputs), "merged": _patched_run(block, inputs, _PRESET, _STEPS)}
    with torch.inference_mode():
        result = medians(variants, repeats)
    return result["vanilla"], result["merged"] / _STEPS


def _patched_run(block: torch.nn.Module, inputs: tuple, config: MergeConfig, steps: int = 1) -> Callable[[], None]:
    """A call, or all the steps of one picture, for which the patch is put on and taken off again."""
    handle = patch(block, config, host_clock=True)
    handle.uninstall()

    def run() -> None:
        sampling = object()
        handle.install()
        try:
            for step in range(steps):
                handle.set_time(timestep=999.0 * (1 - step / steps), sampling=sampling)
                block(*inputs)
        finally:
            handle.uninstall()

    return run


def _guide(inputs: tuple) -> tuple:
    """The same for one picture alone, twice, as guidance asks for a prompt and a negative one."""
    picture, *others = inputs
    return picture[:1].expand_as(picture), *others


def _tomesd_run(tomesd: ModuleType, block: torch.nn.Module, inputs: tuple, ratio: float) -> Callable[[], Any]:
    model = as_ldm_model(block)

    def run() -> Any:
        tomesd.apply_patch(model, ratio=ratio, use_rand=False)
        try:
            return block(*inputs)
        finally:
            tomesd.remove_patch(model)

    return run


def measure_steps(tomesd: ModuleType | None, side: int, repeats: int, device: str, dtype: torch.dtype) -> dict:
    """Milliseconds of match, merge and unmerge at ratio 0.5, ours and tomesd's."""
    tokens = side * side
    x = torch.randn(2, tokens, CHANNELS, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    plan = METHODS["bipartite"].match(x, Grid(side, side), _OPTIONS)
    merged = plan.merge(x)
    whole = {"ours": lambda: _once("ours", x, side), "shared": lambda: plan.unmerge(plan.merge(x))}
    if kernels.ready(x):
        whole["ours without Triton"] = kernels.without()(whole["ours"])
    # with nothing derived from it yet, as a block that matches anew has it
    merge = {"ours": lambda: MergePlan(plan.group, plan.num_groups).merge(x)}
    unmerge = {"ours": lambda: plan.unmerge(merged)}
    if tomesd is not None:
        their_merge, their_unmerge = _tomesd_match(x, side)
        their_merged = their_merge(x)
        merge["tomesd"] = lambda: their_merge(x)
        unmerge["tomesd"] = lambda: their_unmerge(their_merged)
        whole["tomesd"] = lambda: _once("tomesd", x, side)
    parts = {"match + merge + unmerge": whole}
    if side == 64:
        parts = {"merge": merge, "unmerge": unmerge, **parts}
    return {name: _in_ms(medians(variants, repeats, device)) for name, variants in parts.items()}


def _tomesd_match(x: torch.Tensor, side: int) -> tuple[Callable, Callable]:
    """tomesd's merge and unmerge."""
    function = importlib.import_module("tomesd.merge").bipartite_soft_matching_random2d
    return function(x, side, side, 2, 2, int(x.shape[1] * _OPTIONS.ratio), no_rand=True)


def measure_block(tomesd: ModuleType | None, side: int, repeats: int, device: str, dtype: torch.dtype) -> dict:
    """Milliseconds of one SD1.5 block as it is, with half of its tokens merged, and with merged keys and values.

    Of the default preset the mean over the steps of a picture.
    """
    block, inputs = make_block(device, dtype), _guide(make_inputs(side, 2, device, dtype))
    variants = {"vanilla": lambda: block(*inputs), "ours": _patched_run(block, inputs, _TOMESDS)}
    if tomesd is not None:
        variants["tomesd"] = _tomesd_run(tomesd, block, inputs, _OPTIONS.ratio)
    variants |= {name: _patched_run(block, inputs, config) for name, config in _SIZED.items()}
    seconds = medians(variants, repeats, device)
    picture = {f"preset {DEFAULT}": _patched_run(block, inputs, _PRESET, _STEPS)}
    seconds |= {name: value / _STEPS for name, value in medians(picture, -(-repeats // 5), device).items()}
    return _in_ms(seconds)


def measure_memory(which: str, side: int, device: str) -> float | None:
    """Peak MiB beyond its inputs of one match, merge and unmerge; on a CPU in a process of its own."""
    if device != "cpu":
        return _cuda_peak(which, side, device)
    if importlib.util.find_spec("resource") is None:  # Windows
        return None
    command = [sys.executable, "-m", "tome_core.bench", "--measure-memory", which, "--side", str(side)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _once(which: str, x: torch.Tensor, side: int) -> None:
    if which == "ours":
        plan = METHODS["bipartite"].match(x, Grid(side, side), _OPTIONS)
        plan.unmerge(plan.merge(x))
    else:
        merge, unmerge = _tomesd_match(x, side)
        unmerge(merge(x))


def _process_peak(which: str, side: int) -> float:
    import resource

    x = torch.randn(2, side * side, CHANNELS)
    _once(which, x[:, :256].contiguous(), 16)  # what libraries allocate once is not the method's
    unit = 2**20 if sys.platform == "darwin" else 2**10
    peak = before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ballast = []
    while peak - before < unit:  # importing peaked higher than what is in use now: fill up to that mark
        ballast.append(b"\1" * 2**20)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _once(which, x, side)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / unit


def _cuda_peak(which: str, side: int, device: str) -> float:
    x = torch.randn(2, side * side, CHANNELS, device=device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _once(which, x, side)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _in_ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: value * 1e3 for name, value in seconds.items()}


def _environment(device: str, dtype: str) -> dict[str, str]:
    where = torch.cuda.get_device_name() if device != "cpu" else platform.processor() or platform.machine()
    return {"device": where, "dtype": dtype, "torch": torch.__version__, "python": platform.python_version()}


def run(device: str, dtype: str, repeats: int) -> dict[str, Any]:
    """All measurements, as plain data."""
    kind, tomesd = getattr(torch, dtype), _find_tomesd()
    result: dict[str, Any] = {"environment": _environment(device, dtype), "repeats": repeats}
    with torch.inference_mode():
        _progress("match, merge and unmerge at 4,096 tokens")
        result["ms_4096"] = measure_steps(tomesd, 64, repeats, device, kind)
        _progress("match, merge and unmerge at 16,384 tokens")
        result["ms_16384"] = measure_steps(tomesd, 128, repeats, device, kind)
        _progress("one SD1.5 block at 4,096 tokens")
        result["block_ms_4096"] = measure_block(tomesd, 64, repeats, device, kind)
        _progress("peak memory at 16,384 tokens")
        modes = _MEMORY_MODES if tomesd is not None else _MEMORY_MODES[:1]
        result["peak_mib_16384"] = {mode: measure_memory(mode, 128, device) for mode in modes}
    return result


def _find_tomesd() -> ModuleType | None:
    return importlib.import_module("tomesd") if importlib.util.find_spec("tomesd") else None


def table(result: dict[str, Any]) -> str:
    """The measurements for a reader."""
    lines = ["", "batch 2, 320 channels, ratio 0.5; " + ", ".join(f"{k} {v}" for k, v in result["environment"].items())]
    for tokens, key in (("4,096", "ms_4096"), ("16,384", "ms_16384")):
        for name, times in result[key].items():
            lines.append(_row(f"{name}, {tokens} tokens", times, "ms", reference="tomesd"))
    lines.append(_row("SD1.5 block, 4,096 tokens", result["block_ms_4096"], "ms", reference="vanilla"))
    lines.append(_row("peak memory, 16,384 tokens", result["peak_mib_16384"], "MiB", reference="tomesd"))
    if "tomesd" not in result["block_ms_4096"]:
        lines.append("tomesd is not installed, so there is nothing to compare with: pip install tomesd==0.1.3")
    if result["block_ms_4096"]["ours"] >= result["block_ms_4096"]["vanilla"]:
        lines.append("On this machine merging does not pay for a block of 4,096 tokens; larger pictures may.")
    return "\n".join(lines)


def _row(name: str, values: dict[str, float | None], unit: str, reference: str) -> str:
    cells_ = []
    for key, value in values.items():
        base = values.get(reference)
        factor = f" ({base / value:.2f}x)" if base and value and key != reference else ""
        cells_.append(f"{key} {'not measured' if value is None else f'{value:.2f} {unit}'}{factor}")
    return f"{name:<42} " + ", ".join(cells_)


def _progress(what: str) -> None:
    print(f"measuring {what} ...", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, and write it as JSON where asked to."""
    parser = argparse.ArgumentParser(prog="python -m tome_core.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where to measure")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument(
        "--repeats", type=int, help=f"measurements of which the median is printed, {_REPEATS}; with --host-time "
        f"{_HOST_REPEATS}",
    )
    parser.add_argument(
        "--host-time", action="store_true", help="measure what merging costs the host beside the device's work"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there as well")
    parser.add_argument("--measure-memory", choices=_MEMORY_MODES, help=argparse.SUPPRESS)
    parser.add_argument("--side", type=int, default=128, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.measure_memory:
        with torch.inference_mode():
            print(_process_peak(options.measure_memory, options.side))
        return
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: use a whole number from 1 up")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu")
    if options.host_time:
        if (options.device, options.dtype) != ("cpu", "float32"):
            parser.error("--host-time measures the host alone: leave --device and --dtype out")
        _progress("what merging costs the host")
        repeats = options.repeats or _HOST_REPEATS
        result = {"environment": _environment("cpu", "float32"), "repeats": repeats}
        result |= host_time.measure(_find_tomesd(), repeats)
        print(host_time.table(result))
    else:
        result = run(options.device, options.dtype, options.repeats or _REPEATS)
        print(table(result))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
