"""``python -m benchmarks.own_error``: is the error that the engine tells of itself that of the pictures?

It draws whole pictures of the scene models, each unmerged and merged in several ways, and keeps beside the picture's
error what the engine estimated in each step. The ways: a strength's curve alone ("curve"), the strength as it is, whose
curve its own error bounds ("bounded"), the fewest keys that an error takes, without a curve ("alone"), and on a model
whose blocks merge the curve without them ("attention"). Everything merges, whether it saves time or not: the cost is
the share of work saved. If you stop it, the same command goes on.
"""

import argparse
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import DDIMScheduler
from tqdm import tqdm

import tome_core
from benchmarks import judges, report, results, subjects
from demo import checkpoint, model, prompt, sampler
from demo.sampler import GUIDANCE, solver
from tome_core import MergeConfig
from tome_core.patching import curve_of
from tome_core.settings.presets import EARLY_SHARE, with_share

CURVE, BOUNDED, ALONE, ATTENTION = "curve", "bounded", "alone", "attention"
STRENGTHS = (0.1, 0.25, 0.5, 0.75, 1.0)
ERRORS = (5e-5, 1.5e-4, 4e-4)  # of "alone": the `max_error` of its rule
MODELS = (*judges.SD, judges.path_of("scenes-sdxl-deep"))


class Setting(NamedTuple):
    """How a picture is drawn."""

    steps: int
    sampler: str  # "dpm", which is the demo's, or "ddim"
    guidance: float


USUAL = Setting(8, "dpm", GUIDANCE)
BY_STEPS = tuple(USUAL._replace(steps=steps) for steps in (4, 8, 20))
SETTINGS = (*BY_STEPS, USUAL._replace(sampler="ddim"), USUAL._replace(guidance=7.5))


class Row(NamedTuple):
    """One merged picture to draw. amount: a strength, or the error of the way "alone"."""

    checkpoint: str
    way: str
    amount: float
    setting: Setting
    picture: int

    @property
    def key(self) -> str:
        """The key in a result, with slashes between its parts."""
        steps, sampler, guidance = self.setting
        way = f"{self.way} {self.amount:g}"
        return f"{self.checkpoint}/{way}/{steps} {sampler} guidance {guidance:g}/{self.picture}"


def ways(setting: Setting, has_blocks: bool) -> Iterator[tuple[str, float]]:
    """Yield the ways and amounts that are measured in a setting; has_blocks: whole blocks of the model merge."""
    yield from ((CURVE, strength) for strength in STRENGTHS)
    if setting in BY_STEPS:
        yield from ((BOUNDED, strength) for strength in STRENGTHS[1:])
    if setting == USUAL:
        yield from ((ALONE, error) for error in ERRORS)
        if has_blocks:
            yield from ((ATTENTION, strength) for strength in (0.5, 1.0))


def rows(paths: dict[str, Path], pictures: int, steps: tuple[int, ...]) -> list[Row]:
    """Plan all rows of settings with these numbers of steps: picture by picture, so that a part of a run is even."""
    has_blocks = {name: any("add_embedding" in tensor for tensor in checkpoint.read_shapes(path))
                  for name, path in paths.items()}  # those of SDXL's layout have that  # fmt: skip
    return [Row(name, way, amount, setting, picture)
            for picture in range(pictures) for name, path in paths.items()
            for setting in SETTINGS if setting.steps in steps
            for way, amount in ways(setting, has_blocks[name])]  # fmt: skip


def config(way: str, amount: float, curve: str) -> MergeConfig:
    """Return the settings of a way; curve: of the kind of model, as `tome_core.strength` has it."""
    made = tome_core.strength(1.0 if way == ALONE else amount, curve)
    changed: list[Any] = [replace(rule, only_if_it_pays=False) for rule in made.rules]
    if way == ALONE:
        return MergeConfig(rules=(replace(with_share(changed[0], EARLY_SHARE), max_error=amount),))
    if way != BOUNDED:
        changed = [replace(rule, max_error=None) for rule in changed]
    if way == ATTENTION:
        changed = [rule for rule in changed if not rule.merge_blocks]
    return replace(made, rules=tuple(changed))


