"""``python -m benchmarks.quality``: what merging does to a trained model's predictions and pictures.

It prints the table and keeps the figures as JSON below benchmarks/results/. If you stop it, the same command goes on.
Several processes: ``accelerate launch --num_processes N -m benchmarks.quality --output FILE``. Each process writes the
rows of its own parts into a file beside the result, and the process that ends last gathers them.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import report, results, subjects
from benchmarks.quality_rows import Amounts, QualityBench, Row, rows
from benchmarks.results import Record, Run
from benchmarks.subjects import PURPOSES
from benchmarks.variants import ALWAYS, GROUPS, VARIANTS
from demo import checkpoint

AMOUNTS = {
    "smallest": Amounts(noised=2, pictures=1, steps=2, times=(200, 800)),
    "standard": Amounts(noised=8, pictures=4, steps=10, clock=True),  # a quarter of an hour of one core a checkpoint
    "choose": Amounts(noised=16, pictures=0, steps=10),
}
OWN = {"pictures": 8, "steps": 20}  # a user's models want more steps than the scene models


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    command = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__.partition("\n\n")[2])
    add = command.add_argument
    add("--smallest", action="store_true", help="a few variants, in well under a minute: for tests")
    add("--variants", nargs="+", default=[], metavar="NAME", help="these and the controls and yardsticks (default: "
        "the variants that matter)")  # fmt: skip
    add("--for", dest="purpose", choices=tuple(PURPOSES), default=subjects.SHOW, help="which pictures: those that "
        "tables show (default), or others, by which strength is chosen")  # fmt: skip
    add("--list", action="store_true", help="print the names of all variants and stop")
    add("--model", nargs="+", type=Path, metavar="PATH", help="scene models of this repository (default: those in "
        "demo/), or your own checkpoints: diffusers folders or .safetensors files")  # fmt: skip
    add("--prompts", type=Path, metavar="FILE", help="one prompt a line, for your own checkpoint; the usual choice "
        "is PartiPrompts (P2), which you get from its authors")  # fmt: skip
    add("--config", type=Path, metavar="DIR", help="with a single-file checkpoint: a local diffusers folder with its "
        "configuration and tokenizer")  # fmt: skip
    add("--pictures", type=int, metavar="N", help="number of whole pictures of every variant")
    add("--noised", type=int, metavar="N", help="number of noised held-out pictures of every variant; even")
    add("--steps", type=int, metavar="N", help="solver steps of a picture")
    add("--guidance", type=float, metavar="X", help="guidance of a scene model's whole pictures (default "
        f"{subjects.GUIDANCE})")  # fmt: skip
    add("--clock", action=argparse.BooleanOptionalAction, default=None, help="take the time of whole pictures on a "
        "CPU, on one thread (default, but for --smallest and --for choose)")  # fmt: skip
    add("--device", metavar="NAME", help="cpu, cuda, ... (default: a GPU if torch sees one, else cpu)")
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="dtype of your own checkpoint; "
        "float32 (default) keeps rounding out of the comparison")  # fmt: skip
    report.add_output(command)
    return command


def complete(options: argparse.Namespace) -> tuple[Amounts, list[str]]:
    """Fill in the options' defaults in place and check them together; return the amounts and a user's prompts.

    Raises:
        ValueError, OSError: the options cannot be used; the message says what to do.
    """
    if unknown := [name for name in options.variants if name not in VARIANTS]:
        raise ValueError(f"no variant is called {' or '.join(unknown)}; --list prints the names")
    options.group = "smallest" if options.smallest else "choose" if options.purpose == subjects.CHOOSE else "standard"
    options.model = options.model or list(subjects.SCENE_MODELS[: 1 if options.smallest else None])
    users = [path for path in options.model if not subjects.is_scene_model(path)]
    for path in users:
        checkpoint.inspect(path)
    kinds = {subjects.kind_of(path): path for path in options.model}
    for name in options.variants:
        if not kinds.keys() & set(VARIANTS[name].kinds):
            raise ValueError(f"{name} needs a {' or a '.join(VARIANTS[name].kinds)}, and {next(iter(kinds.values()))} "
                             "is none; leave the variant out, or give another --model")
    if users and options.guidance is not None:
        raise ValueError(f"--guidance is for the scene models; {users[0]} is drawn with its pipeline's guidance")
    if len({path.stem for path in options.model}) < len(options.model):
        raise ValueError("two of the models have the same name, by which a result tells them apart; rename one")
    return _amounts(options, bool(users)), _prompts(options.prompts, users)


def _amounts(options: argparse.Namespace, is_users: bool) -> Amounts:
    """Return the amounts of the options' group, with the given ones. Raises ValueError for impossible ones."""
    given = {name: getattr(options, name) for name in ("noised", "pictures", "steps", "clock")}
    given = {name: value for name, value in given.items() if value is not None}
    amounts = replace(AMOUNTS[options.group], **{**(OWN if is_users and not options.smallest else {}), **given})
    if amounts.noised < 2 or amounts.noised % 2:
        raise ValueError(f"--noised {amounts.noised}: give an even number, because tomesd draws no random "
                         "destinations for an odd batch")
    if amounts.pictures < 0 or amounts.steps < 1:
        raise ValueError("give 1 step or more, and 0 pictures or more")
    return amounts


