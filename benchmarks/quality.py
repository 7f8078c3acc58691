"""``python -m benchmarks.quality``: what merging does to a trained model's predictions and pictures.

It prints the table and keeps the figures as JSON below benchmarks/results/. If you stop it, the same command goes on.
A row is one variant on one part of the pictures of one checkpoint. The rows of a part share pictures, noise, times and
the seed of all draws.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import judges, report, results, subjects
from benchmarks.networks import UNET, Work
from benchmarks.subjects import PART_NOISED, PURPOSES, Subject
from benchmarks.timing import CallTimes
from benchmarks.variants import ALWAYS, GROUPS, PLAIN, VARIANTS, Variant
from demo import checkpoint
from demo.metrics import gradient_energy, squared_error

TIMES = (50, 200, 400, 600, 800, 950)
PART_PICTURES = {True: 4, False: 1}  # pictures in one row: of a scene model, and of a user's model, which is slow


@dataclass(frozen=True)
class Amounts:
    """How much is measured: `noised` pictures at each timestep of `times`; `pictures` whole ones in `steps` solver
    steps."""

    noised: int
    pictures: int
    steps: int
    times: tuple[int, ...] = TIMES


class Row(NamedTuple):
    """One row to measure: a variant, by name, on `count` pictures from number `first` on, which are part number `part`.
    `measure` is "noised" for predictions of noised pictures, and "pictures" for whole ones."""

    checkpoint: str
    measure: str
    part: int
    first: int
    count: int
    variant: str

    @property
    def key(self) -> str:
        """The key in a result: checkpoint, measure, part and variant, with slashes between them."""
        return f"{self.checkpoint}/{self.measure}/{self.part}/{self.variant}"


def rows(checkpoint: str, names: Sequence[str], amounts: Amounts, can_be_noised: bool,
         kind: str = UNET) -> Iterator[Row]:  # fmt: skip
    """Plan a checkpoint's rows: noised ones, then whole pictures; both part by part, with a row a variant in each part.

    names: of variants; those that `kind` of network cannot run have no row. Noised rows are planned only if
    `can_be_noised` and for variants whose `solver` is 1.
    """
    can = [name for name in names if kind in VARIANTS[name].kinds]
    for measure, total, size in (("noised", amounts.noised if can_be_noised else 0, PART_NOISED),
                                 ("pictures", amounts.pictures, PART_PICTURES[can_be_noised])):  # fmt: skip
        for part, first in enumerate(range(0, total, size)):
            for name in can:
                if measure == "pictures" or VARIANTS[name].solver == 1:
                    yield Row(checkpoint, measure, part, first, min(size, total - first), name)


class Picture(NamedTuple):
    """A whole picture, the share of `work` left, `seconds` of each call, and of an `unmerged` one (None on a GPU)."""

    pixels: np.ndarray  # uint8 ``[H, W, 3]``
    work: float
    seconds: list[float]
    unmerged: float | None  # seconds of an unmerged call; None on a GPU, of which a CPU's time says little


class QualityBench:
    """The measuring of one checkpoint's rows, part by part: it keeps the unmerged results of the latest part only."""

    def __init__(self, subject: Subject, amounts: Amounts) -> None:
        self.subject, self.amounts = subject, amounts
        self.work, self.times = Work(subject.network), CallTimes(subject.network)
        self._on_cpu = next(subject.network.parameters()).device.type == "cpu"
        self._part, self._plain = (), []

    @torch.inference_mode()
    def measure(self, row: Row) -> dict[str, Any]:
        """Measure a row, and first its part without merging if that is new; return the figures by name.

        Of noised pictures: ``work``, a list by time, ``loss`` and ``dev``, lists by time of lists by picture. Of whole
        ones: ``work``, one number, and lists by picture: ``gradient``, ``squared_error``, and on a CPU ``seconds``, a
        list by call for each, and ``beside``, the median of unmerged calls after it; both in processor seconds.
        """
        variant = VARIANTS[row.variant]
        make, compare = (self._predict, _predictions) if row.measure == "noised" else (self._draw, _pictures)
        if self._part != row[:3]:
            self._part, self._plain = row[:3], make(row, VARIANTS[PLAIN])
        return compare(self._plain if variant.name == PLAIN else make(row, variant), self._plain)

    def _predict(self, row: Row, variant: Variant) -> list[tuple[torch.Tensor, list[float], float]]:
        """Return by time a tuple: prediction ``[n, C, h, w]``, each picture's loss, share of attention work left."""
        predictions = []
        for time in self.amounts.times:
            noised = self.subject.add_noise(row.part, row.count, time)
            with self.work, variant.put_on(self.subject.network, self.subject.purpose.first + row.part):
                prediction = self.subject.predict(noised)
            predictions.append((prediction, _error(prediction, noised.velocity), self.work.share()))
        return predictions

    def _draw(self, row: Row, variant: Variant) -> list[Picture]:
        """Draw the row's pictures by a variant; on a CPU also time unmerged calls after each picture."""
        pictures = []
        for number in range(row.first, row.first + row.count):
            with self.times, self.work, variant.put_on(self.subject.network, self.subject.purpose.first + number):
                pixels = self.subject.picture(number, self.amounts.steps * variant.solver)
            unmerged = self.times.time_unmerged() if self._on_cpu else None
            pictures.append(Picture(pixels, self.work.share(), self.times.seconds, unmerged))
        return pictures


