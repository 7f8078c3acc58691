"""From a prompt and a seed to a picture, the same one every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from diffusers import DDPMScheduler, DPMSolverMultistepScheduler

from demo.model import SceneModel, decode
from demo.prompt import NULL_TOKEN

GUIDANCE = 3.0  # shapes are clear from here on; people draw with 3 to 8


def solver(model: SceneModel, steps: int, timesteps: Sequence[int] | None = None) -> DPMSolverMultistepScheduler:
    """A fresh solver for one picture; the model's own noise schedule, `steps` of it, the noisiest one first.

    timesteps: these instead of `steps` evenly spaced ones.
    """
    schedule = {name: value for name, value in model.scheduler.items() if name != "clip_sample"}  # which is DDPM's
    made = DPMSolverMultistepScheduler(**schedule, timestep_spacing="trailing", final_sigmas_type="zero")
    made.set_timesteps(steps) if timesteps is None else made.set_timesteps(timesteps=list(timesteps))
    return made


@torch.no_grad()
def sample(
    model: SceneModel, tokens: list[int], seed: int, *, steps: int = 20, guidance: float = GUIDANCE,
    timesteps: Sequence[int] | None = None, start: torch.Tensor | None = None,
    on_step: Callable[[], None] | None = None,
) -> np.ndarray:
    """One picture, uint8 [H, W, 3], of six `tokens`.

    The start noise is drawn on the CPU from `seed` alone, so it does not depend on the device, on other pictures
    or on the global random state. timesteps: see `solver`. start: a latent [1, C, h, w] to begin with instead of
    noise alone; it gets as much of that noise as the first step expects. `on_step` is called after every solver step.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(1, model.channels, model.side, model.side, generator=generator).to(device)
    pair = torch.tensor([tokens, [NULL_TOKEN] * len(tokens)], device=device)
    scheduler = solver(model, steps, timesteps)
    if start is not None:
        first = scheduler.timesteps[:1].to(device)
        latent = DDPMScheduler(**model.scheduler).add_noise(start.to(device), latent, first)
    for timestep in scheduler.timesteps:
        with_prompt, without = model(latent.expand(2, -1, -1, -1), timestep.to(device), pair).chunk(2)
        velocity = without + guidance * (with_prompt - without)
        latent = scheduler.step(velocity, timestep, latent).prev_sample
        if on_step:
            on_step()
    return to_bytes(decode(latent, model.haar_gain))[0]


def to_bytes(pictures: torch.Tensor) -> np.ndarray:
    """Pictures [n, 3, H, W] in -1..1 (clipped to it) to uint8 [n, H, W, 3]."""
    scaled = (pictures.float().clamp(-1, 1) + 1) * 127.5
    return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
