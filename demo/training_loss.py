"""Noised scenes and the loss on them: mean squared error of the v-prediction (Salimans & Ho 2022, section 4)."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import DDPMScheduler
from torch.utils.data import DataLoader, Dataset

from demo.model import SceneModel, encode
from demo.prompt import NULL_TOKEN, tokens_of
from demo.scenes import draw_attributes, render

NO_PROMPT = 0.1  # share of pictures trained without a prompt, for classifier-free guidance
HELD_OUT_TIMES = (150, 450, 750, 950)


class Scenes(Dataset):
    """Endless fresh scenes: item k is the batch of step k, so a resumed run sees what it would have seen.

    Gives pictures float32 [batch, 3, size, size] in -1..1 and token ids int64 [batch, 6].
    """

    def __init__(self, seed: int, batch: int, size: int):
        self.seed, self.batch, self.size = seed, batch, size

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng([self.seed, self.size, step])
        attributes = draw_attributes(self.batch, rng)
        pictures = render(attributes, rng, self.size)
        tokens = tokens_of(attributes)
        tokens[rng.random(self.batch) < NO_PROMPT] = NULL_TOKEN
        return torch.from_numpy(pictures), torch.from_numpy(tokens)


def batches(scenes: Scenes, first_step: int, workers: int) -> DataLoader:
    """Batches from `first_step` on; `workers` processes paint ahead, 0 paints in between."""
    return DataLoader(scenes, batch_size=None, sampler=range(first_step, 2**31), num_workers=workers)


def stratified_times(n: int, generator: torch.Generator) -> torch.Tensor:
    """`n` time steps in 0..999, one in each n-th of the range: evens the loss out between steps."""
    spread = torch.rand(1, generator=generator) + torch.arange(n) / n
    return (spread % 1 * 1000).long()


def v_loss(
    model: SceneModel, pictures: torch.Tensor, tokens: torch.Tensor, times: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Scalar loss of noised `pictures` [n, 3, H, W] at `times` [n], noise from `generator` (on the CPU)."""
    device = next(model.parameters()).device
    latents = encode(pictures, model.haar_gain)
    noise = torch.randn(latents.shape, generator=generator)
    scheduler = DDPMScheduler(**model.scheduler)
    noisy, target = scheduler.add_noise(latents, noise, times), scheduler.get_velocity(latents, noise, times)
    with torch.autocast(device.type, torch.bfloat16):
        prediction = model(noisy.to(device), times.to(device), tokens.to(device))
    return (prediction.float() - target.to(device)).pow(2).mean()


@torch.no_grad()
def held_out_loss(model: SceneModel, pictures: int = 16) -> float:
    """Mean v-loss on fixed 128 px scenes that training never sees (its seeds are not negative, theirs is large)."""
    scenes, tokens = Scenes(2**62, pictures, 2 * model.unet.config.sample_size)[0]
    losses = []
    for time in HELD_OUT_TIMES:
        generator = torch.Generator().manual_seed(time)
        losses += [v_loss(model, part, words, torch.full((len(part),), time), generator).item()
                   for part, words in zip(scenes.split(4), tokens.split(4), strict=True)]
    return float(np.mean(losses))
