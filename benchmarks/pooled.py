"""``python -m benchmarks.pooled``: whole blocks of transformers on fewer tokens, beside what else saves time.

It draws whole pictures of scene models of Flux's layout, each unmerged and in many ways, in 4, 8 and 20 steps. The
ways: the strengths; pairs or cells of 2x2 tokens from a noise level on, in all blocks but so many first and last ones;
and rivals, which are fewer steps, each second output extrapolated, diffusers' FirstBlockCache, and half as many pixels
a side in the noisiest steps. If you stop it, the same command goes on.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import torch.nn.functional as F
from tqdm import tqdm

import tome_core
from benchmarks import judges, report, results, subjects
from benchmarks.own_error_report import decibels
from demo import model, prompt, sampler
from demo.sampler import solver
from tome_core import MergeConfig, MergeRule
from tome_core.models import transformer
from tome_core.settings.presets import MARKS

STEPS = (4, 8, 20)
LEAST_ERROR = 1e-12  # that a table shows, as 120 dB: of equal pictures
CELLS = {"pairs": (1, 2), "fours": (2, 2)}  # height and width
Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of a latent at a timestep, with guidance


class Way(NamedTuple):
    """One way to draw: a `kind` of `_KINDS` with its arguments."""

    kind: str
    arguments: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """The way in words."""
        return " ".join(map(str, (self.kind, *self.arguments)))


PLAIN = Way("unmerged")


def ways(steps: int) -> list[Way]:
    """Return all ways that are measured in pictures of so many steps."""
    found = [PLAIN, *(Way("strength", (name,)) for name in MARKS)]
    if steps == 4:  # cells, the least sigma, and the shares of blocks at both ends that keep all tokens
        found += [Way("merged", one) for one in (("pairs", 0.75, 0.125, 0.125), ("pairs", 0.75, 0.33, 0.0),
                                                 ("pairs", 0.0, 0.33, 0.125))]  # fmt: skip
    found += [Way("steps", (count,)) for count in {4: (3,), 8: (7, 6), 20: (18, 15)}[steps]]
    if steps > 4:
        found += [Way("extrapolated", (2,)), *(Way("first block cache", (limit,)) for limit in (0.1, 0.2))]
    return found if steps == 20 else [*found, Way("half the pixels", (0.95,))]


class Row(NamedTuple):
    """One picture to draw in a way."""

    checkpoint: str
    steps: int
    picture: int
    way: Way

    @property
    def key(self) -> str:
        """The key in a result, with slashes between its parts."""
        return f"{self.checkpoint}/{self.steps}/{self.picture}/{self.way.name}"


class Bench:
    """The drawing of rows: it keeps the latest model and the latest unmerged picture only."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths, self._name, self._plain, self._seconds = paths, "", torch.empty(0), 1.0

    @torch.no_grad()
    def measure(self, row: Row) -> dict[str, Any]:
        """Draw a row's picture; return ``squared_error`` to the unmerged one, a mean over numbers from 0 to 1.

        ``time`` is processor time beside the unmerged picture's, ``work`` the share of multiplications that is left.
        """
        if self._name != row.checkpoint:
            self._name, self.model = row.checkpoint, model.load(self._paths[row.checkpoint]).requires_grad_(False)
            self._scheduler = solver(self.model, 1000)  # of all timesteps, for their noise levels
        begun = time.process_time()
        drawn, work = _KINDS[row.way.kind](self, row, *row.way.arguments)
        seconds = time.process_time() - begun
        if row.way == PLAIN:  # the first of a picture's rows
            self._plain, self._seconds = drawn, seconds
        error = (drawn - self._plain).double().square().mean().item()
        figures = {"squared_error": error, "work": work, "time": seconds / self._seconds}
        return {"model": row.checkpoint, "steps": row.steps, "picture": row.picture, "way": row.way.name,
                **{name: results.rounded(value) for name, value in figures.items()}}  # fmt: skip

    def sigma(self, timestep: torch.Tensor) -> float:
        """Compute a timestep's noise level, from 0 to 1, as flow models have it: that of equal signal to noise."""
        signal = self._scheduler.alphas_cumprod[int(timestep)]
        return ((1 - signal).sqrt() / ((1 - signal).sqrt() + signal.sqrt())).item()

    def draw(self, row: Row, steps: int, velocity: Velocity | None = None) -> torch.Tensor:
        """Return a picture, float ``[1, 3, H, W]`` from 0 to 1. velocity: None is the model's, at full size."""
        purpose = subjects.PURPOSES[subjects.SHOW]
        tokens = prompt.tokens(purpose.prompts[row.picture % len(purpose.prompts)])
        self._pair, self.noise = sampler.begin(self.model, tokens, purpose.first + row.picture)
        latent = self.noise
        scheduler = solver(self.model, steps)
        for timestep in scheduler.timesteps:
            latent = scheduler.step((velocity or self.predict)(latent, timestep), timestep, latent).prev_sample
        return (model.decode(latent, self.model.haar_gain).clamp(-1, 1) + 1) / 2

    def predict(self, latent: torch.Tensor, timestep: torch.Tensor, side: int | None = None) -> torch.Tensor:
        """Return the velocity with guidance. side: of the whole picture in pixels, if that is not as usual."""
        more = {} if side is None else {"sizes": torch.tensor([[side, side, 0, 0, side, side]])}
        return sampler.predict(self.model, latent, timestep, self._pair, **more)


