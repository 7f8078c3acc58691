"""Noised scenes and the loss on them: mean squared error of the v-prediction (Salimans & Ho 2022, section 4)."""

from __future__ import annotations

import torch
from diffusers import DDPMScheduler

from demo.model import SceneModel, encode
from demo.prompt import NULL_TOKEN, OFFSETS
from demo.scenes import draw_attributes, render

NO_PROMPT = 0.1  # share of pictures trained without a prompt, for classifier-free guidance
HELD_OUT_TIMES = (150, 450, 750, 950)
HELD_OUT_SEED = 2**40  # training's seeds are small


class Scenes:
    """Endless fresh scenes: item k is the batch of step k, so a resumed run sees what it would have seen.

    Painted on `device`. Gives pictures float32 [batch, 3, size, size] in -1..1 and token ids int64 [batch, 6]; with
    `crop` instead a part of each, [batch, 3, crop, crop], from below the sky, where there is most to look up.
    walls: as `demo.scenes.render` takes it.
    """

    def __init__(
        self, seed: int, batch: int, size: int, crop: int | None = None, device: str = "cpu", walls: bool = True
    ):
        self.seed, self.batch, self.size, self.crop, self.device = seed, batch, size, crop, device
        self.walls = walls

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(self.seed_of(step))
        attributes = draw_attributes(self.batch, generator)
        pictures = render(attributes, generator, self.size, self.walls)
        if self.crop:
            pictures = self._cropped(pictures, torch.rand(2, generator=generator, device=self.device).tolist())
        unprompted = torch.rand(self.batch, 1, generator=generator, device=self.device) < NO_PROMPT
        tokens = attributes + torch.tensor(OFFSETS, device=attributes.device)
        return pictures, torch.where(unprompted, NULL_TOKEN, tokens)

    def seed_of(self, step: int) -> int:
        """Of the generator of a step. On a CPU torch reads its lowest 32 bits alone."""
        return ((self.seed * 1_000_003 + self.size) * 1_000_000_007 + step) % 2**63

    def _cropped(self, pictures: torch.Tensor, place: list[float]) -> torch.Tensor:
        room = self.size - self.crop
        top, left = round(room * (1 + place[0]) / 4) * 2, round(room * place[1] / 2) * 2  # even: whole tokens
        return pictures[..., top:top + self.crop, left:left + self.crop]


def stratified_times(n: int, generator: torch.Generator) -> torch.Tensor:
    """`n` time steps in 0..999, one in each n-th of the range: evens the loss out between steps."""
    spread = torch.rand(1, generator=generator) + torch.arange(n) / n
    return (spread % 1 * 1000).long()


def v_loss(
    model: SceneModel, pictures: torch.Tensor, tokens: torch.Tensor, times: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Scalar loss of noised `pictures` [n, 3, H, W] at `times` [n], noise from `generator` (on the CPU)."""
    latents = encode(pictures, model.haar_gain)
    noise, times = torch.randn(latents.shape, generator=generator).to(latents), times.to(latents.device)
    scheduler = DDPMScheduler(**model.scheduler)
    noisy, target = scheduler.add_noise(latents, noise, times), scheduler.get_velocity(latents, noise, times)
    with torch.autocast(latents.device.type, torch.bfloat16):
        prediction = model(noisy, times, tokens)
    return (prediction.float() - target).pow(2).mean()


@torch.no_grad()
def held_out_loss(model: SceneModel, pictures: int = 16) -> float:
    """Mean v-loss on fixed 128 px scenes that training never sees; `model` on the CPU."""
    scenes, tokens = Scenes(HELD_OUT_SEED, pictures, 2 * model.unet.config.sample_size)[0]
    losses = []
    for time in HELD_OUT_TIMES:
        generator = torch.Generator().manual_seed(time)
        losses += [v_loss(model, part, words, torch.full((len(part),), time), generator)
                   for part, words in zip(scenes.split(4), tokens.split(4), strict=True)]
    return torch.stack(losses).mean().item()
