"""Which rule holds at which time and level, and how times are converted.

Rules are limited in timesteps of Stable Diffusion's schedule, a config by a `Window` of the model's own. Three scales,
all of one noise schedule of ``T`` training steps (1,000 for Stable Diffusion):

* timestep ``t``: ``T - 1`` is pure noise, 0 the finished picture; what the UNet is called with;
* percent ``p``: ``t = (1 - p) * (T - 1)``. ComfyUI's ``percent_to_sigma(p)`` is the sigma of that timestep,
  so ranges given in per cent mean the same there;
* beta ``beta_t``: the noise that training step ``t`` adds. For Stable Diffusion ("scaled linear")
  ``sqrt(beta_t) = sqrt(0.00085) + t / (T - 1) * (sqrt(0.012) - sqrt(0.00085))``.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .config import MergeConfig
from .rule import MergeRule

_PARTS = ("merge_attn", "merge_crossattn", "merge_mlp")


@dataclass(frozen=True)
class NoiseSchedule:
    """Betas of all training steps, ascending: what ties timestep, percent and beta together."""

    betas: tuple[float, ...]

    @classmethod
    def stable_diffusion(cls) -> NoiseSchedule:
        """The schedule of SD1, SD2 and SDXL."""
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
        """The first timestep with so much noise, linear between whole ones; infinite where none has."""
        above = bisect.bisect_left(self.betas, beta)
        if above == 0 or above > self.last:
            return math.inf if above else 0.0
        low, high = self.betas[above - 1], self.betas[above]
        return above - (high - beta) / (high - low)

    def timestep_of_sigma(self, sigma: float) -> float:
        """The timestep at which the noise has this standard deviation, relative to a picture of unit variance.

        ``sigma_t^2 = 1 / prod(1 - beta) - 1``, linear between whole timesteps in log sigma as in k-diffusion,
        clamped to the schedule's ends.
        """
        logs = self._log_sigmas
        wanted = math.log(max(sigma, 1e-12))
        above = bisect.bisect_left(logs, wanted)
        if above == 0 or above == len(logs):
            return float(min(above, self.last))
        low, high = logs[above - 1], logs[above]
        return above - 1 + (wanted - low) / (high - low)

    def sigma_of(self, timestep: float) -> float:
        """The noise's standard deviation at a timestep; the inverse of `timestep_of_sigma`."""
        logs = self._log_sigmas
        t = min(float(self.last), max(0.0, timestep))
        below, above = int(t), min(int(t) + 1, self.last)
        return math.exp(logs[below] + (t - below) * (logs[above] - logs[below]))

    @cached_property
    def _log_sigmas(self) -> list[float]:
        log_kept, logs = 0.0, []
        for beta in self.betas:
            log_kept += math.log(max(1.0 - beta, 1e-12))
            logs.append(0.5 * math.log(max(math.expm1(-log_kept), 1e-24)))
        return logs


class Time(NamedTuple):
    """A moment: percent of the model's own schedule, timestep of Stable Diffusion's; None where it is not known."""

    percent: float | None = None
    timestep: float | None = None


UNKNOWN = Time()


class Window(NamedTuple):
    """The part of a model's own noise schedule in which a config merges: percent, both ends in it, and past `after`."""

    start: float = 0.0
    end: float = 1.0
    after: float = -1.0

    def holds(self, time: Time) -> bool:
        """Is the moment inside? Where it is not known, it is not."""
        return time.percent is not None and self.start <= time.percent <= self.end and time.percent > self.after


def window_of(config: MergeConfig, schedule: NoiseSchedule) -> Window | None:
    """The window in which a config merges on this schedule; None where it merges at all times."""
    if not config.uses_percent:
        return None
    window = Window(config.start_percent, config.end_percent)
    reached = math.inf if config.max_beta is None else schedule.timestep_of_beta(config.max_beta)
    return window if reached == math.inf else window._replace(after=schedule.percent_of(reached))


class LevelRules(NamedTuple):
    """The rules in force at one level, one for each part of a block; None where nothing is merged."""

    attn: MergeRule | None = None
    crossattn: MergeRule | None = None
    mlp: MergeRule | None = None


def holds_at(rule: MergeRule, time: Time) -> bool:
    """Is the moment inside the rule's limit? Where it is not known, it is in none."""
    return not rule.uses_time or (time.timestep is not None and time.timestep >= rule.min_timestep)


def reaches(rule: MergeRule, level: int, downsample: int) -> bool:
    """Does the rule cover blocks of this level, down-sampled this much from the latent?"""
    return level == 0 if rule.max_downsample is None else downsample <= rule.max_downsample


def choose(rules: Sequence[MergeRule], downsamples: Sequence[int], pixels: int | None = None) -> tuple[LevelRules, ...]:
    """The rules in force: for each level (its down-sampling given) and part, the first of ``rules`` that fits.

    pixels: of the picture; None where it is not known, and then a rule with a smallest picture does not fit.
    A rule of ratio 0 fits too: it keeps its blocks and times unmerged whatever later rules say.
    """
    large = [rule for rule in rules if rule.min_pixels <= (pixels or 0)]
    return tuple(LevelRules(*(_first(large, level, down, part) for part in _PARTS))
                 for level, down in enumerate(downsamples))  # fmt: skip


def _first(rules: Sequence[MergeRule], level: int, downsample: int, part: str) -> MergeRule | None:
    found = next((rule for rule in rules if getattr(rule, part) and reaches(rule, level, downsample)), None)
    return None if found is None or found.is_off else found


def ever_merges(rules: Sequence[MergeRule], level: int, downsample: int) -> bool:
    """Can any rule merge at this level at some time?"""
    return any(not rule.is_off and reaches(rule, level, downsample) for rule in rules)
