"""The rule in force at a time and level, and the conversion of times.

A rule's limits are timesteps of Stable Diffusion's schedule. A config's limits are percent of the model's own schedule.
Schedulers count steps in training steps, logarithms of sigma, or angles; each step is converted to the timestep at
which Stable Diffusion's schedule has the same log-SNR.
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

_DIGITS = 1  # decimals of a timestep; float32 schedules are exact to a hundredth
_TINY = 1e-12
_LONGEST = 4096  # the most elements of a schedule; a longer tensor is none
_MOST = 4  # number of schedules that are remembered


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
        """Return (start, end) of the part of the schedule in which a config merges, 0 for pure noise to 1.

        None if start, end and `max_beta` have their defaults. `max_beta` puts off the start until beta is below it.
        The start may be larger than the end: nothing merges then.
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


class SchedulerNoise:
    """The times of the steps of a pipeline's scheduler, for a timestep that the model was called with.

    A search gives a list of `Time`: that of the step found, then those of all later steps; empty if none is found. Try
    `steps_by_memory` first, which does not wait for a tensor's value, then `steps_from` with the value. The pipeline,
    which is held weakly, may get another scheduler at any time. A pickled or copied object becomes None.
    """

    def __init__(self, pipeline: Any) -> None:
        self._seen: dict[tuple, tuple[torch.Tensor, list[Time]]] = {}
        self._pipeline = weakref.ref(pipeline)

    def steps_of(self, values: list[float]) -> list[Time]:
        """Return a time for each of these timesteps: all of the scheduler's, maybe with more after them, or others.

        A time has the timestep of Stable Diffusion's schedule with equal noise, and the percent of the schedule of
        the model's training. If a scheduler's noise is not known, its timesteps are taken to be Stable Diffusion's.
        """
        scheduler = self._scheduler()
        sigmas = _sigmas(scheduler, values)
        if sigmas is None:
            return [STABLE_DIFFUSION.time_of(value) for value in values]
        schedule = training_schedule(scheduler) or STABLE_DIFFUSION
        return [Time(round(STABLE_DIFFUSION.timestep_of_sigma(sigma), _DIGITS),
                     schedule.percent_of(round(schedule.timestep_of_sigma(sigma), _DIGITS)))
                for sigma in sigmas]  # fmt: skip

    def steps_by_memory(self, timestep: Any) -> list[Time]:
        """Return the times of a step and of all later ones; empty if the argument is no element of a longer tensor.

        `timestep` is the model's argument, of any type; a tensor of more than 4096 elements is no schedule. The step is
        found by its position in memory, because pipelines pass views of their scheduler's timesteps, also expanded over
        the batch. The schedule is copied to the CPU at its first step; later steps do not wait for the device. The
        tensors of the latest four schedules are kept, so that no other tensor gets their addresses.
        """
        if type(timestep) is not torch.Tensor or timestep.is_meta or (timestep.numel() != 1 and any(timestep.stride())):
            return []
        storage = timestep.untyped_storage()
        if not 1 < storage.nbytes() // timestep.element_size() <= _LONGEST:
            return []
        version = None if timestep.is_inference() else timestep._version  # changes when the tensor is written to
        key = storage.data_ptr(), timestep.dtype, timestep.device, version
        known = self._seen.get(key)
        if known is None:
            steps = torch.empty(0, dtype=timestep.dtype, device=timestep.device).set_(storage)
            known = steps, self.steps_of(steps.tolist())
            self._seen = {**dict([*self._seen.items()][1 - _MOST :]), key: known}  # another thread may read the old one
        return known[1][timestep.storage_offset() :]

    def steps_from(self, value: float) -> list[Time]:
        """Return the times of the scheduler's first step with this timestep and of all later ones; empty if none."""
        known = _list(self._scheduler(), "timesteps")
        return self.steps_of(known)[known.index(value) :] if value in known else []

    def _scheduler(self) -> Any:
        """Return the pipeline's scheduler; None if there is no pipeline any more, or no scheduler."""
        return getattr(self._pipeline(), "scheduler", None)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of the UNet has no pipeline


class PipelineSteps(SchedulerNoise):
    """The steps of a pipeline. `now` goes by its scheduler's count: reading a timestep argument would wait for the GPU.

    `now` is the scheduler's own timestep, in a flow model 1000 times sigma. A `Time` takes it as Stable Diffusion's, or
    1000 minus it if the timesteps count up.
    """

    def now(self) -> torch.Tensor | None:
        """Return the timestep of the next call, an element of ``timesteps``: at ``begin_index`` before the first step.

        None if no step is left, or if the scheduler has no ``step_index`` or no 1-D tensor of timesteps.
        """
        scheduler = self._scheduler()
        steps = getattr(scheduler, "timesteps", None)
        if not hasattr(scheduler, "step_index") or not torch.is_tensor(steps) or steps.dim() != 1:
            return None
        index = scheduler.step_index
        if index is None:  # before the first step
            index = getattr(scheduler, "begin_index", None) or 0
        return steps[index] if index < len(steps) else None

    def steps_of(self, values: list[float]) -> list[Time]:
        """Return a time for each of the scheduler's timesteps, 1000 minus each if its config has ``invert_sigmas``.

        Such timesteps, those of Mochi, count upwards from noise.
        """
        counts_from_noise = getattr(self._scheduler(), "config", {}).get("invert_sigmas")
        return [STABLE_DIFFUSION.time_of(1000 - value if counts_from_noise else value) for value in values]


