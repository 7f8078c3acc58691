"""``python install.py gpu``: what merging costs and gains on this graphics card.

It looks at the card, checks laws that merging keeps there, and times SD1.5's and SDXL's UNets with random weights:
unmerged, by tomesd, and merged in calls with a renewed or a kept match, and in 20 steps; then compiled, with CUDA
graphs and without. It tells what our kernels take. At the end two sentences say for which of these merging pays here,
and for which not. It leaves gpu.json, written after each row, gpu.md and gpu.png. If you stop it, the same command goes
on. Without a card it runs tiny models.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # a program that is started as a file has its own folder on the path, not the package around it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks import gpu_report, gpu_rows, report, results, timing
from benchmarks.gpu_rows import ALONE, HOW, ON_AND_OFF, ROW, STEPS, STRENGTHS, Bench, OutOfTime
from benchmarks.models import BLOCK, SD15, SDXL

SIZES = {"cuda": (1024, 2048, 1536, 512), "cpu": (512,)}  # the most telling first
_COMPILING = 150.0  # seconds that a compiled row takes before it measures anything

Measure = Callable[[Bench], dict[str, Any]]


def plan(device: str) -> dict[str, Measure]:
    """Map each row's key, as ``sd15 call, 512 px``, in the order of measuring, to the function that makes the row.

    The function takes a `Bench`. The most telling rows are first, because a run may end early: SDXL's whole blocks, and
    all that is at 1024 px. device: "cuda" or "cpu", for its `SIZES`; "cuda" compiles the models, "cpu" the block.
    """
    rows: dict[str, Measure] = {"the device": gpu_rows.device}

    def add(name: str, pixels: int, how: str = "", more: tuple[str, ...] = ()) -> None:
        call = partial(gpu_rows.calls, name=name, pixels=pixels, how=how, more=more)
        rows[f"{name} call, {pixels} px{how and f', {how}'}"] = call

    (first, *others), models = SIZES[device], (SD15, SDXL)
    for name in (BLOCK, SDXL, SD15):
        add(name, first, more=(ALONE, *STRENGTHS[1:], ON_AND_OFF) if name == SDXL else ())
        if name != BLOCK:
            rows[f"{name} sampling of {STEPS} steps, {first} px"] = partial(gpu_rows.sampling, name=name, pixels=first)
            rows[f"{name} laws, {first} px"] = partial(gpu_rows.laws, name=name, pixels=first)
    rows["kernels"] = gpu_rows.kernel_laws
    for name, pixels in itertools.product(models, others[:1]):
        add(name, pixels)
    for how, name in itertools.product(HOW, models if device == "cuda" else (BLOCK,)):
        add(name, first, how)
    for pixels, name in itertools.product(others[1:], models):
        add(name, pixels)
    return rows


def execute(run: results.Run, rows: dict[str, Measure], bench: Bench) -> None:
    """Measure each missing row by its function in `rows`, the result of `plan`, and save it in the run.

    A row that fails is saved with the reason; a row that would not end before the bench's end stays missing.
    """
    for key in run.missing:
        if bench.left < (_COMPILING if key.endswith(tuple(HOW)) and not bench.tiny else 0):
            continue
        place = f"{len(rows) - len(run.missing) + 1}/{len(rows)}"
        print(f"[{place}] {key}; {bench.left:.0f} s left", file=sys.stderr, flush=True)
        try:
            with torch.inference_mode():
                row = rows[key](bench)
        except OutOfTime:
            print("  would not end in time", file=sys.stderr)
            continue
        except Exception as error:
            row = {"of": {}, "failed": {ROW: timing.reason(error)}}
        timing.free(bench.device)
        for name, why in row.get("failed", {}).items():
            print(f"  {name}: {why}", file=sys.stderr)
        run.add(key, row)


def measure(options: argparse.Namespace, command: str) -> int:
    """Measure missing rows on CUDA, else tiny models on a CPU; write and print the report.

    options: `minutes` until the end, and the folder `output`. Returns 1 if a whole row failed, now or before, else 0.
    """
    end = time.monotonic() + 60 * options.minutes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # the processor time of several counts their waiting
        print(f"torch {torch.__version__} sees no CUDA device. {gpu_report.TINY}", file=sys.stderr)
    rows, path = plan(device), options.output / "gpu.json"
    settings = {"tiny_models": device == "cpu", "timesteps": list(gpu_rows.WHEN["kept"])}  # no mix with other calls
    record = results.new_record("gpu", command, settings, results.describe(device))
    run = results.Run.start(record, list(rows), path)
    if run.missing:
        execute(run, rows, Bench(device, end))
        results.save(run.record, path)  # even if there was no time for a row
    else:
        print(f"{path} is complete; to measure again, move it away or give another --output", file=sys.stderr)
    print(report.write([path]), gpu_report.verdict(run.record), path.resolve(), sep="\n\n")
    return int(any(ROW in row.get("failed", {}) for row in run.record["rows"]))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 1 if a row failed, 2 after an error, 130 if stopped. None means ``sys.argv[1:]``."""
    parser = argparse.ArgumentParser(prog="gpu", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="end after so many minutes, with the "
                        "rows that are there by then (default %(default)g)")  # fmt: skip
    parser.add_argument("--output", type=Path, default=results.ROOT / "gpu-output", metavar="FOLDER", help="the folder "
                        "of gpu.json, gpu.md and gpu.png (default %(default)s)")  # fmt: skip
    return report.run("gpu", parser, arguments, measure)


if __name__ == "__main__":
    sys.exit(main())