def _unmerged(bench: Bench, row: Row) -> tuple[torch.Tensor, float]:
    return bench.draw(row, row.steps), 1.0


def _of_steps(bench: Bench, row: Row, count: int) -> tuple[torch.Tensor, float]:
    return bench.draw(row, count), count / row.steps


def _by_config(bench: Bench, row: Row, wanted: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Draw merged by the arguments of `patch`."""
    with tome_core.patch(bench.model.network, **wanted, host_clock=True) as handle:
        sampling = object()

        def velocity(latent: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            handle.set_time(timestep=1000 * bench.sigma(timestep), sampling=sampling)
            return bench.predict(latent, timestep)

        drawn = bench.draw(row, row.steps, velocity)
        return drawn, 1 - (handle.report().work_saved or 0.0)


def _strength(bench: Bench, row: Row, name: str) -> tuple[torch.Tensor, float]:
    return _by_config(bench, row, {"config": name})


def _merged(
    bench: Bench, row: Row, cell: str, sigma: float, first: float, last: float
) -> tuple[torch.Tensor, float]:  # fmt: skip
    sy, sx = CELLS[cell]
    rule = MergeRule(merge_attn=False, merge_blocks=True, ratio=1 - 1 / (sy * sx), sy=sy, sx=sx,
                     min_timestep=1000 * sigma)  # fmt: skip
    with _whole_at_the_ends(first, last):
        return _by_config(bench, row, {"config": MergeConfig(rules=(rule,))})


@contextmanager
def _whole_at_the_ends(first: float, last: float) -> Iterator[None]:
    """Let other shares of a model's blocks keep all tokens."""
    usual = transformer.middle
    transformer.middle = partial(usual, first=first, last=last)
    try:
        yield
    finally:
        transformer.middle = usual


def _extrapolated(bench: Bench, row: Row, every: int) -> tuple[torch.Tensor, float]:
    """Draw with each `every`-th output, of steps that are neither the first two nor the last, a line through two."""
    known: list[tuple[float, torch.Tensor]] = []
    number = calls = 0

    def velocity(latent: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        nonlocal number, calls
        number += 1
        if number > 2 and number % every == 0 and number < row.steps:
            (before, first), (after, second) = known[-2:]
            return second + (second - first) * (float(timestep) - after) / (after - before)
        calls += 1
        known.append((float(timestep), bench.predict(latent, timestep)))
        return known[-1][1]

    return bench.draw(row, row.steps, velocity), calls / row.steps


def _first_block_cache(bench: Bench, row: Row, limit: float) -> tuple[torch.Tensor, float]:
    network, calls = bench.model.network, []
    hook = network.single_transformer_blocks[0].attn.to_q.register_forward_pre_hook(lambda *_: calls.append(None))
    network.enable_cache(diffusers.FirstBlockCacheConfig(threshold=limit))
    try:
        with network.cache_context("both"):
            drawn = bench.draw(row, row.steps)
    finally:
        network.disable_cache()
        hook.remove()
    return drawn, len(calls) / row.steps


def _half_the_side(bench: Bench, row: Row, sigma: float) -> tuple[torch.Tensor, float]:
    """Draw a picture on half as many pixels a side while the noise is at least `sigma`; return it, and the work left.

    Small steps see the means of 2 x 2 cells, and their output is enlarged. They count as a quarter of a step's work.
    """
    small = 0

    def velocity(latent: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        nonlocal small
        if bench.sigma(timestep) < sigma:
            return bench.predict(latent, timestep)
        small += 1
        signal = bench._scheduler.alphas_cumprod[int(timestep)]
        keep, spread = signal.sqrt(), (1 - signal).sqrt()
        # means of four have half the noise, so it is doubled
        half = F.avg_pool2d(latent - spread * bench.noise, 2) + 2 * spread * F.avg_pool2d(bench.noise, 2)
        clean = keep * half - spread * bench.predict(half, timestep, bench.model.side)
        return (keep * latent - F.interpolate(clean, scale_factor=2, mode="bilinear")) / spread

    return bench.draw(row, row.steps, velocity), 1 - small / row.steps * 3 / 4


_KINDS: dict[str, Callable[..., tuple[torch.Tensor, float]]] = {
    "unmerged": _unmerged, "strength": _strength, "merged": _merged, "steps": _of_steps,
    "extrapolated": _extrapolated, "first block cache": _first_block_cache, "half the pixels": _half_the_side,
}  # fmt: skip


def table(records: Sequence[results.Record]) -> str:
    """Make Markdown tables of results, one a model and number of steps."""
    groups: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    for row in (row for record in records for row in record["rows"]):
        groups.setdefault((row["model"], row["steps"]), {}).setdefault(row["way"], []).append(row)
    parts = []
    for (name, steps), found in groups.items():
        lines = [(way, *_figures(rows)) for way, rows in found.items() if way != PLAIN.name]
        parts.append(f"### {name}, {steps} steps\n\n" + report.markdown(
            ("way", "work left", "time", "PSNR dB, mean", "least"), lines, left=1))  # fmt: skip
    return "\n\n".join(parts)


def _figures(rows: Sequence[dict[str, Any]]) -> tuple[str, str, str, str]:
    """Format a way's mean work and time, and mean and least PSNR over its pictures."""
    psnr = [decibels(max(row["squared_error"], LEAST_ERROR)) for row in rows]
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in ("work", "time")}
    return f"{mean['work']:.2f}", f"{mean['time']:.2f}", f"{sum(psnr) / len(psnr):.1f}", f"{min(psnr):.1f}"


def execute(options: argparse.Namespace, command: str) -> None:
    """Draw the missing rows and print the tables. Raises ValueError or OSError for a model that cannot be drawn."""
    torch.set_num_threads(1)
    judges.check(options.model)
    paths = {path.stem: path for path in options.model}
    plan = {row.key: row for row in (
        Row(name, steps, picture, way) for name in paths for steps in options.steps
        for picture in range(options.pictures) for way in ways(steps))}  # fmt: skip
    settings = {"models": {name: subjects.fingerprint(path) for name, path in paths.items()}, "for": subjects.SHOW}
    record = results.new_record("pooled", command, settings, results.describe("cpu"))
    run, bench, before = results.Run.start(record, list(plan), options.output), Bench(paths), None
    for key in tqdm(run.missing, unit="row", mininterval=0.1 if sys.stderr.isatty() else 10):
        row = plan[key]
        if row.way != PLAIN and before != row[:3]:  # a run that goes on
            bench.measure(row._replace(way=PLAIN))
        before = row[:3]
        run.add(key, bench.measure(row))
    print(report.write([run.path]))
    print(f"\n{run.path}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 2 after an expected error, 130 if stopped. arguments: None means ``sys.argv[1:]``."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pooled", description=__doc__.partition("\n\n")[2])
    add = parser.add_argument
    add("--model", nargs="+", type=Path, default=list(judges.FLUX), metavar="PATH",
        help="scene models of Flux's layout (default: those of benchmarks.judges)")
    add("--pictures", type=int, default=4, metavar="N", help="pictures of each way (default %(default)s)")
    add("--steps", nargs="+", type=int, choices=STEPS, default=list(STEPS), metavar="N",
        help=f"numbers of steps: {', '.join(map(str, STEPS))} (default all)")
    report.add_output(parser)
    return report.run("pooled", parser, arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
