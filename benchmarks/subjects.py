"""What is measured: a scene model of this repository, or the user's own checkpoint, behind one small interface."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from diffusers import DDPMScheduler
from safetensors import safe_open
from torch import nn

from demo import checkpoint, model, prompt, sampler
from demo.source import UserPipeline
from demo.training_loss import Scenes

HELD_OUT = 2**50  # seed of scenes no training sees: training's own are small, its held-out set has 2**40
PART_NOISED = 8  # noised pictures in one row of a result; even, because tomesd draws nothing for an odd batch
NOISE = 7000  # seed of the noise added at time 0; QUALITY.md's
SCENE_MODELS = tuple(model.WEIGHTS.with_name(name) for name in ("scenes128.safetensors", "scenes128-b.safetensors"))


class Noised(NamedTuple):
    """Noised held-out pictures ``x`` ``[n, C, h, w]`` at time ``t``, their prompts' tokens, the velocity to predict."""

    x: torch.Tensor
    t: torch.Tensor
    tokens: torch.Tensor
    velocity: torch.Tensor


class Subject(Protocol):
    """``unet`` is what variants are put on. Equal arguments give equal pictures."""

    name: str
    unet: nn.Module
    can_be_noised: bool

    def picture(self, number: int, steps: int) -> np.ndarray:
        """uint8 ``[H, W, 3]``: the same prompt and start noise for equal numbers, whatever the steps."""


class SceneSubject:
    """A scene model: its v-loss on held-out scenes, and pictures made as the demo makes them."""

    can_be_noised = True

    def __init__(self, path: Path, device: torch.device) -> None:
        self.name = path.stem
        self.model = model.load(path).to(device)
        self.unet, self.device = self.model.unet, device
        self._scheduler = DDPMScheduler(**self.model.scheduler)
        self._painted: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def noised(self, part: int, count: int, time: int) -> Noised:
        """`count` pictures (the first ones of held-out set number `part`) at one timestep; as on any device."""
        latents, tokens = self._scenes(part)
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed((NOISE + time) * 1000 + part))
        times = torch.full((len(latents),), time)
        made = Noised(
            self._scheduler.add_noise(latents, noise, times), times, tokens,
            self._scheduler.get_velocity(latents, noise, times),
        )  # fmt: skip
        return Noised(*(value[:count].to(self.device) for value in made))

    def _scenes(self, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and tokens of a held-out set; the latest one is kept."""
        if self._painted is None or self._painted[0] != part:
            pictures, tokens = Scenes(HELD_OUT, PART_NOISED, 2 * self.unet.config.sample_size)[part]
            self._painted = part, model.encode(pictures, self.model.haar_gain), tokens
        return self._painted[1:]

    def predict(self, noised: Noised) -> torch.Tensor:
        """The model's velocity, float32."""
        return self.model(noised.x, noised.t, noised.tokens).float()

    def picture(self, number: int, steps: int) -> np.ndarray:
        """See `Subject`; the demo's prompts in turn."""
        text = prompt.PROMPTS[number % len(prompt.PROMPTS)]
        return sampler.sample(self.model, prompt.tokens(text), number, steps=steps)


class UserSubject:
    """A user's pipeline and prompts; pictures only, because nobody knows its held-out data."""

    can_be_noised = False

    def __init__(self, path: Path, config: Path | None, device: torch.device, prompts: list[str], dtype: torch.dtype):
        self.source = UserPipeline(checkpoint.inspect(path), config, device)
        self.source.target.to(dtype)  # the demo takes half precision on a GPU, whose rounding would be measured too
        self.name, self.prompts = path.stem, prompts
        self.unet = self.source.target.unet

    def picture(self, number: int, steps: int) -> np.ndarray:
        """See `Subject`; the prompts in turn."""
        return self.source.picture(self.prompts[number % len(self.prompts)], number, steps, lambda: None)


def is_scene_model(path: Path) -> bool:
    """Does the file say that it is one? False for anything that is no such file."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    checkpoint.read_shapes(path)  # refuses what only looks like one, in a sentence
    with safe_open(path, "pt") as file:
        return "haar_gain" in (file.metadata() or {})


def fingerprint(path: Path) -> str:
    """Tells weights apart without reading gigabytes: of each weights file its size and first MiB, hashed."""
    files = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(str(file.stat().st_size).encode() + opened.read(2**20))
    return digest.hexdigest()[:12]


def held_out_fingerprint(size: int = 64) -> str:
    """Tells held-out scenes apart: a run must not go on with others, because the painting changed in between."""
    pictures = Scenes(HELD_OUT, PART_NOISED, size)[0][0]
    return hashlib.sha256(((pictures + 1) * 127.5).round().to(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def opener(
    path: Path, *, config: Path | None, device: torch.device, prompts: list[str], dtype: torch.dtype
) -> Callable[[], Subject]:
    """What loads the model at `path`, a scene model or what `demo.checkpoint.inspect` takes, when it is its turn."""
    if is_scene_model(path):
        return lambda: SceneSubject(path, device)
    return lambda: UserSubject(path, config, device, prompts, dtype)
