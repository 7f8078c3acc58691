"""``python -m benchmarks.quality``: what merging does to a trained model's predictions and pictures.

Prints the table; the figures are kept as JSON below benchmarks/results/, and the same command goes on where a killed
run was. Several processes: ``accelerate launch --num_processes N -m benchmarks.quality --output FILE``. They share
nothing but a folder: each writes the rows of its own parts into a file beside the result, and the first process gathers
them at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmarks import report, results, subjects
from benchmarks.attention_work import one_thread
from benchmarks.quality_rows import Amounts, QualityBench, Row, calls, rows
from benchmarks.results import Record, Run
from benchmarks.subjects import PURPOSES
from benchmarks.variant_list import ALWAYS, GROUPS, VARIANTS
from demo import checkpoint

AMOUNTS = {
    "smallest": Amounts(noised=2, pictures=1, steps=2, times=(200, 800)),
    "standard": Amounts(noised=8, pictures=4, steps=10, clock=True),  # a quarter of an hour of one core a checkpoint
    "choose": Amounts(noised=16, pictures=4, steps=10),
}
OWN_PICTURES, OWN_STEPS = 8, 20  # a user's models want more steps than the scene models
POLL = 2.0  # seconds between looks at the rows that the other processes have

Benches = Callable[[str], QualityBench]


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__.partition("\n\n")[2])
    add = made.add_argument
    add("--smallest", action="store_true", help="a few variants, in well under a minute: for tests")
    add("--variants", nargs="+", default=[], metavar="NAME", help="these, beside the controls and yardsticks (default: "
        "the variants that matter)")  # fmt: skip
    add("--for", dest="purpose", choices=tuple(PURPOSES), default=subjects.SHOW, help="which pictures: those that "
        "tables show (default), or others, by which presets are chosen")  # fmt: skip
    add("--list", action="store_true", help="print the names of all variants and stop")
    add("--model", nargs="+", type=Path, metavar="PATH", help="scene models of this repository (default: those in "
        "demo/), or your own checkpoints: diffusers folders or .safetensors files")  # fmt: skip
    add("--prompts", type=Path, metavar="FILE", help="one prompt a line, for your own checkpoint; the usual choice "
        "is PartiPrompts (P2), which you get from its authors")  # fmt: skip
    add("--config", type=Path, metavar="DIR", help="with a single-file checkpoint: a local diffusers folder with its "
        "configuration and tokenizer")  # fmt: skip
    add("--pictures", type=int, metavar="N", help="whole pictures of every variant")
    add("--noised", type=int, metavar="N", help="noised held-out pictures of every variant; an even number")
    add("--steps", type=int, metavar="N", help="solver steps of a picture")
    add("--schedule", choices=subjects.SCHEDULES, help="of the whole pictures of a scene model (default uniform); "
        "late-half starts as img2img does, from a picture at half of the times")  # fmt: skip
    add("--guidance", type=float, metavar="X", help="of the whole pictures of a scene model (default "
        f"{subjects.GUIDANCE})")  # fmt: skip
    add("--clock", action=argparse.BooleanOptionalAction, default=None, help="take the time of whole pictures on a "
        "CPU, on one thread (default, but for --smallest and --for choose)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of whatever a method draws (default 0)")
    add("--save", type=Path, metavar="DIR", help="keep the pictures as DIR/checkpoint/variant/number.png")
    add("--device", metavar="NAME", help="cpu, cuda, ... (default: a GPU if torch sees one, else cpu)")
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of your own checkpoint; "
        "float32 (default) keeps rounding out of the comparison")  # fmt: skip
    report.add_output(made)
    return made


def complete(options: argparse.Namespace) -> tuple[Amounts, list[str]]:
    """Fill in the defaults and check everything together; gives the amounts and the prompts.

    Raises:
        ValueError, OSError: with the sentence that the user is to read.
    """
    unknown = [name for name in options.variants if name not in VARIANTS]
    if unknown:
        raise ValueError(f"no variant is called {' or '.join(unknown)}; --list prints the names")
    options.group = "smallest" if options.smallest else "choose" if options.purpose == subjects.CHOOSE else "standard"
    options.model = options.model or list(subjects.SCENE_MODELS[: 1 if options.smallest else None])
    own = [path for path in options.model if not subjects.is_scene_model(path)]
    for path in own:
        checkpoint.inspect(path)
    _check_variants(options)
    if own and (options.schedule or options.guidance is not None):
        raise ValueError(f"--schedule and --guidance are of the scene models; {own[0]} is drawn as its pipeline does")
    if len({path.stem for path in options.model}) < len(options.model):
        raise ValueError("two of the models have the same name, by which a result tells them apart; rename one")
    return _amounts(options, bool(own)), _prompts(options.prompts, own)


def _check_variants(options: argparse.Namespace) -> None:
    kinds = {subjects.kind_of(path): path for path in options.model}
    for name in options.variants:
        can = VARIANTS[name].kinds
        if not kinds.keys() & set(can):
            raise ValueError(f"{name} needs a {' or a '.join(can)}, and {next(iter(kinds.values()))} is none; "
                             "leave the variant out, or give another --model")
    chosen = {name for many in names(options).values() for name in many if kinds.keys() & set(VARIANTS[name].kinds)}
    if any(VARIANTS[name].role == "tomesd" for name in chosen) and importlib.util.find_spec("tomesd") is None:
        raise ValueError("tomesd, which the others are compared with, is not installed: pip install tomesd==0.1.3")


def _amounts(options: argparse.Namespace, own: bool) -> Amounts:
    amounts = AMOUNTS[options.group]
    if own and not options.smallest:
        amounts = replace(amounts, pictures=OWN_PICTURES, steps=OWN_STEPS)
    given = {name: getattr(options, name) for name in ("noised", "pictures", "steps", "seed", "clock")}
    amounts = replace(amounts, **{name: value for name, value in given.items() if value is not None})
    if amounts.noised < 2 or amounts.noised % 2:
        raise ValueError(f"--noised {amounts.noised}: give an even number, because tomesd draws no random "
                         "destinations for an odd batch")
    if amounts.pictures < 1 or amounts.steps < 1:
        raise ValueError(f"--pictures {amounts.pictures}, --steps {amounts.steps}: give numbers from 1 up")
    return amounts


def _prompts(path: Path | None, own: list[Path]) -> list[str]:
    if not own:
        return []
    if path is None:
        raise ValueError(f"{own[0]} needs --prompts FILE, one prompt a line; PartiPrompts (P2) is the usual choice")
    found = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not found:
        raise ValueError(f"--prompts {path} is empty; give one prompt a line")
    return found


def manner(options: argparse.Namespace) -> subjects.Manner:
    """How the whole pictures of scene models are made."""
    guidance = subjects.GUIDANCE if options.guidance is None else options.guidance
    return subjects.Manner(options.schedule or subjects.UNIFORM, guidance)


def names(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """The variants of each measure, the unmerged one first."""
    if not options.variants:
        return GROUPS[options.group]
    chosen = tuple(dict.fromkeys((*ALWAYS, *options.variants)))
    return {"noised": chosen, "pictures": chosen}


class Processes(NamedTuple):
    """Which of how many processes this is."""

    rank: int
    count: int

    @classmethod
    def from_environment(cls) -> Processes:
        """As launchers tell it; one process if nothing does."""
        return cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

    def share(self, rows: Iterable[Row]) -> list[Row]:
        """This process's rows: every `count`-th part, because the rows of a part share their unmerged result."""
        groups = [list(group) for _, group in groupby(rows, lambda row: row.group)]
        return [row for group in groups[self.rank :: self.count] for row in group]


