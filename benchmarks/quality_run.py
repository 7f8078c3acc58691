"""A quality run from its plan to its finished file: resumed where it was killed, divided over processes.

Several processes (``accelerate launch``, torchrun) share nothing but a folder: each writes the rows of its own parts
into a file beside the result, and the first one gathers them at the end. So none waits for another in between, and
a killed run goes on with any number of processes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks import picture_metrics, results
from benchmarks.quality_rows import Amounts, Bench, Row, calls
from benchmarks.results import Record, ResultError, Run
from benchmarks.variant_list import PLAIN

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
    record: Record, rows: list[Row], output: Path | None, processes: Processes, benches: Callable[[str], Bench],
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
        _measure([row for row in rows if row.key in missing], run, benches, amounts)
        return run.path, run.record
    done = _keys_of(_pieces(record, output))
    mine = [row for row in processes.share(rows) if row.key not in done]
    if mine:
        run = Run.start(record, [row.key for row in mine], output.with_name(f"{output.name}.rank{processes.rank}"))
        _measure(mine, run, benches, amounts)
    if processes.rank:
        return None
    while set(keys) - _keys_of(_pieces(record, output)):
        time.sleep(POLL)
    return output, _gather(record, output, keys)


def _measure(rows: list[Row], run: Run, benches: Callable[[str], Bench], amounts: Amounts) -> None:
    total = sum(calls(row, amounts) for row in rows)
    quiet = not sys.stderr.isatty()
    with tqdm(total=total, unit="call", mininterval=10 if quiet else 0.1, dynamic_ncols=True) as bar:
        for checkpoint, group in groupby(rows, lambda row: row.checkpoint):
            bench = benches(checkpoint)
            for row in group:
                bar.set_description(f"{checkpoint} {row.measure} {row.first + 1}: {row.variant}", refresh=not quiet)
                run.add(row.key, {**row.described(), **bench.measure(row)})
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
