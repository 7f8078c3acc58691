"""``python -m benchmarks.quality``: what merging does to a trained model's predictions and pictures.

Prints the table; the figures are kept as JSON below benchmarks/results/, and the same command goes on where a killed
run was. Several processes: ``accelerate launch --num_processes N -m benchmarks.quality --output FILE``. They share
nothing but a folder: each writes the rows of its own parts into a file beside the result, and the first one gathers
them at the end. So none waits for another in between, and a killed run goes on with any number of processes.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import picture_metrics, quality_options, report, results, subjects
from benchmarks.attention_work import one_thread
from benchmarks.quality_rows import Amounts, QualityBench, Row, calls, rows
from benchmarks.results import Record, ResultError, Run
from benchmarks.subjects import PURPOSES
from benchmarks.variant_list import PLAIN, VARIANTS

POLL = 2.0  # seconds between looks at what the other processes have


class Processes(NamedTuple):
    """Which of how many processes this one is."""

    rank: int
    count: int

    @classmethod
    def from_environment(cls) -> Processes:
        """As launchers tell it; one process where nothing does."""
        return cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

    def share(self, rows: Iterable[Row]) -> list[Row]:
        """This process's rows: every `count`-th part, because the rows of a part share their unmerged result."""
        groups = [list(group) for _, group in groupby(rows, lambda row: row.group)]
        return [row for group in groups[self.rank :: self.count] for row in group]


def fill(
    record: Record, rows: list[Row], output: Path | None, processes: Processes, benches: Callable[[str], QualityBench],
    amounts: Amounts,
) -> tuple[Path, Record] | None:
    """Measure what is missing and give the finished file and record; None in all processes but the first.

    benches: the bench of a checkpoint's name, called again only when the checkpoint changes.
    """
    keys = [row.key for row in rows]
    if processes.count == 1:
        _gather(record, output, keys)
        run = Run.start(record, keys, output)
        missing = set(run.missing)
        _measure_rows([row for row in rows if row.key in missing], run, benches, amounts)
        return run.path, run.record
    done = _keys_of(_pieces(record, output))
    mine = [row for row in processes.share(rows) if row.key not in done]
    if mine:
        run = Run.start(record, [row.key for row in mine], output.with_name(f"{output.name}.rank{processes.rank}"))
        _measure_rows(mine, run, benches, amounts)
    if processes.rank:
        return None
    while set(keys) - _keys_of(_pieces(record, output)):
        time.sleep(POLL)
    return output, _gather(record, output, keys)


def _measure_rows(rows: list[Row], run: Run, benches: Callable[[str], QualityBench], amounts: Amounts) -> None:
    total = sum(calls(row, amounts) for row in rows)
    quiet = not sys.stderr.isatty()
    with tqdm(total=total, unit="call", mininterval=10 if quiet else 0.1, dynamic_ncols=True) as bar:
        for checkpoint, group in groupby(rows, lambda row: row.checkpoint):
            bench = benches(checkpoint)
            for row in group:
                bar.set_description(f"{checkpoint} {row.measure} {row.first + 1}: {row.variant}", refresh=not quiet)
                run.add(row.key, {**row.describe(), **bench.measure(row)})
                bar.update(calls(row, amounts))


def _pieces(record: Record, output: Path) -> Iterator[Record]:
    """What is there already: the file itself, and what processes of this run and of killed ones wrote."""
    for path in sorted([output, *output.parent.glob(f"{output.name}.rank*")]):
        if path.exists() and not path.name.endswith(".part"):
            found = results.load(path)
            differing = [field for field in results.IDENTITY if found[field] != record[field]]
            if differing:
                raise ResultError(f"{path} is of a run with other {', '.join(differing)}; "
                                  "give another --output, or remove this one")
            yield found


def _keys_of(pieces: Iterable[Record]) -> set[str]:
    return {row["key"] for piece in pieces for row in piece["rows"]}


def _gather(record: Record, output: Path | None, keys: list[str]) -> Record:
    """Move the rows of all processes' files into `output`, in the plan's order; nothing where there are no files."""
    pieces = sorted(output.parent.glob(f"{output.name}.rank*")) if output else []
    if not pieces:
        return record
    found = list(_pieces(record, output))
    rows = {row["key"]: row for piece in found for row in piece["rows"]}
    commits = dict.fromkeys(piece.get("commit") or "unknown" for piece in found)
    record = {**record, "commit": ", ".join(commits), "rows": [rows[key] for key in keys if key in rows]}
    record["missing"] = [key for key in keys if key not in rows]
    results.save(record, output)
    for path in pieces:
        path.unlink()
    return record


def finish(record: Record, path: Path, pictures: Path | None) -> Record:
    """Replace the features of all pictures by the Frechet distances made of them, where there are any.

    pictures: the folder with the saved ones, for FID where its library and weights are on this machine.
    """
    by_variant: dict[tuple[str, str], list] = {}
    for row in record["rows"]:
        by_variant.setdefault((row["checkpoint"], row["variant"]), []).extend(row.pop("features", []))
    found = {key: np.array(values) for key, values in by_variant.items() if values}
    if not found:
        return record
    fid, told = picture_metrics.inception_distance() if pictures else (None, "FID is left out: it needs --save DIR")
    distances = []
    for (checkpoint, variant), values in found.items():
        distance = {"checkpoint": checkpoint, "variant": variant}
        distance["plain_features"] = picture_metrics.frechet(found[checkpoint, PLAIN], values)
        if fid:
            distance["inception"] = fid(pictures / checkpoint / PLAIN, pictures / checkpoint / variant)
        distances.append(distance)
    record = {**record, "frechet": distances, "notes": [*record.get("notes", []), told]}
    results.save(record, path)
    return record


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
        "variants": [variant.describe() for name, variant in VARIANTS.items() if name in chosen],
    }


def _estimate(bench: QualityBench, plan: list[Row], amounts: Amounts) -> str:
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

    def open_bench(name: str) -> QualityBench:
        path, purpose, dtype = paths[name], PURPOSES[options.purpose], getattr(torch, options.dtype)
        if subjects.is_scene_model(path):
            subject = subjects.SceneSubject(path, device, purpose, quality_options.manner(options))
        else:
            subject = subjects.UserSubject(path, options.config, device, prompts, dtype, purpose)
        bench = QualityBench(subject, amounts, options.save, lpips)
        if name == plan[0].checkpoint and processes.rank == 0:
            print(_estimate(bench, plan, amounts), file=sys.stderr)
        return bench

    settings = _settings(options, amounts, prompts, lpips is not None, plan)
    record = results.new_record("quality", command, settings, results.describe(str(device)))
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
    return report.run("quality", quality_options.parser(), arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
