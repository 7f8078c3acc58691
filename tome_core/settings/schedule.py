"""Noise schedules, and the conversion of times.

A rule's limits are timesteps of Stable Diffusion's schedule. A config's limits are percent of the model's own schedule.
Schedulers count steps in training steps, logarithms of sigma, or angles; each step is converted to the timestep at
which Stable Diffusion's schedule has the same log-SNR.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from .config import MergeConfig

_TINY = 1e-12


def value_at(values: Sequence[float], place: float) -> float:
    """Return the value of a list at a fractional index, interpolated linearly and clamped to both ends."""
    place = min(len(values) - 1.0, max(0.0, place))
    below, above = int(place), min(int(place) + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def _place_of(value: float, ascending: Sequence[float]) -> float:
    """Return the fractional index of a value in an ascending list, clamped to both ends: the inverse of `value_at`."""
    above = bisect.bisect_left(ascending, value)
    if above in (0, len(ascending)):
        return float(min(above, len(ascending) - 1))
    low, high = ascending[above - 1], ascending[above]
    return above - 1 + (value - low) / (high - low)


class Time(NamedTuple):
    """A time in the sampling of a picture."""

    timestep: float | None = None  # on Stable Diffusion's schedule, where 999 is pure noise; None if not known
    percent: float | None = None  # the share of the model's own schedule that is done, from 0 to 1; None if not known


UNKNOWN = Time()


@dataclass(frozen=True)
class NoiseSchedule:
    """A noise schedule, which converts between timestep, percent, beta and sigma.

    Timestep ``t`` is the UNet's argument, from ``T - 1`` (pure noise) to 0. Percent ``p`` is the share that is done:
    ``t = (1 - p) * (T - 1)``, as in ComfyUI's ``percent_to_sigma``. Beta is the noise that training step ``t`` adds.

    Args:
        betas: the beta of each of ``T`` training steps, ascending.
    """

    betas: tuple[float, ...]

    @property
    def last(self) -> int:
        """The highest timestep, ``T - 1``."""
        return len(self.betas) - 1

    def percent_of(self, timestep: float) -> float:
        """Return the share of the schedule that is done at a timestep: ``1 - timestep / last``, clamped to 0..1."""
        return min(1.0, max(0.0, 1.0 - timestep / self.last))

    def timestep_of(self, percent: float) -> float:
        """Return the timestep at a share of the schedule from 0 to 1, the inverse of `percent_of`."""
        return (1.0 - percent) * self.last

    def timestep_of_beta(self, beta: float) -> float:
        """Return the first timestep with this beta, interpolated linearly and clamped to the schedule's ends."""
        return _place_of(beta, self.betas)

    def timestep_of_sigma(self, sigma: float) -> float:
        """Return the timestep of a noise's standard deviation, relative to data of unit variance, clamped to the ends.

        It is interpolated linearly in log sigma as in k-diffusion; ``sigma_t^2 = 1 / prod(1 - beta) - 1``.
        """
        return _place_of(math.log(max(sigma, _TINY)), self._log_sigmas)

    def sigma_of(self, timestep: float) -> float:
        """Return the noise's deviation at a timestep, for data of unit variance: `timestep_of_sigma` inverted."""
        return math.exp(value_at(self._log_sigmas, timestep))

    @cached_property
    def _log_sigmas(self) -> list[float]:
        """The logarithm of sigma at each timestep, from 0 to `last`."""
        log_alphas = accumulate(math.log(max(1.0 - beta, _TINY)) for beta in self.betas)
        return [0.5 * math.log(max(math.expm1(-log_alpha), 1e-24)) for log_alpha in log_alphas]

    def time_of(self, timestep: float) -> Time:
        """Return a timestep and its percent as a `Time`. This schedule has to be Stable Diffusion's."""
        return Time(timestep, self.percent_of(timestep))

    def window_of(self, config: MergeConfig) -> tuple[float, float] | None:
        """Return (start, end) of the part of the schedule, from pure noise, 0, in which a config merges; None for all.

        `max_beta` puts off the start until beta is below it. If the start is larger than the end, nothing merges.
        """
        if not config.uses_percent:
            return None
        start = config.start_percent
        if config.max_beta is not None and config.max_beta <= self.betas[-1]:
            reached = self.percent_of(self.timestep_of_beta(config.max_beta))
            start = max(start, math.nextafter(reached, math.inf))  # below max_beta, and not at it
        return start, config.end_percent


# The schedule of SD1, SD2 and SDXL is "scaled linear": the square root of beta is linear.
_FIRST, _LAST = 0.00085**0.5, 0.012**0.5
STABLE_DIFFUSION = NoiseSchedule(tuple((_FIRST + t / 999 * (_LAST - _FIRST)) ** 2 for t in range(1000)))
