"""Renders in a process of its own, to be killed: ``python -m tests.a_render HOST REPOSITORY [STEP]``.

Prints a digest of a plain and of a merged picture. With STEP it then merges once more and waits there to be killed.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import comfy_doubles, webui_doubles
from tests.comfy_loader import load_pack

Render = Callable[[Callable[[Any], None]], torch.Tensor]  # takes what is called at each step
torch.set_num_threads(1)


def webui(repository: Path) -> tuple[Render, Render]:
    """Jobs of a webui that has this repository among its extensions."""
    webui_doubles.be_short(pytest.MonkeyPatch(), steps=slice(None))
    webui = webui_doubles.Webui(pytest.MonkeyPatch()).start(repository)
    assert Path(webui.part("script").__file__).is_relative_to(repository)
    return tuple(lambda stop, on=on: webui.job({"enabled": on, "only_if_it_pays": False}, at_step=stop).latents
                 for on in (False, True))  # fmt: skip


def comfyui(repository: Path) -> tuple[Render, Render]:
    """Samplings of a ComfyUI that has this repository among its custom nodes."""
    plain = comfy_doubles.least_checkpoint()
    merged = comfy_doubles.apply(plain, nodes=load_pack(repository).NODE_CLASS_MAPPINGS, ratio=0.5)
    return tuple(lambda stop, branch=branch: comfy_doubles.Guider(branch).sample(stop=stop)
                 for branch in (plain, merged))  # fmt: skip


if __name__ == "__main__":
    host, repository, *last = sys.argv[1:]
    renders = {"webui": webui, "comfyui": comfyui}[host](Path(repository).resolve())
    for render in renders:
        print("picture", hashlib.sha256(render(lambda step: None).numpy().tobytes()).hexdigest(), flush=True)

    def stop(step: object) -> None:
        print(f"step {step}", flush=True)
        while [str(step)] == last:
            time.sleep(0.05)

    if last:
        renders[1](stop)
