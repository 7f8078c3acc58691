"""What is measured: a scene model of this repository, or the user's own checkpoint, and which pictures of it.

There are pictures to choose by, and others to show: a setting that was picked on the pictures of a table flatters
itself. The two share nothing that is drawn: held-out scenes, noise, prompts, seeds of pictures and of methods.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import DDPMScheduler
from safetensors import safe_open

from benchmarks.networks import TRANSFORMER, UNET
from benchmarks.results import Record, ResultError
from demo import checkpoint, model, prompt, sampler
from demo.sampler import GUIDANCE
from demo.source import UserPipeline
from demo.training_loss import Scenes

PART_NOISED = 8  # noised pictures in one row of a result; even, because tomesd draws nothing for an odd batch
# the demo's two, and the oldest, whose heads are smooth: what helps on all three hangs on no one way of looking. A
# checkout is without it; demo/README.md tells where it is
_SMOOTH = model.WEIGHTS.with_name("scenes128-c.safetensors")
SCENE_MODELS = (*model.CHECKPOINTS, _SMOOTH) if _SMOOTH.exists() else model.CHECKPOINTS
CHOOSE, SHOW = "choose", "show"


class Purpose(NamedTuple):
    """Seeds of held-out scenes, of the noise added to them at time 0, and of the first whole picture; their prompts."""

    scenes: int
    noise: int
    first: int
    prompts: tuple[str, ...]


PURPOSES = {
    CHOOSE: Purpose(600_011_771, 7_000, 0, prompt.PROMPTS),
    SHOW: Purpose(600_023_993, 17_000, 2**20, (
        "dawn sea hills right yellow box",
        "storm desert peaks left blue ball",
        "night meadow hills left white tree",
        "sunset snow flat right green cone",
        "day desert peaks right red tree",
        "dawn snow peaks left yellow ball",
    )),
}  # fmt: skip


def check_purpose(record: Record, wanted: str, name: str) -> None:
    """Raise ResultError where the pictures are for the other purpose; an old record, that does not say, passes."""
    has = record["settings"].get("for", wanted)
    if has != wanted:
        raise ResultError(f"{name} was measured on the pictures for '{has}'; give a result of "
                          f"python -m benchmarks.quality --for {wanted}")


class Noised(NamedTuple):
    """Noised held-out pictures ``x`` ``[n, C, h, w]`` at time ``t``, their prompts' tokens, the velocity to predict."""

    x: torch.Tensor
    t: torch.Tensor
    tokens: torch.Tensor
    velocity: torch.Tensor


class SceneSubject:
    """A scene model: its v-loss on held-out scenes, and pictures made as the demo makes them."""

    def __init__(
        self, path: Path, device: torch.device, purpose: Purpose = PURPOSES[SHOW], guidance: float = GUIDANCE
    ) -> None:
        self.name, self.purpose, self.guidance = path.stem, purpose, guidance
        self.model = model.load(path).to(device)
        self.network, self.device = self.model.network, device
        with safe_open(path, "pt") as file:
            self._walls = (file.metadata() or {}).get("walls") != "none"
        self._scheduler = DDPMScheduler(**self.model.scheduler)
        self._painted: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def add_noise(self, part: int, count: int, time: int) -> Noised:
        """`count` pictures (the first ones of held-out set number `part`) at one timestep; as on any device."""
        latents, tokens = self._scenes(part)
        dice = torch.Generator().manual_seed((self.purpose.noise + time) * 1000 + part)
        noise = torch.randn(latents.shape, generator=dice)
        times = torch.full((len(latents),), time)
        made = Noised(
            self._scheduler.add_noise(latents, noise, times), times, tokens,
            self._scheduler.get_velocity(latents, noise, times),
        )  # fmt: skip
        return Noised(*(value[:count].to(self.device) for value in made))

    def _scenes(self, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and tokens of a held-out set, of the kind that the model learned; the latest one is kept."""
        if self._painted is None or self._painted[0] != part:
            scenes = Scenes(self.purpose.scenes, PART_NOISED, 2 * self.model.side, walls=self._walls)
            pictures, tokens, _ = scenes[part]
            self._painted = part, model.encode(pictures, self.model.haar_gain), tokens
        return self._painted[1:]

    def predict(self, noised: Noised) -> torch.Tensor:
        return self.model(noised.x, noised.t, noised.tokens).float()

    def picture(self, number: int, steps: int) -> np.ndarray:
        """uint8 ``[H, W, 3]``: the same prompt and start noise for equal numbers, whatever the steps."""
        tokens = prompt.tokens(self.purpose.prompts[number % len(self.purpose.prompts)])
        return sampler.sample(self.model, tokens, self.purpose.first + number, steps=steps, guidance=self.guidance)


class UserSubject:
    """A user's pipeline and prompts; pictures only, because nobody knows its held-out data."""

    def __init__(self, path: Path, config: Path | None, device: torch.device, prompts: list[str], dtype: torch.dtype,
                 purpose: Purpose):  # fmt: skip
        self.source = UserPipeline(checkpoint.inspect(path), config, device)
        self.source.target.to(dtype)  # the demo takes half precision on a GPU, whose rounding would be measured too
        self.name, self.prompts, self.purpose = path.stem, prompts, purpose
        self.network = self.source.target.unet

    def picture(self, number: int, steps: int) -> np.ndarray:
        text = self.prompts[number % len(self.prompts)]
        return self.source.picture(text, self.purpose.first + number, steps, lambda: None)


Subject = SceneSubject | UserSubject


def is_scene_model(path: Path) -> bool:
    """False for anything that is no .safetensors file; what only ends like one is refused in a sentence."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    return checkpoint.is_of_scenes(checkpoint.read_shapes(path))


def kind_of(path: Path) -> str:
    """As of `networks.KINDS`. Of the models that a path can name, scene models alone may be transformers."""
    is_flux = is_scene_model(path) and checkpoint.is_transformer(checkpoint.read_shapes(path))
    return TRANSFORMER if is_flux else UNET


def fingerprint(path: Path) -> str:
    """Tells weights apart without reading gigabytes: of each weights file its size and first MiB, hashed."""
    files = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(str(file.stat().st_size).encode() + opened.read(2**20))
    return digest.hexdigest()[:12]