def _predictions(merged: list, plain: list) -> dict[str, Any]:
    """Make the figures of a noised row: by time ``work``, the share left, and by time and picture ``loss`` and ``dev``.

    merged: what `_predict` gave for the row's variant; plain: without merging. ``dev`` is the mean squared difference.
    """
    return {"work": _round(share for *_, share in merged), "loss": [_round(loss) for _, loss, _ in merged],
            "dev": [_round(_error(new, old)) for (new, *_), (old, *_) in zip(merged, plain, strict=True)]}  # fmt: skip


def _pictures(merged: list[Picture], plain: list[Picture]) -> dict[str, Any]:
    """Make the figures of a row of whole pictures: their mean ``work``, and lists by picture.

    The lists: ``gradient``, ``squared_error`` to the unmerged `plain`, and on a CPU ``seconds``, each a list by call,
    and ``beside``, each a number: the seconds of an unmerged call.
    """
    figures = {"work": _round([np.mean([picture.work for picture in merged])])[0],
               "gradient": _round(gradient_energy(picture.pixels) for picture in merged),
               "squared_error": _round(squared_error(old.pixels, new.pixels)
                                       for new, old in zip(merged, plain, strict=True))}  # fmt: skip
    if merged[0].unmerged is not None:
        figures |= {"seconds": [_round(picture.seconds) for picture in merged],
                    "beside": _round(picture.unmerged for picture in merged)}  # fmt: skip
    return figures


