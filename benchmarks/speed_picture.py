"""A whole picture: guided solver steps and the decoder, in one pass or in the two of a hires fix."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers import EulerDiscreteScheduler
from torch import nn

from benchmarks.speed_models import Shape, make_inputs
from benchmarks.speed_plan import Case, passes

_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
_GUIDANCE = 7.5
_LATENT_SCALE = 0.18215


def picture_run(
    case: Case, shape: Shape, unpatched: nn.Module, unet: nn.Module, decoder: nn.Module
) -> Callable[[], torch.Tensor]:
    """A function that makes the case's pictures; of two passes, the first has the unpatched UNet.

    Everything that a UNet is given lies on its device before the clock starts, apart from the steps' own work.
    """
    weight = next(unet.parameters())
    stages = []
    for pixels, steps in passes(case):
        (noise, _, text), named = make_inputs(shape, pixels, case.batch, str(weight.device), weight.dtype)
        stages.append((noise[: case.batch // 2], text, named, steps))
    first = unpatched if len(stages) > 1 else unet

    def run() -> torch.Tensor:
        latent = _denoise(first, *stages[0], case.steps)
        for noise, text, named, steps in stages[1:]:
            latent = F.interpolate(latent, size=noise.shape[-2:], mode="bilinear")
            latent = _denoise(unet, noise, text, named, steps, case.steps, latent)
        return decoder.decode(latent / _LATENT_SCALE).sample

    return run


def _denoise(
    unet: nn.Module, noise: torch.Tensor, text: torch.Tensor, named: dict, steps: int, of: int,
    latent: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The last `steps` of `of` steps, from pure noise or from a latent with as much noise as belongs there."""
    scheduler = EulerDiscreteScheduler(**_BETAS)
    scheduler.set_timesteps(of, device=noise.device)
    times = scheduler.timesteps[of - steps :]
    scheduler.set_begin_index(of - steps)
    latent = noise * scheduler.init_noise_sigma if latent is None else scheduler.add_noise(latent, noise, times[:1])
    tell, picture = getattr(unet, "tell_time", None), object()
    for time, value in zip(times, times.tolist(), strict=True):
        if tell is not None:
            tell(timestep=value, sampling=picture, pictures=len(latent))
        both = scheduler.scale_model_input(torch.cat([latent, latent]), time)
        without, with_prompt = unet(both, time, text, **named).sample.chunk(2)
        guided = without + _GUIDANCE * (with_prompt - without)
        latent = scheduler.step(guided, time, latent).prev_sample
    return latent
