"""``python -m benchmarks.stacking``: merging beside what others do to save time or to draw better.

Each alone, merging alone, and both in both orders, in diffusers' own pipelines, and by its own nodes in the ComfyUI
that COMFYUI_DIR names, COMFYUI_PYTHON its Python: how far pictures of the scene models are from plain ones, and the
processor time of models with random weights, a UNet of Stable Diffusion 1.5's shape and transformers of Wan's. Prints
the table; the same command goes on where a killed run was.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import endings, environment, report, results, stack_arms, stack_comfyui
from benchmarks.call_times import one_thread
from benchmarks.networks import TRANSFORMER
from benchmarks.purposes import PURPOSES, SHOW
from benchmarks.speed_models import SHAPES, TINY_SHAPES, make_unet
from benchmarks.stack_beside import BESIDE
from benchmarks.stack_nodes import NODES
from benchmarks.stack_pipelines import WANS, RandomPipelines, ScenePipelines, WanPipelines, drawn
from benchmarks.subjects import SCENE_MODELS

SHAPE = "sd15"  # of the model whose calls are timed
OTHERS = {**BESIDE, **NODES}
_TIMED = ("DeepCache", "EasyCache", "FirstBlockCache")  # beside what, unless others are asked for


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.stacking", description=__doc__.partition("\n\n")[2])
    add = made.add_argument
    add("--beside", nargs="+", choices=tuple(OTHERS), metavar="NAME", help=f"of {', '.join(OTHERS)} (default: those "
        "that are there)")  # fmt: skip
    add("--timed", nargs="*", choices=tuple(OTHERS), metavar="NAME", help="beside what the large model is timed "
        f"(default: {', '.join(_TIMED)} where they are there)")  # fmt: skip
    add("--model", nargs="+", type=Path, default=list(SCENE_MODELS), metavar="FILE", help="scene models (default: all "
        "in demo/)")  # fmt: skip
    add("--pictures", type=int, default=2, metavar="N", help="of each scene model (default 2)")
    add("--steps", type=int, default=10, metavar="N", help="of a picture (default 10)")
    add("--rounds", type=int, default=4, metavar="N", help="of the large model, early and late steps in turn "
        "(default 4)")  # fmt: skip
    add("--pixels", type=int, default=512, metavar="N", help="of the large model's picture (default 512)")
    add("--preset", default="balanced", metavar="NAME", help="of merging (default balanced)")
    add("--tiny", action="store_true", help="a tiny model in place of the large one: for tests")
    endings.add_output(made)
    return made


def planned(options: argparse.Namespace) -> dict[str, tuple[str, str, int]]:
    """Row's key -> (model, what is beside, number), picture by picture, so that each disturbance hits all alike."""
    names = options.beside or [name for name, one in OTHERS.items() if one.is_there]
    timed = [name for name in _TIMED if OTHERS[name].is_there] if options.timed is None else options.timed
    drawn_on = [name for name in names if not _is_of_transformers(name)]
    rows = [(path.stem, name, number) for number in range(options.pictures) for path in options.model
            for name in drawn_on]  # fmt: skip
    rows += [(model, name, number) for number in range(options.rounds) for name in timed
             for model in (WANS if _is_of_transformers(name) else [SHAPE])]  # fmt: skip
    return {f"{model}, {name}, {number}": (model, name, number) for model, name, number in rows}


def _is_of_transformers(name: str) -> bool:
    return name in BESIDE and BESIDE[name].kind == TRANSFORMER


def execute(options: argparse.Namespace, command: str) -> int:
    """Measure what is missing, and print the table."""
    absent = [name for name in (*(options.beside or ()), *(options.timed or ())) if not OTHERS[name].is_there]
    if absent:
        needs = "COMFYUI_DIR in the environment" if absent[0] in NODES else 'pip install -e ".[benchmarks]"'
        raise ValueError(f"{absent[0]} is not there; it needs {needs}, or leave it out with --beside and --timed")
    paths, prompts = {path.stem: path for path in options.model}, PURPOSES[SHOW].prompts

    @cache
    def pipelines(model: str) -> RandomPipelines | ScenePipelines | WanPipelines:
        if model in WANS:
            return WanPipelines(model, options.tiny)
        if model == SHAPE:
            shape = (TINY_SHAPES if options.tiny else SHAPES)[SHAPE]
            return RandomPipelines(make_unet(shape, "cpu", torch.float32), options.pixels)
        return ScenePipelines(paths[model], prompts, options.steps)

    def measured(model: str, name: str, number: int) -> dict[str, Any]:
        if name in BESIDE:
            return stack_arms.measure(partial(drawn, pipelines(model), BESIDE[name], number, options.preset))
        if model == SHAPE:
            case = stack_comfyui.random_case(options.pixels, options.tiny, name, number, options.preset)
        else:
            case = stack_comfyui.scene_case(paths[model], name, number, options.preset, prompts)
        with stack_comfyui.drawing(case) as draw:
            return stack_arms.measure(draw)

    plan = planned(options)
    settings = {name: getattr(options, name) for name in ("preset", "steps", "pixels", "tiny")}
    with one_thread(True):
        record = results.new_record("stacking", command, settings, environment.describe("cpu"))
        run = results.Run.start(record, list(plan), options.output)
        names = ("model", "beside", "number")
        run.fill(lambda key: {**dict(zip(names, plan[key], strict=True)), **measured(*plan[key])})
    print(report.write([run.path], run.path.with_suffix(".md"), None))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run; gives the exit code: 0 done, 2 wrong options (one sentence says which), 130 interrupted."""
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")  # of deprecated pipelines
    return endings.run("stacking", parser(), arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
