"""The sampler, which makes the same picture of equal prompts and seeds every time."""

from collections.abc import Callable

import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler

from demo.model import SceneModel, decode
from demo.prompt import NULL_TOKEN

GUIDANCE = 3.0  # shapes are clear from here on; people draw with 3 to 8


def solver(model: SceneModel, steps: int) -> DPMSolverMultistepScheduler:
    """Make a new solver for one picture: `steps` timesteps of the model's noise schedule, the noisiest one first."""
    schedule = {name: value for name, value in model.scheduler.items() if name != "clip_sample"}  # only DDPM has that
    scheduler = DPMSolverMultistepScheduler(**schedule, timestep_spacing="trailing", final_sigmas_type="zero")
    scheduler.set_timesteps(steps)
    return scheduler


@torch.no_grad()
def sample(
    model: SceneModel, tokens: list[int], seed: int, *, steps: int = 20, guidance: float = GUIDANCE,
    on_step: Callable[[], None] | None = None,
) -> np.ndarray:
    """Draw one picture, uint8 [H, W, 3], of six `tokens`; call `on_step` after every solver step.

    The start noise depends on `seed` alone, not on the device, other pictures or the global random state.
    """
    pair, latent = begin(model, tokens, seed)
    scheduler = solver(model, steps)
    for timestep in scheduler.timesteps:
        velocity = predict(model, latent, timestep.to(latent.device), pair, guidance)
        latent = scheduler.step(velocity, timestep, latent).prev_sample
        if on_step:
            on_step()
    return to_bytes(decode(latent, model.haar_gain))[0]


def begin(model: SceneModel, tokens: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a prompt and of none, int64 [2, 6], and the noise by `seed`, [1, C, h, w], on the device."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(1, model.channels, model.side, model.side, generator=generator).to(device)
    return torch.tensor([tokens, [NULL_TOKEN] * len(tokens)], device=device), latent


def predict(
    model: SceneModel, latent: torch.Tensor, timestep: torch.Tensor, pair: torch.Tensor, guidance: float = GUIDANCE,
    **more: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Compute the velocity of one `latent` with guidance; `pair` is from `begin`, `more` goes to the model."""
    with_prompt, without = model(latent.expand(2, -1, -1, -1), timestep, pair, **more).chunk(2)
    return without + guidance * (with_prompt - without)


def to_bytes(pictures: torch.Tensor) -> np.ndarray:
    """Clip pictures [n, 3, H, W] to -1..1 and return them as uint8 [n, H, W, 3]."""
    scaled = (pictures.float().clamp(-1, 1) + 1) * 127.5
    return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