def training_schedule(scheduler: Any) -> NoiseSchedule | None:
    """Return the noise schedule of the model's training, from a diffusers scheduler's betas.

    None if there are none, or if they are of the sampling's steps: the scheduler has no ``alphas_cumprod``.
    """
    betas = _list(scheduler, "betas")
    # without alphas_cumprod, betas are those of the sampling's steps
    trained = torch.is_tensor(getattr(scheduler, "alphas_cumprod", None))
    return NoiseSchedule(tuple(betas)) if trained and betas else None


def _sigmas(scheduler: Any, values: list[float]) -> list[float] | None:
    """Return the noise's standard deviation at these timesteps, relative to data of unit variance.

    The scheduler's ``sigmas``, flow models' converted, give it if the values begin with the scheduler's ``timesteps``;
    values after those get the last sigma. Else ``alphas_cumprod`` give it; the result is None without these.
    """
    config = getattr(scheduler, "config", {})
    timesteps, sigmas, alphas_cumprod = (_list(scheduler, name) for name in ("timesteps", "sigmas", "alphas_cumprod"))
    # by index only if the values are the scheduler's current schedule: another pipeline may use another schedule
    count = len(timesteps) if values[: len(timesteps)] == timesteps else 0
    if 0 < count <= len(sigmas):
        if config.get("prediction_type") == "flow_prediction" or config.get("use_flow_sigmas"):
            # x = sigma * noise + (1 - sigma) * data
            result = [sigma / max(1 - sigma, _TINY) for sigma in sigmas[:count]]
        else:
            sigma_data = config.get("sigma_data") or 1.0  # the data's standard deviation
            result = [sigma / sigma_data for sigma in sigmas[:count]]
        return result + result[-1:] * (len(values) - count)  # the schedule may be the beginning of a longer tensor
    # the share of the picture's variance that is left at each training step
    shares = (value_at(alphas_cumprod, value) for value in values)
    return [math.sqrt((1 - share) / max(share, _TINY)) for share in shares] if alphas_cumprod else None


def _list(scheduler: Any, name: str) -> list[float]:
    """Return an attribute of the scheduler, a one-dimensional tensor, as a list; empty if it is no such tensor."""
    values = getattr(scheduler, name, None)
    return values.tolist() if torch.is_tensor(values) and values.dim() == 1 else []


class LevelRules(NamedTuple):
    """The rules that apply at one time and level of the model, by part of a block; None for a part without a rule."""

    attn: MergeRule | None = None
    crossattn: MergeRule | None = None
    mlp: MergeRule | None = None
    block: MergeRule | None = None  # whole blocks


def choose(rules: Sequence[MergeRule], downsamples: Sequence[int]) -> tuple[LevelRules, ...]:
    """Return for each level of the model the first rule that fits each part of a block.

    `rules` are those that hold at one time, in order. A rule that is off fits as well: it gives None, and later rules
    do not apply to its blocks. `downsamples` is latent cells per token, along a side, of each level, the finest first.
    """

    def first(level: int, downsample: int, part: str) -> MergeRule | None:
        setting = "merge_blocks" if part == "block" else f"merge_{part}"
        fitting = (rule for rule in rules if getattr(rule, setting) and reaches(rule, level, downsample))
        rule = next(fitting, None)
        return None if rule is None or rule.is_off else rule

    return tuple(LevelRules(*(first(level, downsample, part) for part in LevelRules._fields))
                 for level, downsample in enumerate(downsamples))  # fmt: skip


def ever_merges(rules: Sequence[MergeRule], level: int, downsample: int) -> bool:
    """Tell whether any rule that is on `reaches` a level, 0 for the finest, of `downsample` cells per token's side."""
    return any(not rule.is_off and reaches(rule, level, downsample) for rule in rules)


def ways_of(rules: Sequence[MergeRule], level: int, downsample: int) -> set[str]:
    """Return how rules that are on merge blocks of a level that they reach; empty if they merge keys and values alone.

    "tomesd": parts of blocks may be called with merged tokens, as by tomesd; "blocks": whole blocks may be. `level` and
    `downsample` are those of `ever_merges`.
    """
    ways: set[str] = set()
    for rule in rules:
        if not rule.is_off and reaches(rule, level, downsample):
            as_tomesd = rule.merge_crossattn or rule.merge_mlp or (rule.merge_attn and rule.is_as_tomesd)
            ways |= {"tomesd"} if as_tomesd else {"blocks"} if rule.merge_blocks else set()
    return ways
