"""Pipelines with random weights under a preset: how they are built and drawn with, and what tells that they merged.

Merged pictures are held against those of pipelines that went another way: loaded before instead of after, drawn alone
instead of at once. Equal means equal bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import tome_core
from tests import tiny_pipeline
from tome_core import MergeConfig, preset

KINDS = {"sd15": tiny_pipeline.stable_diffusion, "sdxl": tiny_pipeline.stable_diffusion_xl}
TOKENS = 1024
TIMES = [901, 801, 401, 301]  # both phases of a preset, and a match of each is kept for a step
IMAGE_TIMES = [951, *TIMES]  # of which a strength of .8 leaves those

every_kind = pytest.mark.parametrize("kind", KINDS)


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


def merged_alone(pipe: Any, name: str | MergeConfig = "balanced", **more: Any) -> torch.Tensor:
    """The picture of a patch that has seen no other."""
    with tome_core.patch(pipe, name) as handle:
        picture = draw(pipe, **more)
    assert_merged(handle)
    return picture


def assert_merged(handle: Any) -> None:
    """Every call of the finest level was, and as hard as the default preset does in late steps."""
    finest = handle.report().levels[0]
    assert finest.calls_merged and not finest.reasons and finest.work_saved > 0.8
    most = TOKENS * (1 - preset("balanced").rules[0].ratio)
    assert all(before == TOKENS and keys <= most for before, _, keys in finest.tokens)


def differ(*pictures: torch.Tensor) -> bool:
    return not any(torch.equal(one, two) for i, one in enumerate(pictures) for two in pictures[:i])


def an_image(pipe: Any) -> torch.Tensor:
    side = pipe.unet.config.sample_size * pipe.vae_scale_factor
    return torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(7))


def write_adapter(pipe: Any, folder: Path, name: str) -> None:
    """A LoRA of every projection, from random numbers that depend on the name."""
    peft = pytest.importorskip("peft", reason="LoRAs are peft's")
    parts = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "net.0.proj"]
    pipe.unet.add_adapter(peft.LoraConfig(r=2, target_modules=parts), name)
    dice = torch.Generator().manual_seed(sum(name.encode()))
    layers = {key: torch.randn(value.shape, generator=dice) * value.shape[1] ** -0.5
              for key, value in peft.get_peft_model_state_dict(pipe.unet, adapter_name=name).items()}  # fmt: skip
    pipe.save_lora_weights(folder, layers, weight_name=f"{name}.safetensors")


def load(words: Path, folder: Path, pipe: Any, *names: str) -> None:
    """Adapters from the folder into the pipeline, as its users do; the last one named is in force."""
    for name in names:
        file = f"{name}.safetensors"
        if not (folder / file).exists():
            write_adapter(make(words, "sdxl" if "XL" in type(pipe).__name__ else "sd15"), folder, name)
        pipe.load_lora_weights(folder, weight_name=file, adapter_name=name)
