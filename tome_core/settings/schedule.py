"""Which rule holds at which time and level, and how times are converted.

Rules are limited in timesteps of Stable Diffusion's schedule, a config in percent of the model's own. Schedulers
count in training steps, in logarithms of sigma, in angles: each of their steps is read as the timestep at which Stable
Diffusion's schedule has the same log-SNR. Three scales, all of one schedule of ``T`` training steps (1,000 for Stable
Diffusion):

* timestep ``t``: ``T - 1`` is pure noise, 0 the finished picture; what the UNet is called with;
* percent ``p``: ``t = (1 - p) * (T - 1)``, ComfyUI's scale, whose ``percent_to_sigma(p)`` is that timestep's sigma;
* beta ``beta_t``: the noise that training step ``t`` adds.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from .config import MergeConfig, MergeRule, reaches

_DIGITS = 1  # of a timestep; float32 schedules are good to a hundredth
_TINY = 1e-12
_LONGEST = 4096  # a longer tensor is no schedule
_MOST = 4  # schedules that are remembered


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


class Time(NamedTuple):
    """A moment: timestep of Stable Diffusion's schedule, percent of the model's own; None where it is not known."""

    timestep: float | None = None
    percent: float | None = None


UNKNOWN = Time()


@dataclass(frozen=True)
class NoiseSchedule:
    """Betas of all training steps, ascending: what ties timestep, percent and beta together."""

    betas: tuple[float, ...]

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
        return _place_of(math.log(max(sigma, _TINY)), self._log_sigmas)

    def sigma_of(self, timestep: float) -> float:
        """The noise's standard deviation at a timestep; the inverse of `timestep_of_sigma`."""
        return math.exp(value_at(self._log_sigmas, timestep))

    @cached_property
    def _log_sigmas(self) -> list[float]:
        logs_kept = accumulate(math.log(max(1.0 - beta, _TINY)) for beta in self.betas)
        return [0.5 * math.log(max(math.expm1(-one), 1e-24)) for one in logs_kept]

    def time_of(self, timestep: float) -> Time:
        """The moment of a timestep of this schedule, where it is Stable Diffusion's."""
        return Time(timestep, self.percent_of(timestep))

    def window_of(self, config: MergeConfig) -> tuple[float, float] | None:
        """From which percent of this schedule to which a config merges, both included; None if at all times."""
        if not config.uses_percent:
            return None
        start = config.start_percent
        if config.max_beta is not None and config.max_beta <= self.betas[-1]:
            reached = self.percent_of(self.timestep_of_beta(config.max_beta))
            start = max(start, math.nextafter(reached, math.inf))  # below it, and not at it
        return start, config.end_percent


# of SD1, SD2 and SDXL: the square root of beta is linear ("scaled linear")
_FIRST, _LAST = 0.00085**0.5, 0.012**0.5
STABLE_DIFFUSION = NoiseSchedule(tuple((_FIRST + t / 999 * (_LAST - _FIRST)) ** 2 for t in range(1000)))


class SchedulerNoise:
    """What the steps of a pipeline's scheduler stand for. The pipeline is asked anew which scheduler it has."""

    def __init__(self, pipeline: Any) -> None:
        self._seen: dict[tuple, tuple[torch.Tensor, list[Time]]] = {}
        self._pipeline = weakref.ref(pipeline)

    def steps_of(self, values: list[float]) -> list[Time]:
        """What the scheduler's own ``values``, all that its ``timesteps`` hold, stand for.

        A scheduler that tells nothing of its noise is taken to count as Stable Diffusion does.
        """
        scheduler = self._scheduler()
        sigmas = _sigmas(scheduler, values)
        if sigmas is None:
            return [STABLE_DIFFUSION.time_of(value) for value in values]
        own = own_schedule(scheduler) or STABLE_DIFFUSION
        return [Time(round(STABLE_DIFFUSION.timestep_of_sigma(sigma), _DIGITS),
                     own.percent_of(round(own.timestep_of_sigma(sigma), _DIGITS))) for sigma in sigmas]  # fmt: skip

    def look(self, timestep: Any) -> list[Time]:
        """The times of the steps from this one on; none if it is no element of a schedule.

        By its place there, without waiting for the device. Pipelines hand around views of their scheduler's timesteps,
        which are brought to the CPU once, and held, so that no other tensor comes to lie where they are.
        """
        if type(timestep) is not torch.Tensor or timestep.is_meta or (timestep.numel() != 1 and any(timestep.stride())):
            return []
        storage = timestep.untyped_storage()
        if not 1 < storage.nbytes() // timestep.element_size() <= _LONGEST:
            return []
        version = None if timestep.is_inference() else timestep._version  # tells whether somebody wrote into it
        key = storage.data_ptr(), timestep.dtype, timestep.device, version
        known = self._seen.get(key)
        if known is None:
            steps = torch.empty(0, dtype=timestep.dtype, device=timestep.device).set_(storage)
            known = steps, self.steps_of(steps.tolist())
            self._seen = {**dict([*self._seen.items()][1 - _MOST :]), key: known}  # another thread may read the old one
        return known[1][timestep.storage_offset() :]

    def steps_from(self, value: float) -> list[Time]:
        """The times of the scheduler's steps from this timestep on, found by its value; none if it has no such step."""
        known = _list(self._scheduler(), "timesteps")
        return self.steps_of(known)[known.index(value) :] if value in known else []

    def _scheduler(self) -> Any:
        return getattr(self._pipeline(), "scheduler", None)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of the UNet has no pipeline


