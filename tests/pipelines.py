"""Pipelines with random weights: how they are built and drawn with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch

from tests import tiny_pipeline

KINDS = {"sd15": tiny_pipeline.stable_diffusion, "sdxl": tiny_pipeline.stable_diffusion_xl}
TIMES = [901, 801, 401, 301]  # both phases of a preset, and a match of each is kept for a step


def make(words: Path, kind: str = "sd15") -> Any:
    """A pipeline, its weights always the same."""
    pipe = KINDS[kind](words)
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    return pipe


def draw(pipe: Any, seed: int = 0, **more: Any) -> torch.Tensor:
    """The finished latent, which is quicker to have than the picture."""
    pipe.set_progress_bar_config(disable=True)
    call = {"prompt": "a b", "timesteps": TIMES, "guidance_scale": 3.0, "output_type": "latent"}
    return pipe(**{**call, **more}, generator=torch.Generator().manual_seed(seed)).images
