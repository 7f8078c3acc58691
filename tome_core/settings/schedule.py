"""Which rule holds at which time and level, and how times are converted.

Rules are limited in timesteps of Stable Diffusion's schedule, a config by a `Window` of the model's own. Three scales,
all of one noise schedule of ``T`` training steps (1,000 for Stable Diffusion):

* timestep ``t``: ``T - 1`` is pure noise, 0 the finished picture; what the UNet is called with;
* percent ``p``: ``t = (1 - p) * (T - 1)``, ComfyUI's scale, whose ``percent_to_sigma(p)`` is that timestep's sigma;
* beta ``beta_t``: the noise that training step ``t`` adds.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from .config import MergeConfig, MergeRule, reaches


def value_at(values: Sequence[float], place: float) -> float:
    """What stands at a place, linear between whole ones; clamped to both ends."""
    place = min(len(values) - 1.0, max(0.0, place))
    below, above = int(place), min(int(place) + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def _place_of(value: float, ascending: Sequence[float]) -> float:
    """The inverse of `value_at`."""
    above = bisect.bisect_left(ascending, value)
    if above in (0, len(ascending)):
        return float(min(above, len(ascending) - 1))
    low, high = ascending[above - 1], ascending[above]
    return above - 1 + (value - low) / (high - low)


@dataclass(frozen=True)
class NoiseSchedule:
    """Betas of all training steps, ascending: what ties timestep, percent and beta together."""

    betas: tuple[float, ...]

    @classmethod
    def stable_diffusion(cls) -> NoiseSchedule:
        """The schedule of SD1, SD2 and SDXL: the square root of beta is linear ("scaled linear")."""
        first, last, steps = 0.00085**0.5, 0.012**0.5, 1000
        return cls(tuple((first + t / (steps - 1) * (last - first)) ** 2 for t in range(steps)))

    @property
    def last(self) -> int:
        """The highest timestep, ``T - 1``."""
        return len(self.betas) - 1

    def percent_of(self, timestep: float) -> float:
        """Share of the schedule that lies behind, 0 at pure noise. Clamped to 0..1."""
        return min(1.0, max(0.0, 1.0 - timestep / self.last))

    def timestep_of(self, percent: float) -> float:
        """The timestep at a share of the schedule; the inverse of `percent_of`."""
        return (1.0 - percent) * self.last

    def timestep_of_beta(self, beta: float) -> float:
        """The first timestep with so much noise, linear between whole ones; the last where none has."""
        return _place_of(beta, self.betas)

    def timestep_of_sigma(self, sigma: float) -> float:
        """The timestep at which the noise has this standard deviation, relative to a picture of unit variance.

        ``sigma_t^2 = 1 / prod(1 - beta) - 1``, linear between whole timesteps in log sigma as in k-diffusion,
        clamped to the schedule's ends.
        """
        return _place_of(math.log(max(sigma, 1e-12)), self._log_sigmas)

    def sigma_of(self, timestep: float) -> float:
        """The noise's standard deviation at a timestep; the inverse of `timestep_of_sigma`."""
        return math.exp(value_at(self._log_sigmas, timestep))

    @cached_property
    def _log_sigmas(self) -> list[float]:
        logs_kept = accumulate(math.log(max(1.0 - beta, 1e-12)) for beta in self.betas)
        return [0.5 * math.log(max(math.expm1(-one), 1e-24)) for one in logs_kept]


class Time(NamedTuple):
    """A moment: percent of the model's own schedule, timestep of Stable Diffusion's; None where it is not known."""

    percent: float | None = None
    timestep: float | None = None


UNKNOWN = Time()


class Window(NamedTuple):
    """The part of a model's own noise schedule in which a config merges: percent, both ends in it."""

    start: float
    end: float

    def holds(self, time: Time) -> bool:
        """Is the moment inside? An unknown one is not."""
        return time.percent is not None and self.start <= time.percent <= self.end


def window_of(config: MergeConfig, schedule: NoiseSchedule) -> Window | None:
    """The window in which a config merges on this schedule; None where it merges at all times."""
    if not config.uses_percent:
        return None
    start = config.start_percent
    if config.max_beta is not None and config.max_beta <= schedule.betas[-1]:
        reached = schedule.percent_of(schedule.timestep_of_beta(config.max_beta))
        start = max(start, math.nextafter(reached, math.inf))  # below it, and not at it
    return Window(start, config.end_percent)


class LevelRules(NamedTuple):
    """The rules in force at one level, one for each part of a block; None where nothing is merged."""

    attn: MergeRule | None = None
    crossattn: MergeRule | None = None
    mlp: MergeRule | None = None


def holds_at(rule: MergeRule, time: Time) -> bool:
    """Is the moment inside the rule's limit? Where it is not known, it is in none."""
    return not rule.uses_time or (time.timestep is not None and time.timestep >= rule.min_timestep)


def choose(rules: Sequence[MergeRule], downsamples: Sequence[int], pixels: int | None = None) -> tuple[LevelRules, ...]:
    """The rules in force: for each level (its down-sampling given) and part, the first of ``rules`` that fits.

    pixels: of the picture; None where it is not known, and then a rule with a smallest picture does not fit.
    A rule of ratio 0 fits too: it keeps its blocks and times unmerged whatever later rules say.
    """
    large = [rule for rule in rules if rule.min_pixels <= (pixels or 0)]

    def first(level: int, downsample: int, part: str) -> MergeRule | None:
        fitting = (rule for rule in large if getattr(rule, f"merge_{part}") and reaches(rule, level, downsample))
        found = next(fitting, None)
        return None if found is None or found.is_off else found

    return tuple(LevelRules(*(first(level, downsample, part) for part in LevelRules._fields))
                 for level, downsample in enumerate(downsamples))  # fmt: skip


def ever_merges(rules: Sequence[MergeRule], level: int, downsample: int) -> bool:
    """Can any rule merge at this level at some time?"""
    return any(not rule.is_off and reaches(rule, level, downsample) for rule in rules)
