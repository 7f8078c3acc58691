"""What a speed run measures: its cases, the rows of each, how long they may take, and how a case makes a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from diffusers import EulerDiscreteScheduler
from torch import nn

from benchmarks.speed_models import Shape, make_inputs

SUITES = {
    "calls": "one call of the UNet at each size, batch 2",
    "pictures": "whole pictures: guided steps and the decoder",
    "hires": "512 px, then 2048 px from the enlarged latent; only the second pass is patched",
    "seeds": "one call for 1 to 10 pictures at 512, 768 and 1024 px, fused and naive attention",
}
CALL, PICTURES = "call", ("picture", "hires")  # what a case may be
PICTURE_SIZES = (512, 1024)
HIRES = (512, 2048)
SEED_PICTURES, SEED_SIZES = (1, 2, 4, 8, 10), (512, 768, 1024)
COSTS = "costs"
_COSTS_CALLS = {"cpu": 2, "cuda": 4}  # of each variant, for the row of costs
_COMPILE_SECONDS = {"cpu": 120.0, "cuda": 60.0}  # of one variant at one size
_NAIVE_FACTOR = 3.0
_TRUST_SECONDS = 30.0
_LEAST_SECONDS = {"cpu": 0.02, "cuda": 0.1}  # a GPU's quick calls are repeated within a round for this long
_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
_GUIDANCE = 7.5
_LATENT_SCALE = 0.18215


@dataclass(frozen=True)
class UNetCase:
    """One thing whose time is compared over the variants.

    what: ``call``, ``picture`` or ``hires``. batch: of the UNet, two for each picture (with and without prompt).
    steps: solver steps of a picture, of its second pass where there are two.
    """

    model: str
    what: str
    pixels: int
    batch: int = 2
    attention: str = "sdpa"
    compiled: bool = False
    steps: int = 1

    @property
    def key(self) -> str:
        """Its name, which is unique in a plan."""
        how = "compiled" if self.compiled else "eager"
        steps = "" if self.what == CALL else f" {self.steps} steps"
        return f"{self.model} {self.what} {self.pixels} px batch {self.batch} {self.attention} {how}{steps}"

    @property
    def is_plain(self) -> bool:
        """Whether it is one picture with fused attention, and not there to be compared with that."""
        return (self.batch, self.attention) == (2, "sdpa")


def cases(
    suites: Sequence[str], models: Sequence[str], sizes: Sequence[int], steps: int, compiled: bool
) -> list[UNetCase]:
    """All cases, the most telling first, because a run may end early. compiled: each one compiled as well.

    Pictures are made at the usual ones of the sizes, or at all of them where none is.
    """
    found: list[UNetCase] = []
    for model in models:
        if "calls" in suites:
            found += [UNetCase(model, CALL, pixels) for pixels in sizes]
        if "pictures" in suites:
            usual = [pixels for pixels in sizes if pixels in PICTURE_SIZES]
            found += [UNetCase(model, "picture", pixels, steps=steps) for pixels in usual or sizes]
        if "hires" in suites and model == "sd15":
            found.append(UNetCase(model, "hires", HIRES[1], steps=steps))
    if "seeds" in suites:
        found += [UNetCase(models[0], CALL, pixels, 2 * pictures, attention) for attention in ("sdpa", "naive")
                  for pixels in SEED_SIZES for pictures in SEED_PICTURES]  # fmt: skip
    # naive attention is there to be compared with, not to be compiled
    return [one for case in dict.fromkeys(found) for one in (case, replace(case, compiled=True))
            if not one.compiled or (compiled and case.attention == "sdpa")]  # fmt: skip


def row_keys(all_cases: Sequence[UNetCase], rounds: int) -> dict[str, tuple[UNetCase, str]]:
    """Row key -> (case, what the row holds: ``costs`` or the number of a round), in the run's order.

    What takes many calls averages over them, and gets a third of the rounds; what only fills the seeds' rows, half.
    """
    found = {}
    for case in all_cases:
        share = 3 if case.what != CALL else 1 if case.is_plain else 2
        parts = [COSTS, *(str(number) for number in range(1, -(-rounds // share) + 1))]
        found |= {f"{case.key} #{part}": (case, part) for part in parts}
    return found


def passes(case: UNetCase) -> list[tuple[int, int]]:
    """(pixels, steps) of each pass over a picture. The second pass of a hires fix does half of the steps again."""
    if case.what == "hires":
        return [(HIRES[0], case.steps), (case.pixels, max(1, case.steps // 2))]
    return [(case.pixels, case.steps)]


class Estimate:
    """Seconds that a row will take; corrected by what the rows so far have taken."""

    def __init__(self, shapes: dict[str, Shape], variants: Callable[[UNetCase], int], device: str, rate: float) -> None:
        """variants: how many a case compares. rate: operations per second that the device reaches in a UNet."""
        self._shapes, self._variants, self._device, self._rate = shapes, variants, device, rate
        self._guessed = self._spent = 0.0

    def guess(self, case: UNetCase, part: str) -> float:
        """Before anything is known of this machine but its rate."""
        shape = self._shapes[case.model]
        # of the case's UNet calls; the decoder's are left out
        operations = case.batch * sum(steps * shape.operations(pixels) for pixels, steps in passes(case))
        once = operations / self._rate * (_NAIVE_FACTOR if case.attention == "naive" else 1)
        calls = _COSTS_CALLS[self._device] if part == COSTS else 1
        compiling = _COMPILE_SECONDS[self._device] if case.compiled and part == COSTS else 0.0
        return self._variants(case) * (calls * max(once, _LEAST_SECONDS[self._device]) + compiling)

    def seconds(self, case: UNetCase, part: str) -> float:
        """The guess, in proportion to how the guesses so far turned out.

        The first half minute counts as guessed well: what is short there is mostly the start of things.
        """
        return self.guess(case, part) * (self._spent + _TRUST_SECONDS) / (self._guessed + _TRUST_SECONDS)

    def learn(self, case: UNetCase, part: str, spent: float) -> None:
        """Take note of a row that was measured."""
        self._guessed += self.guess(case, part)
        self._spent += spent


def picture_run(
    case: UNetCase, shape: Shape, unpatched: nn.Module, unet: nn.Module, decoder: nn.Module
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