class PipelineSteps(SchedulerNoise):
    """At which step a pipeline is, by its scheduler's own count: a timestep among arguments would be waited for.

    A flow model's timesteps are 1000 times its sigma, and stand for Stable Diffusion's of the same number.
    """

    def now(self) -> torch.Tensor | None:
        """Of the next call, an element of its scheduler's timesteps; None if the scheduler does not count."""
        scheduler = self._scheduler()
        steps = getattr(scheduler, "timesteps", None)
        if not hasattr(scheduler, "step_index") or not torch.is_tensor(steps) or steps.dim() != 1:
            return None
        index = scheduler.step_index
        if index is None:  # before the first step
            index = getattr(scheduler, "begin_index", None) or 0
        return steps[index] if index < len(steps) else None

    def steps_of(self, values: list[float]) -> list[Time]:
        """What the scheduler's ``values``, all that its ``timesteps`` hold, stand for; Mochi's count from noise."""
        counts_from_noise = getattr(self._scheduler(), "config", {}).get("invert_sigmas")
        return [STABLE_DIFFUSION.time_of(1000 - value if counts_from_noise else value) for value in values]


def own_schedule(scheduler: Any) -> NoiseSchedule | None:
    """The one that the model was trained with. Betas of a scheduler without ``alphas_cumprod`` are its steps' own."""
    betas = _list(scheduler, "betas")
    trained = torch.is_tensor(getattr(scheduler, "alphas_cumprod", None))
    return NoiseSchedule(tuple(betas)) if trained and betas else None


def _sigmas(scheduler: Any, values: list[float]) -> list[float] | None:
    """The noise's deviation beside data of unit variance, of each value; None where the scheduler does not tell it."""
    config = getattr(scheduler, "config", {})
    timesteps, sigmas, kept, alphas, betas = (
        _list(scheduler, name) for name in ("timesteps", "sigmas", "alphas_cumprod", "alphas", "betas")
    )
    # by place only in the schedule that the scheduler has now: another pipeline may draw by one of its own
    count = len(timesteps) if values[: len(timesteps)] == timesteps else 0
    if 0 < count <= len(sigmas):
        is_flow = config.get("prediction_type") == "flow_prediction" or config.get("use_flow_sigmas")
        if is_flow or "FlowMatch" in type(scheduler).__name__:  # sigma parts of noise are mixed with 1 - sigma of data
            found = [sigma / max(1 - sigma, _TINY) for sigma in sigmas[:count]]
        else:
            of_data = config.get("sigma_data") or 1.0  # the deviation to which noise of deviation sigma is added
            found = [sigma / of_data for sigma in sigmas[:count]]
    elif kept:  # the share of the picture's variance that is left at each training step
        shares = (value_at(kept, value) for value in values)
        return [math.sqrt((1 - share) / max(share, _TINY)) for share in shares]
    elif 0 < count <= min(len(alphas), len(betas)):  # of the step itself, not of training: IPNDM
        found = [beta / max(alpha, _TINY) for alpha, beta in zip(alphas[:count], betas[:count], strict=True)]
    else:
        return None
    return found + found[-1:] * (len(values) - count)  # its tensor may be the beginning of a longer one


def _list(scheduler: Any, name: str) -> list[float]:
    found = getattr(scheduler, name, None)
    return found.tolist() if torch.is_tensor(found) and found.dim() == 1 else []


class LevelRules(NamedTuple):
    """The rules in force at one level, one for each part of a block; None where nothing is merged."""

    attn: MergeRule | None = None
    crossattn: MergeRule | None = None
    mlp: MergeRule | None = None


def choose(rules: Sequence[MergeRule], downsamples: Sequence[int]) -> tuple[LevelRules, ...]:
    """The rules in force: for each level (its down-sampling given) and part, the first of ``rules`` that fits.

    A rule of ratio 0 fits too: it keeps its blocks and times unmerged whatever later rules say.
    """

    def first(level: int, downsample: int, part: str) -> MergeRule | None:
        fitting = (rule for rule in rules if getattr(rule, f"merge_{part}") and reaches(rule, level, downsample))
        found = next(fitting, None)
        return None if found is None or found.is_off else found

    return tuple(LevelRules(*(first(level, downsample, part) for part in LevelRules._fields))
                 for level, downsample in enumerate(downsamples))  # fmt: skip


def ever_merges(rules: Sequence[MergeRule], level: int, downsample: int) -> bool:
    """Can any rule merge at this level at some time?"""
    return any(not rule.is_off and reaches(rule, level, downsample) for rule in rules)