def fill(
    record: Record, rows: list[Row], output: Path | None, processes: Processes, benches: Benches, amounts: Amounts
) -> tuple[Path, Record] | None:
    """Measure what is missing and give the finished file and record; None in all processes but the first.

    benches: the bench of a checkpoint's name, called again only when the checkpoint changes.
    """
    if processes.count == 1:
        run = Run.start(record, [row.key for row in rows], output)
        _measure_rows(rows, run, benches, amounts)
        return run.path, run.record
    if output.exists():
        raise results.ResultError(f"{output} is complete; give another --output to measure again, or remove this file")
    mine = processes.share(rows)
    own = output.with_name(f"{output.name}.rank{processes.rank}")
    if {row.key for row in mine} - {row["key"] for row in _rows_in([own])}:
        _measure_rows(mine, Run.start(record, [row.key for row in mine], own), benches, amounts)
    return None if processes.rank else _gather(record, output, [row.key for row in rows])


def _measure_rows(rows: list[Row], run: Run, benches: Benches, amounts: Amounts) -> None:
    rows = [row for row in rows if row.key in set(run.missing)]
    quiet = not sys.stderr.isatty()
    total = sum(calls(row, amounts) for row in rows)
    with tqdm(total=total, unit="call", mininterval=10 if quiet else 0.1, dynamic_ncols=True) as bar:
        for name, group in groupby(rows, lambda row: row.checkpoint):
            bench = benches(name)
            for row in group:
                bar.set_description(f"{name} {row.measure} {row.first + 1}: {row.variant}", refresh=not quiet)
                run.add(row.key, {**row.describe(), **bench.measure(row)})
                bar.update(calls(row, amounts))


