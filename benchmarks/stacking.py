"""``python -m benchmarks.stacking``: merging beside what others do to save time or to draw better.

Each alone, merging alone, and both in both orders, in diffusers' own pipelines, and by its own nodes in the ComfyUI
that COMFYUI_DIR names, COMFYUI_PYTHON its Python: how far pictures of the scene models are from plain ones, and the
processor time of models with random weights, a UNet of Stable Diffusion 1.5's shape and transformers of Wan's. Prints
the table; the same command goes on where a killed run was.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report, results, stack_arms
from benchmarks.attention_work import one_thread
from benchmarks.networks import TRANSFORMER
from benchmarks.stack_arms import Drawn
from benchmarks.stack_beside import BESIDE
from benchmarks.stack_nodes import NODES
from benchmarks.stack_pipelines import WANS, RandomPipelines, ScenePipelines, WanPipelines, draw_arm, make_unet
from benchmarks.subjects import PURPOSES, SCENE_MODELS, SHOW
from demo import model as scene_model
from demo import prompt, sampler
from demo.prompt import NULL_TOKEN
from tome_core.settings.presets import MARKS

SHAPE = "sd15"  # of the model whose calls are timed
OTHERS = {**BESIDE, **NODES}
_TIMED = ("DeepCache", "EasyCache", "FirstBlockCache")  # beside what, unless others are asked for
# in ComfyUI
_STEPS = 20  # step skippers want some
_PARTS = ((4, 11), (13, 20))  # of the large model, whose steps take long: six early ones, six late ones
_OFTEN = {"reuse_threshold": 0.5}  # random weights change faster than a picture: that about half of these are skipped
_SCENE_SIDE = 64


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
    report.add_output(made)
    return made


def plan_cases(options: argparse.Namespace) -> dict[str, tuple[str, str, int]]:
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


def scene_case(path: Path, name: str, number: int, preset: str, prompts: tuple[str, ...]) -> dict[str, Any]:
    """A whole picture of a scene model beside this node, in a real ComfyUI."""
    tokens = prompt.tokens(prompts[number % len(prompts)])
    model = {"model": str(path.resolve()), "tokens": [tokens, [NULL_TOKEN] * len(tokens)], "side": _SCENE_SIDE}
    return {**model, "part": [None, None], "inputs": {}, **_common(name, number, preset)}


def random_case(pixels: int, tiny: bool, name: str, number: int, preset: str) -> dict[str, Any]:
    """Six neighbouring steps of a UNet of Stable Diffusion 1.5's shape; odd numbers are late ones."""
    more = {key: value for key, value in _OFTEN.items() if key in NODES[name].inputs}
    model = {"model": None, "tokens": None, "tiny": tiny, "side": pixels // 8}
    return {**model, "part": _PARTS[number % 2], "inputs": more, **_common(name, number, preset)}


def _common(name: str, number: int, preset: str) -> dict[str, Any]:
    return {"beside": name, "number": number, "strength": MARKS[preset], "steps": _STEPS, "guidance": sampler.GUIDANCE}


@contextmanager
def drawing(case: dict[str, Any]) -> Iterator[Callable[[str], Drawn]]:
    """What draws an arm, in a process of ComfyUI's own Python: pictures of scene models as bytes, others as latents.

    Raises RuntimeError where it fails.
    """
    python = os.environ.get("COMFYUI_PYTHON", sys.executable)
    surroundings = {**os.environ, "PYTHONPATH": str(results.ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+") as log:
        latent = Path(folder) / "latent.npy"
        command = [python, "-m", "benchmarks.stack_comfyui_call", json.dumps(case), str(latent), "--cpu",
                   "--use-pytorch-cross-attention"]  # fmt: skip
        with subprocess.Popen(command, cwd=os.environ["COMFYUI_DIR"], env=surroundings, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=log, text=True) as process:  # fmt: skip

            def draw(arm: str) -> Drawn:
                process.stdin.write(f"{arm}\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"ComfyUI's Python ended: {Path(log.name).read_text()[-2000:]}")
                answer = json.loads(line)
                picture = _picture(np.load(latent, allow_pickle=False), case)
                return Drawn(picture, answer["seconds"], answer["calls"], answer["told"])

            try:
                yield draw
            finally:
                process.terminate()


def _picture(latent: np.ndarray, case: dict[str, Any]) -> np.ndarray:
    if case["tokens"] is None:
        return latent
    return sampler.to_bytes(scene_model.decode(torch.from_numpy(latent)[None]))[0]


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
            return RandomPipelines(make_unet(options.tiny), options.pixels)
        return ScenePipelines(paths[model], prompts, options.steps)

    def measure(model: str, name: str, number: int) -> dict[str, Any]:
        if name in BESIDE:
            return stack_arms.measure(partial(draw_arm, pipelines(model), BESIDE[name], number, options.preset))
        if model == SHAPE:
            case = random_case(options.pixels, options.tiny, name, number, options.preset)
        else:
            case = scene_case(paths[model], name, number, options.preset, prompts)
        with drawing(case) as draw:
            return stack_arms.measure(draw)

    plan = plan_cases(options)
    settings = {name: getattr(options, name) for name in ("preset", "steps", "pixels", "tiny")}
    with one_thread(True):
        record = results.new_record("stacking", command, settings, results.describe("cpu"))
        run = results.Run.start(record, list(plan), options.output)
        names = ("model", "beside", "number")
        run.fill(lambda key: {**dict(zip(names, plan[key], strict=True)), **measure(*plan[key])})
    print(report.write([run.path], run.path.with_suffix(".md"), None))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run; gives the exit code: 0 done, 2 wrong options (one sentence says which), 130 interrupted."""
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")  # of deprecated pipelines
    return report.run("stacking", parser(), arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