def _error(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """Compute the mean squared difference of each picture of two batches."""
    return (a - b).double().pow(2).flatten(1).mean(1).tolist()


def _round(values: Iterable) -> list[float]:
    """Round to six significant digits, which are more than the figures hold, so that a file is not full of noise."""
    return [float(f"{float(value):.6g}") for value in values]


AMOUNTS = {
    "smallest": Amounts(noised=2, pictures=1, steps=2, times=(200, 800)),
    "standard": Amounts(noised=8, pictures=4, steps=10),  # a quarter of an hour of one core a checkpoint
    "choose": Amounts(noised=16, pictures=0, steps=10),
}
OWN = {"pictures": 8, "steps": 20}  # a user's models want more steps than the scene models


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line; `complete` chooses the models and amounts that options leave open."""
    command = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__.partition("\n\n")[2])
    add = command.add_argument
    add("--smallest", action="store_true", help="a few variants, in well under a minute: for tests")
    add("--variants", nargs="+", default=[], metavar="NAME", help="these, or those of a group, as blocks, and the "
        "controls and yardsticks (default: the variants that matter)")  # fmt: skip
    add("--for", dest="purpose", choices=tuple(PURPOSES), default=subjects.SHOW, help="which pictures: those that "
        "tables show (default), or others, by which strength is chosen")  # fmt: skip
    add("--list", action="store_true", help="print the names of all variants and stop")
    add("--model", nargs="+", type=Path, metavar="PATH", help="scene models (default: "
        "benchmarks.judges' first three), or your own checkpoints: diffusers folders or .safetensors files")
    add("--prompts", type=Path, metavar="FILE", help="one prompt a line, for your own checkpoint; the usual choice "
        "is PartiPrompts (P2), which you get from its authors")  # fmt: skip
    add("--config", type=Path, metavar="DIR", help="with a single-file checkpoint: a local diffusers folder with its "
        "configuration and tokenizer")  # fmt: skip
    add("--pictures", type=int, metavar="N", help="number of whole pictures of every variant")
    add("--noised", type=int, metavar="N", help="number of noised held-out pictures of every variant; even")
    add("--steps", type=int, metavar="N", help="solver steps of a picture")
    add("--guidance", type=float, metavar="X", help="guidance of a scene model's whole pictures (default "
        f"{subjects.GUIDANCE})")  # fmt: skip
    add("--device", metavar="NAME", help="cpu, cuda, ... (default: a GPU if torch sees one, else cpu)")
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="dtype of your own checkpoint; "
        "float32 (default) keeps rounding out of the comparison")  # fmt: skip
    report.add_output(command)
    return command


def complete(options: argparse.Namespace) -> tuple[Amounts, list[str]]:
    """Set `options.group`, a key of `AMOUNTS`, and `options.model` in place, and check all options.

    Returns the amounts, and the prompts for users' checkpoints, [] if all are scene models. Raises ValueError or
    OSError if the options cannot be used; the message says what to do.
    """
    options.variants = [name for given in options.variants for name in GROUPS.get(given, (given,))]
    if unknown := [name for name in options.variants if name not in VARIANTS]:
        raise ValueError(f"no variant is called {' or '.join(unknown)}; --list prints the names")
    options.group = "smallest" if options.smallest else "choose" if options.purpose == subjects.CHOOSE else "standard"
    options.model = options.model or list(judges.SD[: 1 if options.smallest else None])
    judges.check(options.model)
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
    given = {name: getattr(options, name) for name in ("noised", "pictures", "steps")}
    given = {name: value for name, value in given.items() if value is not None}
    amounts = replace(AMOUNTS[options.group], **{**(OWN if users and not options.smallest else {}), **given})
    if amounts.noised < 0 or amounts.noised % 2:
        raise ValueError(f"--noised {amounts.noised}: give an even number, because tomesd draws no random "
                         "destinations for an odd batch, or 0 for whole pictures alone")
    if amounts.pictures < 0 or amounts.steps < 1:
        raise ValueError("give 1 step or more, and 0 pictures or more")
    if not users:
        return amounts, []
    if options.prompts is None:
        raise ValueError(f"{users[0]} needs --prompts FILE, one prompt a line; PartiPrompts (P2) is the usual choice")
    prompts = [line.strip() for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts {options.prompts} is empty; give one prompt a line")
    return amounts, prompts


def measure(run: results.Run, plan: list[Row], open_bench: Callable[[str], QualityBench]) -> None:
    """Measure and add a run's missing rows. `plan` is sorted by checkpoint; open_bench: checkpoint's name -> bench."""
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


def _device(name: str | None) -> torch.device:
    """Return the device; None is a GPU if torch sees one, else the CPU. Raises ValueError if it does not work."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} does not work here: {str(error).splitlines()[0]}") from error
    return torch.device(name)


def execute(options: argparse.Namespace, command: str) -> int:
    """Measure missing rows, print the table; if ``--list``, only variants. Return 0. Raises ValueError, OSError."""
    if options.list:
        print("\n".join(VARIANTS))
        return 0
    amounts, prompts = complete(options)
    device, paths = _device(options.device), {path.stem: path for path in options.model}
    guidance = subjects.GUIDANCE if options.guidance is None else options.guidance
    names = dict.fromkeys((*ALWAYS, *options.variants)) if options.variants else GROUPS[options.group]
    plan = [row for name, path in paths.items() for row in rows(
        name, tuple(names), amounts, can_be_noised=subjects.is_scene_model(path), kind=subjects.kind_of(path))]

    def open_bench(name: str) -> QualityBench:
        path, purpose, dtype = paths[name], PURPOSES[options.purpose], getattr(torch, options.dtype)
        if subjects.is_scene_model(path):
            subject = subjects.SceneSubject(path, device, purpose, guidance)
        else:
            subject = subjects.UserSubject(path, options.config, device, prompts, dtype, purpose)
        return QualityBench(subject, amounts)

    if device.type == "cpu":
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
    run = results.Run.start(record, [row.key for row in plan], options.output)
    measure(run, plan, open_bench)
    print(report.write([run.path]))
    print(f"\n{run.path}", file=sys.stderr)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 2 after an expected error, 130 if stopped. arguments: None means ``sys.argv[1:]``."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")  # the engine's notes of clamped ratios are known
    return report.run("quality", parser(), arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