def _rows_in(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    return (row for path in paths if path.exists() for row in results.load(path)["rows"])


def _gather(record: Record, output: Path, keys: list[str]) -> tuple[Path, Record]:
    """Wait for the rows of all processes, and move them into `output`, in the plan's order."""
    while True:
        pieces = [path for path in output.parent.glob(f"{output.name}.rank*") if path.suffix != ".part"]
        for path in pieces:
            if other := results.difference(results.load(path), record):
                raise results.ResultError(f"{path} is of a run with other {other}; remove it, or give another --output")
        found = {row["key"]: row for row in _rows_in(pieces)}
        if not set(keys) - found.keys():
            break
        time.sleep(POLL)
    record = {**record, "rows": [found[key] for key in keys], "missing": []}
    results.save(record, output)
    for path in pieces:
        path.unlink()
    return output, record


def _device(name: str | None, rank: int) -> torch.device:
    if name is None:
        name = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} does not work here: {str(error).splitlines()[0]}") from error
    return torch.device(name)


def _settings(options: argparse.Namespace, amounts: Amounts, prompts: list[str], plan: list[Row]) -> dict[str, Any]:
    """What has to be equal for two runs to be one."""
    chosen = {row.variant for row in plan}
    return {
        "models": {path.stem: subjects.fingerprint(path) for path in options.model},
        "for": options.purpose,
        "held_out": subjects.held_out_fingerprint(PURPOSES[options.purpose]),
        **asdict(amounts),
        **({} if prompts else manner(options)._asdict()),
        "dtype": options.dtype,
        "prompts": prompts,
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
    """Measure; if several processes do, the first finishes the file and prints the table."""
    if options.list:
        print("\n".join(VARIANTS))
        return 0
    processes = Processes.from_environment()
    amounts, prompts = complete(options)
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
) -> None:  # fmt: skip
    paths = {path.stem: path for path in options.model}
    plan = [row for path in options.model for row in rows(
        path.stem, names(options), amounts, can_be_noised=subjects.is_scene_model(path), kind=subjects.kind_of(path)
    )]  # fmt: skip

    def open_bench(name: str) -> QualityBench:
        path, purpose, dtype = paths[name], PURPOSES[options.purpose], getattr(torch, options.dtype)
        if subjects.is_scene_model(path):
            subject = subjects.SceneSubject(path, device, purpose, manner(options))
        else:
            subject = subjects.UserSubject(path, options.config, device, prompts, dtype, purpose)
        bench = QualityBench(subject, amounts, options.save)
        if name == plan[0].checkpoint and processes.rank == 0:
            print(_estimate(bench, plan, amounts), file=sys.stderr)
        return bench

    settings = _settings(options, amounts, prompts, plan)
    record = results.new_record("quality", command, settings, results.describe(str(device)))
    done = fill(record, plan, options.output, processes, open_bench, amounts)
    if done is not None:
        path, record = done
        print(report.write([path], path.with_suffix(".md"), None))
        print(f"\n{path}; with a plot: python -m benchmarks.report {path}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run; gives the exit code: 0 done, 2 wrong options (one sentence says which), 130 interrupted."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")  # the engine's notes of clamped ratios are known
    return report.run("quality", parser(), arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
