"""The cases people have, as rows, and how each draws, on a scene model.

Diffusers' loop of text to image, image to image, inpainting and tiles, by its own schedulers with their timesteps set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import diffusers
import numpy as np
import torch

from benchmarks import subjects
from demo import sampler
from demo.model import SceneModel, decode, encode
from demo.prompt import NULL_TOKEN

Predict = Callable[[torch.Tensor], torch.Tensor]
_TILE, _APART = 5 / 8, 3 / 8  # side of a tile and distance to the next, as shares of the picture's side
_MOST_NOISE = 0.999  # of a training step, where a solver has no answer to pure noise
HYPER_TIME = 800  # at which Hyper-SD draws in a single step


@dataclass(frozen=True)
class PictureCase:
    """One way of making pictures.

    solver: of `SOLVERS`. steps: of the whole noise schedule, of which `denoise` below 1 runs the last,
    beginning with a scene, as img2img does; at `scale` times the model's own size with a scene of that size enlarged,
    as a hires pass does. inpaint: the left half of the scene stays as it is. tiled: each step in four that overlap.
    """

    name: str
    steps: int
    solver: str = "DPM++ 2M"
    guidance: float = sampler.GUIDANCE
    denoise: float = 1.0
    scale: int = 1
    batch: int = 1
    inpaint: bool = False
    tiled: bool = False

    @property
    def begins_with_a_scene(self) -> bool:
        return self.denoise < 1


_CASES = (
    PictureCase("20 steps", 20),
    PictureCase("8 steps", 8),
    PictureCase("4 steps", 4),
    PictureCase("1 step", 1),
    PictureCase("Turbo's shape, 1 step", 1, "ancestral", guidance=1),
    PictureCase("Lightning's shape, 4 steps", 4, "Euler", guidance=1),
    PictureCase("Lightning's shape, 8 steps", 8, "Euler", guidance=1),
    PictureCase("LCM's shape, 4 steps", 4, "LCM", guidance=1),
    PictureCase("LCM's shape, 8 steps", 8, "LCM", guidance=1),
    PictureCase("Hyper's shape, 1 step", 1, "Hyper", guidance=1),
    PictureCase("ancestral, 10 steps", 10, "ancestral"),
    PictureCase("SDE, 10 steps", 10, "SDE"),
    PictureCase("Karras, 10 steps", 10, "Karras"),
    PictureCase("exponential, 10 steps", 10, "exponential"),
    PictureCase("AYS, 10 steps", 10, "AYS"),
    PictureCase("EDM, 10 steps", 10, "EDM"),
    PictureCase("CFG 1, 10 steps", 10, guidance=1),
    PictureCase("img2img at .3 of 20", 20, denoise=0.3),
    PictureCase("img2img at .5 of 20", 20, denoise=0.5),
    PictureCase("img2img at .6 of 20", 20, denoise=0.6),
    PictureCase("inpainting at .8 of 10", 10, denoise=0.8, inpaint=True),
    PictureCase("batch of 4, 4 steps", 4, batch=4),
    PictureCase("batch of 8, 4 steps", 4, batch=8),
    PictureCase("hires at .5 of 10", 10, denoise=0.5, scale=2),
    PictureCase("hires at .3 of 10", 10, denoise=0.3, scale=2),
    PictureCase("hires at .6 of 10", 10, denoise=0.6, scale=2),
    PictureCase("tiled upscale at .5 of 10", 10, denoise=0.5, scale=2, tiled=True),
)
CASES = {case.name: case for case in _CASES}


def _demo(model: SceneModel, steps: int, schedule: str = subjects.UNIFORM) -> Any:
    return sampler.solver(model, steps, subjects.timesteps(schedule, model.scheduler, steps))


def _of_class(kind: type, model: SceneModel, steps: int, **more: Any) -> Any:
    made = kind(**{**sampler.solver_config(model), "timestep_spacing": "trailing", **more})
    made.set_timesteps(steps)
    return made


def _edm(model: SceneModel, steps: int) -> Any:
    """Karras et al. 2022 altogether: their sigmas and Heun's second order, all steps but the last of two calls."""
    config = sampler.solver_config(model)
    kept = {name: value for name, value in config.items() if not name.startswith(("beta", "rescale"))}
    betas = diffusers.DDPMScheduler(**model.scheduler).betas.clamp(max=_MOST_NOISE)
    made = diffusers.HeunDiscreteScheduler(**kept, trained_betas=betas.tolist())
    made.set_timesteps(timesteps=subjects.timesteps(subjects.KARRAS, model.scheduler, steps))
    return made


def _hyper(model: SceneModel, steps: int) -> Any:
    made = diffusers.LCMScheduler(**sampler.solver_config(model))
    made.set_timesteps(timesteps=[HYPER_TIME])
    return made