class Bench:
    """The drawing of rows: it keeps the latest model and the latest unmerged picture only."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths, self._name, self._drawn, self._plain = paths, "", (), torch.empty(0)

    @torch.no_grad()
    def measure(self, row: Row) -> dict[str, Any]:
        """Draw a row's picture, and first the unmerged one if that is another; return the figures by name.

        Among them: ``squared_error`` to the unmerged picture, a mean over numbers from 0 to 1; ``weights``, by level
        the share of the model's attentions; ``errors``, lists of part, level, timestep, share and error.
        """
        if self._name != row.checkpoint:
            self._name, self.model = row.checkpoint, model.load(self._paths[row.checkpoint]).requires_grad_(False)
        same = row.checkpoint, row.setting, row.picture
        if self._drawn != same:
            self._drawn, self._plain = same, self._draw(row)[0]
        network = self.model.network
        with tome_core.patch(network, config(row.way, row.amount, curve_of(network)), host_clock=True) as handle:
            drawn, timesteps = self._draw(row, handle)
            told = handle.report().as_data()
        blocks = [level["blocks"] for level in told["levels"]]
        error = (drawn - self._plain).double().square().mean().item()
        return {"model": row.checkpoint, "way": row.way, "amount": row.amount, **row.setting._asdict(),
                "picture": row.picture, "squared_error": results.rounded(error),
                "work_saved": results.rounded(told["work_saved"] or 0.0), "timesteps": timesteps,
                "weights": [results.rounded(count / sum(blocks)) for count in blocks],
                "errors": [[one["part"], level["level"], one["timestep"], one["share"], results.rounded(one["error"])]
                           for level in told["levels"] for one in level["errors"]]}  # fmt: skip

    def _draw(self, row: Row, handle: Any = None) -> tuple[torch.Tensor, list[float]]:
        """Return a picture, float ``[1, 3, H, W]`` from 0 to 1, not rounded to bytes, and its timesteps."""
        purpose = subjects.PURPOSES[subjects.SHOW]
        tokens = prompt.tokens(purpose.prompts[row.picture % len(purpose.prompts)])
        pair, latent = sampler.begin(self.model, tokens, purpose.first + row.picture)
        scheduler = self._scheduler(row.setting)
        timesteps, sampling = [float(timestep) for timestep in scheduler.timesteps], object()
        for timestep in scheduler.timesteps:
            if handle is not None:
                handle.set_time(timestep=float(timestep), sampling=sampling, timesteps=timesteps, pictures=1)
            velocity = sampler.predict(self.model, latent, timestep, pair, row.setting.guidance)
            latent = scheduler.step(velocity, timestep, latent).prev_sample
        return (model.decode(latent, self.model.haar_gain).clamp(-1, 1) + 1) / 2, timesteps

    def _scheduler(self, setting: Setting) -> Any:
        """Make a new scheduler for one picture."""
        if setting.sampler == "dpm":
            return solver(self.model, setting.steps)
        scheduler = DDIMScheduler(**{**self.model.scheduler, "clip_sample": False}, timestep_spacing="trailing")
        scheduler.set_timesteps(setting.steps)
        return scheduler


def execute(options: argparse.Namespace, command: str) -> None:
    """Draw the missing rows and print the tables. Raises ValueError or OSError for a model that cannot be drawn."""
    torch.set_num_threads(1)
    judges.check(options.model)
    paths = {path.stem: path for path in options.model}
    plan = {row.key: row for row in rows(paths, options.pictures, tuple(options.steps))}
    settings = {"models": {name: subjects.fingerprint(path) for name, path in paths.items()}, "for": subjects.SHOW}
    record = results.new_record("own-error", command, settings, results.describe("cpu"))
    run, bench = results.Run.start(record, list(plan), options.output), Bench(paths)
    for key in tqdm(run.missing, unit="row", mininterval=0.1 if sys.stderr.isatty() else 10):
        run.add(key, bench.measure(plan[key]))
    print(report.write([run.path]))
    print(f"\n{run.path}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 2 after an expected error, 130 if stopped. arguments: None means ``sys.argv[1:]``."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own_error", description=__doc__.partition("\n\n")[2])
    add, steps = parser.add_argument, tuple(setting.steps for setting in BY_STEPS)
    add("--model", nargs="+", type=Path, default=list(MODELS), metavar="PATH", help="scene models (default: those "
        "that tables show)")  # fmt: skip
    add("--pictures", type=int, default=2, metavar="N", help="pictures of each setting (default %(default)s)")
    add("--steps", nargs="+", type=int, choices=steps, default=list(steps), metavar="N",
        help=f"only pictures of these numbers of steps: {', '.join(map(str, steps))} (default all)")  # fmt: skip
    report.add_output(parser)
    return report.run("own_error", parser, arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
