"""``python -m benchmarks.cases``: what each strength leaves of the work and does to pictures, in the cases people have.

Few steps, image to image, hires passes, tiles, inpainting, other samplers and schedules, batches: each picture of a
scene model beside the unmerged one of the same case, and the processor time of both, drawn in turns on one thread.
Prints the table; the same command goes on where a killed run was.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import attention_work, report, results, subjects, variants
from benchmarks.attention_work import one_thread
from benchmarks.case_pictures import CASES, PictureCase, PictureOrder, draw, timesteps
from benchmarks.subjects import PURPOSES, SCENE_MODELS, SHOW, SceneSubject
from demo import prompt
from demo.metrics import gradient_energy, squared_error
from tome_core.settings.presets import MARKS

_DRAWN_BESIDE = tuple(MARKS)[::2]  # before which the unmerged pictures are drawn anew


class Planned(NamedTuple):
    """A row: a strength, by its name, in a case of a model. number: of the picture, or of the batch of pictures."""

    model: str
    case: str
    number: int
    strength: str

    @property
    def key(self) -> str:
        return ", ".join(map(str, self))


def plan(models: Iterable[str], cases: Iterable[str], pictures: int) -> list[Planned]:
    """All cases of one picture before the next picture's, so that a run that is stopped has something of each."""
    return [Planned(model, case, number, strength)
            for number, model, case, strength in product(range(pictures), models, cases, MARKS)]  # fmt: skip


class CaseBench:
    """Measures the rows of one model; keeps the latest unmerged pictures alone, and the seconds that they took."""

    def __init__(self, path: Path) -> None:
        self.subject = SceneSubject(path, torch.device("cpu"), PURPOSES[SHOW])
        self._work = attention_work.counting(self.subject.network)
        self._latest: tuple[Any, np.ndarray, float] = None, np.empty(0), 0.0

    def measure(self, row: Planned) -> dict[str, Any]:
        """work: share of the finest self-attention's products that is left; lists over the batch's pictures: squared
        error beside the unmerged picture, and the gradient energies of both. seconds: of processor time, of both.
        """
        case = CASES[row.case]
        asked = [self._ask(case, case.batch * row.number + place) for place in range(case.batch)]
        if self._latest[0] != row[:3] or row.strength in _DRAWN_BESIDE:
            self._latest = row[:3], *self._draw(case, asked)
        _, plain, seconds = self._latest
        put_on = variants.strength(MARKS[row.strength], timesteps(self.subject.model, case))
        with self._work, put_on(self.subject.network, row.number):
            merged, seconds_merged = self._draw(case, asked)
        return {
            "work": self._work.share(),
            "squared_error": [squared_error(*pair) for pair in zip(plain, merged, strict=True)],
            "gradient": [[gradient_energy(one) for one in pair] for pair in zip(plain, merged, strict=True)],
            "seconds": [seconds, seconds_merged],
        }

    def _draw(self, case: PictureCase, asked: list[PictureOrder]) -> tuple[np.ndarray, float]:
        began = time.process_time()
        return draw(self.subject.model, case, asked), time.process_time() - began

    def _ask(self, case: PictureCase, number: int) -> PictureOrder:
        """Prompts and seeds in turn; a scene that is begun with brings its own prompt."""
        purpose = self.subject.purpose
        if case.begins_with_a_scene:
            scene, tokens = self.subject.scene(number)
            return PictureOrder(tokens, purpose.first + number, scene)
        return PictureOrder(prompt.tokens(purpose.prompts[number % len(purpose.prompts)]), purpose.first + number)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.cases", description=__doc__.partition("\n\n")[2])
    add = made.add_argument
    add("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="NAME", help="(default: all; --list)")
    add("--model", nargs="+", type=Path, default=list(SCENE_MODELS), metavar="FILE", help="scene models (default: all "
        "in demo/)")  # fmt: skip
    add("--pictures", type=int, default=2, metavar="N", help="or batches of a case and model (default 2)")
    add("--list", action="store_true", help="the names that --cases takes")
    report.add_output(made)
    return made


def execute(options: argparse.Namespace, command: str) -> int:
    """Measure what is missing, and print the table."""
    if options.list:
        print("\n".join(CASES))
        return 0
    if options.pictures < 1:
        raise ValueError(f"--pictures {options.pictures}: give a number from 1 up")
    paths = {path.stem: path for path in options.model}
    rows = {row.key: row for row in plan(paths, options.cases, options.pictures)}
    bench = cache(lambda name: CaseBench(paths[name]))
    settings = {
        "models": {name: subjects.fingerprint(path) for name, path in paths.items()},
        "for": SHOW,
        "strengths": MARKS,
        "cases": [vars(case) for case in CASES.values()],  # all there are: a run may go on with others of them
    }
    with one_thread(True):
        record = results.new_record("cases", command, settings, results.describe("cpu"))
        run = results.Run.start(record, list(rows), options.output)
        run.fill(lambda key: {**rows[key]._asdict(), **bench(rows[key].model).measure(rows[key])})
    print(report.write([run.path], run.path.with_suffix(".md"), None))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run; gives the exit code: 0 done, 2 wrong options (one sentence says which), 130 interrupted."""
    logging.basicConfig(level=logging.ERROR)
    return report.run("cases", parser(), arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
