"""``python -m benchmarks.quality``: what merging does to a trained model's predictions and pictures.

Prints the table; the figures are kept as JSON below benchmarks/results/, and the same command goes on where a killed
run was. Several processes: ``accelerate launch --num_processes N -m benchmarks.quality --output FILE``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks import endings, environment, picture_metrics, quality_options, report, results, subjects
from benchmarks.call_times import one_thread
from benchmarks.purposes import PURPOSES
from benchmarks.quality_rows import Amounts, Bench, Row, calls, rows
from benchmarks.quality_run import Processes, fill, finish
from benchmarks.variant_list import VARIANTS


def _device(name: str | None, rank: int) -> torch.device:
    if name is None:
        name = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} does not work here: {str(error).splitlines()[0]}") from error
    return torch.device(name)


def _settings(
    options: argparse.Namespace, amounts: Amounts, prompts: list[str], lpips: bool, plan: list[Row]
) -> dict[str, Any]:
    """What has to be equal for two runs to be one."""
    chosen = {row.variant for row in plan}
    return {
        "models": {path.stem: subjects.fingerprint(path) for path in options.model},
        "for": options.purpose,
        "held_out": subjects.held_out_fingerprint(PURPOSES[options.purpose]),
        **asdict(amounts),
        **({} if prompts else quality_options.manner(options)._asdict()),
        "dtype": options.dtype,
        "prompts": prompts,
        "lpips": lpips,
        "variants": [variant.described() for name, variant in VARIANTS.items() if name in chosen],
    }


def _estimate(bench: Bench, plan: list[Row], amounts: Amounts) -> str:
    """Said before the start, from a picture without merging; what matches takes longer, what merges much less."""
    bench.subject.picture(0, 1)
    start = time.perf_counter()
    bench.subject.picture(0, 2)
    seconds = (time.perf_counter() - start) / 4 * sum(calls(row, amounts) for row in plan)
    return f"{len(plan)} rows in all, about {max(1, round(seconds / 60))} minutes from start to end"


def execute(options: argparse.Namespace, command: str) -> int:
    """Measure; where several processes do, the first one finishes the file and prints the table."""
    if options.list:
        print("\n".join(VARIANTS))
        return 0
    processes = Processes.from_environment()
    amounts, prompts = quality_options.complete(options)
    if processes.count > 1 and not options.output:
        raise ValueError("several processes need --output FILE, so that all of them know the file")
    device = _device(options.device, processes.rank)
    amounts = replace(amounts, clock=amounts.clock and device.type == "cpu")  # a host's time says little of a GPU's
    with one_thread(amounts.clock):
        _measure(options, command, amounts, prompts, device, processes)
    return 0


def _measure(
    options: argparse.Namespace, command: str, amounts: Amounts, prompts: list[str], device: torch.device,
    processes: Processes,
) -> None:
    paths = {path.stem: path for path in options.model}
    lpips, told = picture_metrics.lpips() if prompts else (None, "")
    names = quality_options.names(options)
    plan = [row for path in options.model for row in rows(
        path.stem, names, amounts, can_be_noised=subjects.is_scene_model(path), kind=subjects.kind_of(path)
    )]  # fmt: skip

    def open_bench(name: str) -> Bench:
        subject = subjects.opened(paths[name], options.config, device, prompts, getattr(torch, options.dtype),
                                  PURPOSES[options.purpose], quality_options.manner(options))  # fmt: skip
        bench = Bench(subject, amounts, options.save, lpips)
        if name == plan[0].checkpoint and processes.rank == 0:
            print(_estimate(bench, plan, amounts), file=sys.stderr)
        return bench

    settings = _settings(options, amounts, prompts, lpips is not None, plan)
    record = results.new_record("quality", command, settings, environment.describe(str(device)))
    record["notes"] = [told] if told else []
    done = fill(record, plan, options.output, processes, open_bench, amounts)
    if done is not None:
        path, record = done
        finish(record, path, options.save)
        print(report.write([path], path.with_suffix(".md"), None))
        print(f"\n{path}; with a plot: python -m benchmarks.report {path}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run; gives the exit code: 0 done, 2 wrong options (one sentence says which), 130 interrupted."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")  # the engine's notes of clamped ratios are known
    return endings.run("quality", quality_options.parser(), arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
