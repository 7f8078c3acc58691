"""The models that are measured, scene models of this repository or the user's own checkpoint, and their pictures.

There are pictures to choose by, and others to show, because a setting that was chosen on the pictures of a table
flatters itself. The two share no held-out scenes, noise, prompts, or seeds of pictures and of methods.
"""

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
from demo.training.loss import Scenes

PART_NOISED = 8  # noised pictures in one row of a result; even, because tomesd draws nothing for an odd batch
CHOOSE, SHOW = "choose", "show"


class Purpose(NamedTuple):
    """Pictures to choose by or show: seeds of held-out scenes, noise, `first` whole picture; scene models' prompts."""

    scenes: int
    noise: int
    first: int  # the seed of whole picture 0; picture n has the seed first + n
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
    """Raise ResultError, with this name, if a record's settings have a purpose, "for", other than `wanted`."""
    has = record["settings"].get("for", wanted)
    if has != wanted:
        raise ResultError(f"{name} was measured on the pictures for '{has}'; give a result of "
                          f"python -m benchmarks.quality --for {wanted}")


class Noised(NamedTuple):
    """Noised latents ``[n, C, h, w]`` of held-out pictures, timesteps ``[n]``, prompts' tokens, velocity to predict."""

    x: torch.Tensor
    t: torch.Tensor
    tokens: torch.Tensor
    velocity: torch.Tensor


class SceneSubject:
    """A scene model, which the demo trains: it predicts noised held-out scenes, and draws as the demo does."""

    def __init__(self, path: Path, device: torch.device, purpose: Purpose = PURPOSES[SHOW],
                 guidance: float = GUIDANCE) -> None:  # fmt: skip
        self.name, self.purpose, self.guidance = path.stem, purpose, guidance
        self.model = model.load(path).to(device)
        self.network, self.device = self.model.network, device
        with safe_open(path, "pt") as file:
            self._walls = (file.metadata() or {}).get("walls") != "none"
        self._scheduler = DDPMScheduler(**self.model.scheduler)
        self._painted: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def add_noise(self, part: int, count: int, time: int) -> Noised:
        """Noise held-out set `part`'s first `count` pictures at a timestep, equally on all devices; give velocities."""
        latents, tokens = self._scenes(part)
        dice = torch.Generator().manual_seed((self.purpose.noise + time) * 1000 + part)
        noise = torch.randn(latents.shape, generator=dice)
        times = torch.full((len(latents),), time)
        noised = (self._scheduler.add_noise(latents, noise, times), times, tokens,
                  self._scheduler.get_velocity(latents, noise, times))  # fmt: skip
        return Noised(*(value[:count].to(self.device) for value in noised))

    def _scenes(self, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a held-out set's latents and tokens, with brick walls if the model learned such; keep the latest."""
        if self._painted is None or self._painted[0] != part:
            scenes = Scenes(self.purpose.scenes, PART_NOISED, 2 * self.model.side, walls=self._walls)
            pictures, tokens, _ = scenes[part]
            self._painted = part, model.encode(pictures, self.model.haar_gain), tokens
        return self._painted[1:]

    def predict(self, noised: Noised) -> torch.Tensor:
        """Predict the velocity ``[n, C, h, w]``, in float32. The caller turns gradients off."""
        return self.model(noised.x, noised.t, noised.tokens).float()

    def picture(self, number: int, steps: int) -> np.ndarray:
        """Draw the purpose's picture `number`, from 0 up, uint8 ``[H, W, 3]``. Prompts repeat; start noises do not."""
        tokens = prompt.tokens(self.purpose.prompts[number % len(self.purpose.prompts)])
        return sampler.sample(self.model, tokens, self.purpose.first + number, steps=steps, guidance=self.guidance)


class UserSubject:
    """A user's pipeline and prompts, for whole pictures only. config: a single file's diffusers folder, else None."""

    def __init__(self, path: Path, config: Path | None, device: torch.device, prompts: list[str], dtype: torch.dtype,
                 purpose: Purpose):  # fmt: skip
        self.source = UserPipeline(checkpoint.inspect(path), config, device)
        self.source.target.to(dtype)  # the demo takes half precision on a GPU, whose rounding would be measured too
        self.name, self.prompts, self.purpose = path.stem, prompts, purpose
        self.network = self.source.target.unet

    def picture(self, number: int, steps: int) -> np.ndarray:
        """Draw the purpose's picture `number`, from 0 up, uint8 ``[H, W, 3]``. Prompts repeat; start noises do not."""
        text = self.prompts[number % len(self.prompts)]
        return self.source.picture(text, self.purpose.first + number, steps, lambda: None)


Subject = SceneSubject | UserSubject


def is_scene_model(path: Path) -> bool:
    """Say, by tensors' names, if a path is a scene model. Raises ValueError for a broken .safetensors file."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    return checkpoint.is_of_scenes(checkpoint.read_shapes(path))


def kind_of(path: Path) -> str:
    """Name a model's kind, of `networks.KINDS`: a scene model's by its tensors' shapes, a user's is always "unet"."""
    is_flux = is_scene_model(path) and checkpoint.is_transformer(checkpoint.read_shapes(path))
    return TRANSFORMER if is_flux else UNET


def fingerprint(path: Path) -> str:
    """Hash, to 12 hex digits, size and first MiB of a file or of a folder's .safetensors: tells weights apart, fast."""
    files = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(str(file.stat().st_size).encode() + opened.read(2**20))
    return digest.hexdigest()[:12]