# (model, steps) -> a scheduler
SOLVERS = {
    "DPM++ 2M": _demo,
    "Karras": partial(_demo, schedule=subjects.KARRAS),
    "exponential": partial(_demo, schedule=subjects.EXPONENTIAL),
    "AYS": partial(_demo, schedule=subjects.AYS),
    "Euler": partial(_of_class, diffusers.EulerDiscreteScheduler),
    "ancestral": partial(_of_class, diffusers.EulerAncestralDiscreteScheduler),
    "SDE": partial(_of_class, diffusers.DPMSolverMultistepScheduler, algorithm_type="sde-dpmsolver++",
                   final_sigmas_type="zero"),
    "EDM": _edm,
    "LCM": partial(_of_class, diffusers.LCMScheduler, timestep_spacing="leading"),
    "Hyper": _hyper,
}


class PictureOrder(NamedTuple):
    """One picture: its six tokens, its seed, and the latent ``[1, C, h, w]`` of the scene it begins with, or None."""

    tokens: list[int]
    seed: int
    scene: torch.Tensor | None = None


@torch.no_grad()
def draw(model: SceneModel, case: PictureCase, asked: Sequence[PictureOrder]) -> np.ndarray:
    """Pictures uint8 ``[n, H, W, 3]``, drawn at once. All that a picture draws comes from its own seed."""
    dice = [torch.Generator().manual_seed(one.seed) for one in asked]
    scene = torch.cat([enlarge(model, one.scene, case.scale) for one in asked]) if case.begins_with_a_scene else None
    side, channels = model.side * case.scale, model.channels
    noise = torch.cat([torch.randn(1, channels, side, side, generator=one) for one in dice])
    scheduler = SOLVERS[case.solver](model, case.steps)
    times = _times_left(scheduler, case)
    latent = scheduler.add_noise(scene, noise, times[:1].expand(len(noise))) if case.begins_with_a_scene else \
        noise * scheduler.init_noise_sigma  # fmt: skip
    tokens = torch.tensor([one.tokens for one in asked])
    draws = {"generator": dice} if "generator" in inspect.signature(scheduler.step).parameters else {}
    for number, time in enumerate(times):
        predict = _predictor(model, tokens, time, case.guidance)
        given = scheduler.scale_model_input(latent, time)
        velocity = _in_tiles(predict, given) if case.tiled else predict(given)
        latent = scheduler.step(velocity, time, latent, **draws).prev_sample
        if case.inpaint:
            latent = _keep_half(latent, scene, noise, scheduler, times[number + 1 : number + 2])
    return sampler.to_bytes(decode(latent, model.haar_gain))


def timesteps(model: SceneModel, case: PictureCase) -> list[float]:
    """The timesteps of all steps of a picture."""
    return _times_left(SOLVERS[case.solver](model, case.steps), case).tolist()


def enlarge(model: SceneModel, latent: torch.Tensor, scale: int) -> torch.Tensor:
    """The latent of the enlarged picture, with which a hires pass begins."""
    if scale == 1:
        return latent
    picture = decode(latent, model.haar_gain)
    return encode(torch.nn.functional.interpolate(picture, scale_factor=scale, mode="bicubic"), model.haar_gain)


def _times_left(scheduler: Any, case: PictureCase) -> torch.Tensor:
    """Of an image to image pass the last ones; the scheduler is told where it begins."""
    skipped = case.steps - round(case.steps * case.denoise)
    if skipped:
        scheduler.set_begin_index(skipped)
    return scheduler.timesteps[skipped:]


def _predictor(model: SceneModel, tokens: torch.Tensor, time: torch.Tensor, guidance: float) -> Predict:
    """The velocity at a time; a guidance of 1 needs no negative prompt."""

    def predict(latent: torch.Tensor) -> torch.Tensor:
        if guidance == 1:
            return model(latent, time, tokens)
        both = torch.cat([tokens, torch.full_like(tokens, NULL_TOKEN)])
        with_prompt, without = model(latent.repeat(2, 1, 1, 1), time, both).chunk(2)
        return without + guidance * (with_prompt - without)

    return predict


def _in_tiles(predict: Predict, latent: torch.Tensor) -> torch.Tensor:
    """The mean of four overlapping tiles' predictions (MultiDiffusion, Bar-Tal et al. 2023)."""
    side, apart = (round(share * latent.shape[-1]) for share in (_TILE, _APART))
    total, count = torch.zeros_like(latent), torch.zeros_like(latent)
    for top in (0, apart):
        for left in (0, apart):
            place = (..., slice(top, top + side), slice(left, left + side))
            total[place] += predict(latent[place])
            count[place] += 1
    return total / count


def _keep_half(
    latent: torch.Tensor, scene: torch.Tensor, noise: torch.Tensor, scheduler: Any, after: torch.Tensor
) -> torch.Tensor:
    """The left half is the scene's, noised as the next step expects it; `after` is empty behind the last."""
    kept = scheduler.add_noise(scene, noise, after.expand(len(scene))) if len(after) else scene
    half = latent.shape[-1] // 2
    return torch.cat([kept[..., :half], latent[..., half:]], -1)