def _prompts(path: Path | None, users: list[Path]) -> list[str]:
    """Read the prompts, one a line, that a user's model needs; none without one. Raises ValueError if they lack."""
    if not users:
        return []
    if path is None:
        raise ValueError(f"{users[0]} needs --prompts FILE, one prompt a line; PartiPrompts (P2) is the usual choice")
    prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts {path} is empty; give one prompt a line")
    return prompts


def share(rows: Iterable[Row], rank: int, count: int) -> list[Row]:
    """Choose the rows of process `rank` of `count`: whole parts, because its rows share an unmerged result."""
    parts = [list(part) for _, part in groupby(rows, lambda row: row.group)]
    return [row for part in parts[rank::count] for row in part]


def _fill(record: Record, plan: list[Row], output: Path | None, open_bench: Callable) -> Run | None:
    """Measure the missing rows of the plan and return the finished run; None unless this process is the last to end.

    Raises:
        ResultError: `output` is another run's result, or complete while there are several processes.
    """
    rank, count = _processes()
    if count == 1:
        return _measure(Run.start(record, [row.key for row in plan], output), plan, open_bench)
    if output.exists():
        raise results.ResultError(f"{output} is complete; give another --output to measure again, or remove this file")

    def start(number: int) -> Run:
        keys = [row.key for row in share(plan, number, count)]
        return Run.start(record, keys, output.with_name(f"{output.name}.rank{number}"))

    _measure(start(rank), plan, open_bench)
    pieces = [start(number) for number in range(count)]
    if any(piece.missing for piece in pieces):
        return None
    measured = {row["key"]: row for piece in pieces for row in piece.record["rows"]}
    whole = Run({**record, "rows": [measured[row.key] for row in plan]}, output, list(measured))
    results.save(whole.record, output)
    for piece in pieces:
        piece.path.unlink(missing_ok=True)
    return whole


def _processes() -> tuple[int, int]:
    """Return this process's number, from 0, and the number of processes, from RANK and WORLD_SIZE of a launcher."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _measure(run: Run, plan: list[Row], open_bench: Callable[[str], QualityBench]) -> Run:
    """Measure the run's missing rows, with one bench a checkpoint, add them to the run and return it."""
    missing = set(run.missing)
    left = [row for row in plan if row.key in missing]
    with tqdm(total=len(left), unit="row", mininterval=0.1 if sys.stderr.isatty() else 10) as bar:
        for name, group in groupby(left, lambda row: row.checkpoint):
            bench = open_bench(name)
            for row in group:
                bar.set_description(row.key, refresh=False)
                about = {field: getattr(row, field) for field in ("checkpoint", "measure", "part", "variant")}
                run.add(row.key, {**about, **bench.measure(row)})
                bar.update()
    return run


def _device(name: str | None, rank: int) -> torch.device:
    """Return the device; None is the GPU of this rank, else the CPU. Raises ValueError if it does not work."""
    if name is None:
        name = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} does not work here: {str(error).splitlines()[0]}") from error
    return torch.device(name)


def execute(options: argparse.Namespace, command: str) -> int:
    """Measure the missing rows and print the table, or list the variants; return 0."""
    if options.list:
        print("\n".join(VARIANTS))
        return 0
    rank, count = _processes()
    amounts, prompts = complete(options)
    if count > 1 and not options.output:
        raise ValueError("several processes need --output FILE, so that all of them know the file")
    device, paths = _device(options.device, rank), {path.stem: path for path in options.model}
    guidance = subjects.GUIDANCE if options.guidance is None else options.guidance
    amounts = replace(amounts, clock=amounts.clock and device.type == "cpu")  # a host's time says little of a GPU's
    names = dict.fromkeys((*ALWAYS, *options.variants)) if options.variants else GROUPS[options.group]
    plan = [row for name, path in paths.items() for row in rows(
        name, tuple(names), amounts, can_be_noised=subjects.is_scene_model(path), kind=subjects.kind_of(path)
    )]  # fmt: skip

    def open_bench(name: str) -> QualityBench:
        path, purpose, dtype = paths[name], PURPOSES[options.purpose], getattr(torch, options.dtype)
        if subjects.is_scene_model(path):
            subject = subjects.SceneSubject(path, device, purpose, guidance)
        else:
            subject = subjects.UserSubject(path, options.config, device, prompts, dtype, purpose)
        return QualityBench(subject, amounts)

    if amounts.clock:
        torch.set_num_threads(1)  # the processor time of several counts their waiting
    chosen = {row.variant for row in plan}
    settings = {  # equal in all rows of a result
        "models": {name: subjects.fingerprint(path) for name, path in paths.items()},
        "for": options.purpose,
        **asdict(amounts),
        **({} if prompts else {"guidance": guidance}),
        "dtype": options.dtype,
        "prompts": prompts,
        "variants": [variant.describe() for name, variant in VARIANTS.items() if name in chosen],
    }
    record = results.new_record("quality", command, settings, results.describe(str(device)))
    run = _fill(record, plan, options.output, open_bench)
    if run is not None:
        print(report.write([run.path]))
        print(f"\n{run.path}", file=sys.stderr)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status. arguments: None stands for those of the process."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")  # the engine's notes of clamped ratios are known
    return report.run("quality", parser(), arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
