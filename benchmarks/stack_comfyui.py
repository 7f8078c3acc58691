"""Comparisons in a real ComfyUI, which COMFYUI_DIR and COMFYUI_PYTHON name: one process of its own Python a row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.stack_arms import Drawn
from benchmarks.stack_nodes import NODES
from demo import model, prompt, sampler
from demo.prompt import NULL_TOKEN
from tome_core.settings.presets import MARKS

ROOT = Path(__file__).resolve().parent.parent
STEPS = 20  # step skippers want some
PARTS = ((4, 11), (13, 20))  # of the large model, whose steps take long: six early ones, six late ones
_OFTEN = {"reuse_threshold": 0.5}  # random weights change faster than a picture: that about half of these are skipped
_SCENE_SIDE = 64


def scene_case(path: Path, name: str, number: int, preset: str, prompts: tuple[str, ...]) -> dict[str, Any]:
    """A whole picture of a scene model beside this node."""
    tokens = prompt.tokens(prompts[number % len(prompts)])
    return {"model": str(path.resolve()), "tokens": [tokens, [NULL_TOKEN] * len(tokens)], "side": _SCENE_SIDE,
            "part": [None, None], **_common(name, number, preset)}  # fmt: skip


def random_case(pixels: int, tiny: bool, name: str, number: int, preset: str) -> dict[str, Any]:
    """Six neighbouring steps of a UNet of Stable Diffusion 1.5's shape; odd numbers are late ones."""
    more = {key: value for key, value in _OFTEN.items() if key in NODES[name].inputs}
    return {"model": None, "tokens": None, "tiny": tiny, "side": pixels // 8, "part": PARTS[number % 2],
            **_common(name, number, preset), "inputs": more}  # fmt: skip


def _common(name: str, number: int, preset: str) -> dict[str, Any]:
    return {"beside": name, "number": number, "strength": MARKS[preset], "steps": STEPS, "guidance": sampler.GUIDANCE,
            "inputs": {}}  # fmt: skip


@contextmanager
def drawing(case: dict[str, Any]) -> Iterator[Callable[[str], Drawn]]:
    """What draws an arm: pictures of scene models as bytes, others as latents. Raises RuntimeError where it fails."""
    python = os.environ.get("COMFYUI_PYTHON", sys.executable)
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
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
    return sampler.to_bytes(model.decode(torch.from_numpy(latent)[None], model.HAAR_GAIN))[0]
