"""Noised scenes and the loss on them: mean squared error of the v-prediction (Salimans & Ho 2022, section 4)."""

from typing import NamedTuple

import torch
from diffusers import DDPMScheduler

from demo.model import SceneModel, encode
from demo.prompt import NULL_TOKEN, OFFSETS
from demo.training.scenes import draw_attributes, render

MEAN_BANDS = 3  # of the Haar latent's channels: the half-size picture; the others are what it lacks
NO_PROMPT = 0.1  # share of pictures trained without a prompt, for classifier-free guidance
HELD_OUT_TIMES = (150, 450, 750, 950)
HELD_OUT_SEED = 2**40  # training's seeds are small


class Batch(NamedTuple):
    """Pictures float32 [n, 3, H, W] in -1..1, tokens int64 [n, 6], sizes int64 [n, 6] as `SceneModel.forward` has."""

    pictures: torch.Tensor
    tokens: torch.Tensor
    sizes: torch.Tensor


class Scenes:
    """Batches of new scenes, without end: item k is the `Batch` of step k, always the same, asked for in any order.

    A batch has `batch` scenes, painted on `device`, `size` x `size` pixels. With `crop` only crop x crop pixels of each
    are given, at a random place for the whole batch, mostly below the sky, where most detail is. A tenth of the
    pictures have no prompt: all six tokens are NULL_TOKEN. walls: if on, a third of the pictures has a brick wall.
    """

    def __init__(
        self, seed: int, batch: int, size: int, crop: int | None = None, device: str = "cpu", walls: bool = True
    ):
        self.seed, self.batch, self.size, self.crop, self.device, self.walls = seed, batch, size, crop, device, walls

    def __getitem__(self, step: int) -> Batch:
        generator = torch.Generator(self.device).manual_seed(self.seed_of(step))
        attributes = draw_attributes(self.batch, generator)
        pictures = render(attributes, generator, self.size, self.walls)
        top, left, side = 0, 0, self.crop or self.size
        if self.crop:
            down, right = torch.rand(2, generator=generator, device=self.device).tolist()
            room = self.size - self.crop
            top, left = round(room * (1 + down) / 4) * 2, round(room * right / 2) * 2  # even: whole tokens
        unprompted = torch.rand(self.batch, 1, generator=generator, device=self.device) < NO_PROMPT
        tokens = attributes + torch.tensor(OFFSETS, device=attributes.device)
        sizes = torch.tensor([[self.size, self.size, top, left, side, side]], device=attributes.device)
        return Batch(pictures[..., top:top + side, left:left + side], torch.where(unprompted, NULL_TOKEN, tokens),
                     sizes.expand(self.batch, -1))

    def seed_of(self, step: int) -> int:
        """Return a step's seed, made of the scenes' seed, size and the step. On a CPU only its lowest 32 bits count."""
        return ((self.seed * 1_000_003 + self.size) * 1_000_000_007 + step) % 2**63


def stratified_times(n: int, generator: torch.Generator) -> torch.Tensor:
    """Draw `n` time steps in 0..999, int64, 1000/n apart, the first random, wrapping; this evens the loss out."""
    return (_stratify(n, generator) * 1000).long()


def noisy_times(n: int, generator: torch.Generator) -> torch.Tensor:
    """Draw `n` stratified time steps in 0..999, int64, noisy (high) ones more often: these decide the composition."""
    return (_stratify(n, generator) ** (1 / 3) * 1000).long().clamp(max=999)


def _stratify(n: int, generator: torch.Generator) -> torch.Tensor:
    """Draw `n` numbers in 0..1, each 1/n above the one before, from a random start; above 1 they begin at 0 again."""
    return (torch.rand(1, generator=generator) + torch.arange(n) / n) % 1


def squared_errors(model: SceneModel, batch: Batch, times: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Compute the v-prediction's squared errors [n, 12, h, w] at `times` [n], with noise by `generator` of the CPU."""
    latents = encode(batch.pictures, model.haar_gain)
    noise, times = torch.randn(latents.shape, generator=generator).to(latents), times.to(latents.device)
    scheduler = DDPMScheduler(**model.scheduler)
    noisy, target = scheduler.add_noise(latents, noise, times), scheduler.get_velocity(latents, noise, times)
    # A step in bfloat16 takes 1.6 to 1.9 times as long on a CPU that has instructions for it but no tiles (AMX).
    with torch.autocast(latents.device.type, torch.bfloat16, enabled=latents.device.type != "cpu"):
        prediction = model(noisy, times, batch.tokens, batch.sizes)
    return (prediction.float() - target).pow(2)


def v_loss(model: SceneModel, batch: Batch, times: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Compute the mean of the `squared_errors`, a scalar."""
    return squared_errors(model, batch, times, generator).mean()


def composition_loss(model: SceneModel, batch: Batch, times: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Compute a weighted mean of the `squared_errors`, a scalar: channels of means weigh `haar_gain`, the others 1.

    `encode` scales the others, the details, up by `haar_gain`.
    """
    errors = squared_errors(model, batch, times, generator)
    weights = torch.ones(errors.shape[1], device=errors.device)
    weights[:MEAN_BANDS] = model.haar_gain
    return (errors.mean((0, 2, 3)) * weights).sum() / weights.sum()


@torch.no_grad()
def held_out_loss(model: SceneModel, pictures: int = 16) -> float:
    """Compute the mean v-loss at HELD_OUT_TIMES on fixed scenes that training never sees, of full size; on the CPU."""
    batch = Scenes(HELD_OUT_SEED, pictures, 2 * model.side)[0]
    losses = []
    for time in HELD_OUT_TIMES:
        generator = torch.Generator().manual_seed(time)
        losses += [v_loss(model, Batch(*part), torch.full((len(part[0]),), time), generator)
                   for part in zip(*(values.split(4) for values in batch), strict=True)]
    return torch.stack(losses).mean().item()
