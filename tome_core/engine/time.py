"""The time of a model's call, and the rules in force at this time."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..reporting.ledger import NOT_BETWEEN, NOT_NOW, RATIO_IS_0, TIME_IS_UNKNOWN
from ..settings.config import MergeConfig, MergeRule
from ..settings.rules import LevelRules, choose, plain_rules, reaches
from ..settings.schedule import STABLE_DIFFUSION, UNKNOWN, NoiseSchedule, Time
from .plan_cache import KeptPlans
from .sampling import Guidance, Sampling, Samplings
from .scheduler_steps import SchedulerNoise

# A sampling whose first timestep is this or higher makes a whole picture. Schedules with leading spacing begin late
# (951 for 20 steps). A model with zero terminal SNR begins at 880 if its sigmas begin at Stable Diffusion's 14.6
# (Karras, AYS).
WHOLE_FROM = 850.0
FEW = 8  # up to this number of steps, half a step is too large a share to be rounded away
_ALL = 1000.0  # the number of timesteps of Stable Diffusion's schedule


class ActiveRules(NamedTuple):
    """The rules in force at one time."""

    rules: tuple[LevelRules, ...]  # of each level, the finest first
    live: tuple[MergeRule, ...]  # all rules in force, in the order of the settings
    why_off: tuple[str, ...]  # the reason for each level; read only for a level without a rule in `rules`


class Clock:
    """The rules in force as a function of time; `limited` is True if they depend on it.

    `downsamples` is latent cells per token, along a side, of each level, the finest first; `schedule` is the model's,
    None for Stable Diffusion's. Attribute `rules` has the settings' rules with those of early phases, see
    `rules.plain_rules`.
    """

    def __init__(self, config: MergeConfig, downsamples: Sequence[int], schedule: NoiseSchedule | None = None) -> None:
        rules = plain_rules(config, downsamples)
        self.rules = tuple(rules)
        self._early = {rule: late for rule, late in rules.items() if late}
        self._early_until = config.early_until
        self.downsamples = tuple(downsamples)
        self.schedule = schedule or STABLE_DIFFUSION
        self._window = self.schedule.window_of(config)
        self.limited = self._window is not None or not all(rule.holds_at(None) for rule in self.rules)
        self._found: dict[tuple, ActiveRules] = {}

    def moment(self, timestep: float | None, percent: float | None = None) -> Time:
        """Return the time on both scales of `Time`. A scale that is None is computed; `UNKNOWN` if both are.

        The timestep is Stable Diffusion's at the same noise; the percent is of this clock's schedule.
        """
        schedule = self.schedule
        if timestep is None and percent is None:
            return UNKNOWN
        if timestep is None:
            timestep = STABLE_DIFFUSION.timestep_of_sigma(schedule.sigma_of(schedule.timestep_of(percent)))
        if percent is None:
            percent = schedule.percent_of(schedule.timestep_of_sigma(STABLE_DIFFUSION.sigma_of(timestep)))
        return Time(timestep, percent)

    def boundary_in(self, timesteps: Sequence[float]) -> float | None:
        """Return function `boundary_in` of a sampling's timesteps; None also if no rule has an early phase."""
        return boundary_in(timesteps, self._early_until) if self._early else None

    def at(self, time: Time, boundary: float | None = None) -> ActiveRules:
        """Return the rules in force at a time: the same object for all known times at which the same limits hold.

        At `UNKNOWN`, only rules without any limit on the time are in force, none if the config has limits in percent.
        `boundary` is the timestep at which the early phase of this sampling ends; None: as the rules say.
        """
        start, end = self._window or (0.0, 1.0)
        within = self._window is None or (time.percent is not None and start <= time.percent <= end)
        holds = tuple(self._holds(rule, time, boundary) for rule in self.rules)
        key = (within, holds, time == UNKNOWN)
        if key not in self._found:
            live = tuple(rule for rule, on in zip(self.rules, holds, strict=True) if on) if within else ()
            why_off = tuple(self._why_off(level, live, time, within) for level in range(len(self.downsamples)))
            self._found[key] = ActiveRules(choose(live, self.downsamples), live, why_off)
        return self._found[key]

    def _holds(self, rule: MergeRule, time: Time, boundary: float | None) -> bool:
        """Tell whether a rule holds, apart from limits in percent; an early phase's holds from `boundary` up."""
        late = self._early.get(rule) if boundary is not None else None
        if late is None:
            return rule.holds_at(time.timestep)
        return time.timestep is not None and time.timestep >= boundary and late.holds_at(time.timestep)

    def _why_off(self, level: int, live: tuple[MergeRule, ...], time: Time, within: bool) -> str:
        """Return the reason to report if a level does not merge, whether it does or not; `within`: start and end."""
        if any(rule.is_off and reaches(rule, level, self.downsamples[level]) for rule in live):
            return RATIO_IS_0
        if time == UNKNOWN:
            return TIME_IS_UNKNOWN
        return NOT_NOW if within else NOT_BETWEEN


def boundary_in(timesteps: Sequence[float], until: float) -> float | None:
    """Return the timestep at and above which a step is early; None if `until`, the timestep of whole pictures, holds.

    A preset is made for a certain share of early steps. A fixed timestep does not keep this share in a sampling that
    begins late (image to image, hires fix) or has few steps. There the share is kept to the nearest step, and half a
    step counts as late, because late steps change the picture less. The boundary is infinity if no step is early, 0 if
    all are. None if there are no steps, or if they begin at `WHOLE_FROM` or higher and are more than `FEW` or if at
    least as many are below `until` as the share, ``until / 1000``, makes late (never all).

    >>> boundary_in([500, 400, 300, 200, 100], 375), boundary_in([999, 749, 499, 249], 375)
    (250.0, 624.0)
    >>> boundary_in([999, 666, 333], 375) is None
    True
    """
    steps = sorted(timesteps, reverse=True)
    if not steps:
        return None
    late = math.floor(len(steps) * until / _ALL + 0.5)
    if steps[0] >= WHOLE_FROM:
        late = min(late, len(steps) - 1)  # every strength above 0 merges in at least one step
        if len(steps) > FEW or sum(step < until for step in steps) >= late:
            return None
    early = len(steps) - late
    if late == 0 or early == 0:
        return math.inf if early == 0 else 0.0
    return (steps[early - 1] + steps[early]) / 2  # between two steps, because hosts round timesteps differently


class ModelTime:
    """The time of a model's calls, set by a host or read from the timestep argument, and what follows from the time.

    `next_call` gives a call the rules in force, and the plans that its sampling keeps. A host names a sampling by
    `set`; `sample` begins one of this thread. `keeps`: some rule keeps its matches over steps.
    """

    def __init__(self, clock: Clock, keeps: bool) -> None:
        self.clock, self.keeps = clock, keeps  # whether some rule keeps its matches over steps
        self.is_wanted = clock.limited or keeps
        self.scheduler_steps: SchedulerNoise | None = None  # of the pipeline; the patch sets it
        self.now: ActiveRules = clock.at(UNKNOWN)  # at the latest call, or at the time set since
        self._is_given = False
        self._sampling = Sampling()  # the sampling that `set` named
        self.timesteps: Sequence[float] | None = None  # of this sampling's steps
        self._mine = Samplings()

    def serves_several(self, keep: float) -> bool:
        """Tell whether a match that is kept for so many timesteps serves more than one step of this sampling.

        If the steps are not known, as in a loop of the caller's own, it is thought to.
        """
        steps = self.timesteps or ()
        return len(steps) < 2 or abs(steps[0] - steps[-1]) <= keep * (len(steps) - 1)

    @property
    def is_sampling(self) -> bool:
        """True during a sampling that a host has named or that this thread has begun."""
        return bool(self._mine.begun) or self._sampling.name is not None

    def set(
        self, percent: float | None, timestep: float | None, sigma: float | None, sampling: Hashable = None,
        pictures: int | None = None, timesteps: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """Set the time of the next calls, see `State.set_time`; calls read their own if the first three are None."""
        self._is_given = not (percent is None and timestep is None and sigma is None)
        if sigma is not None and timestep is None:
            timestep = STABLE_DIFFUSION.timestep_of_sigma(sigma)
        time = self.clock.moment(timestep, percent)
        self._sampling.set(sampling, time.timestep)
        self._sampling.guidance_of = lambda batch: (pictures, 0) if pictures else None
        if timesteps is not self.timesteps:
            self.timesteps, self._sampling.boundary = timesteps, self.clock.boundary_in(timesteps or ())
        self.now = self.clock.at(time, self._sampling.boundary)

    @contextmanager
    def sample(
        self, guidance_of: Callable[[torch.Tensor], Guidance | None] = lambda batch: None,
        timesteps: Sequence[float] | None = None, continues: bool = False,
    ) -> Iterator[None]:  # fmt: skip
        """Make this thread's calls the steps of one picture inside the ``with``; drop its kept plans at the end.

        Samplings around it in this thread lose theirs at once. For `guidance_of` see `Sampling`. `timesteps`, those of
        all steps, set the end of the early phase; None: they are read from the pipeline's scheduler at the first call,
        or, if `continues`, because another sampling has begun the picture, the phase ends as in a whole picture.
        """
        sampling = Sampling(guidance_of, self.clock.boundary_in(timesteps or ()), continues or timesteps is not None)
        samplings = self._mine.begun
        for outer in samplings:
            outer.set(None, None)
        samplings.append(sampling)
        try:
            yield
        finally:
            samplings.remove(sampling)
            sampling.set(None, None)

    def next_call(self, timestep: Any, latent: Any, called: Hashable = None) -> tuple[ActiveRules, KeptPlans | None]:
        """Return the rules in force in a call of this thread that begins now, and the kept plans for it, or None.

        `timestep`, the model's argument, is read only if it is needed and no time was set. `latent` is ``[B, C, ...]``;
        `called` is the host's name for the call, or None. The plans are the named sampling's if a time was set, else
        those of this thread's latest sampling.
        """
        if is_captured(latent):  # the next replay would overwrite kept plans, and a capture must not wait
            return self.now, None
        now, keeps = self.now, self.keeps and not torch.is_grad_enabled()  # a backward pass would use later plans
        if self.is_wanted and not self._is_given:
            now = self._look_at(timestep)
        sampling = self._sampling if self._is_given else self._mine.latest
        return now, sampling.next_call(latent, called) if keeps and sampling is not None else None

    def forget(self) -> None:
        """End all samplings, of this and all threads: from now on no plan that they have kept is used."""
        for sampling in (self._sampling, *self._mine.begun):
            sampling.set(None, None)
        self._mine = Samplings()

    def _look_at(self, timestep: Any) -> ActiveRules:
        """Set `now` to the rules in force at a timestep argument, which is read only if needed, and return them."""
        sampling, steps = self._mine.latest, self.scheduler_steps
        step = None if steps is None else self._first_of(steps.steps_by_memory(timestep))
        if step is None and (self.clock.limited or (sampling is not None and self.keeps)):
            step = self._read(timestep)
        if sampling is not None:
            sampling.set("begun", None if step is None else step.timestep)
        if self.clock.limited:
            self.now = self.clock.at(UNKNOWN if step is None else step, sampling and sampling.boundary)
        return self.now

    def _first_of(self, steps: Sequence[Time]) -> Time | None:
        """Return the first of the remaining steps, or None. Once in a sampling they set its early phase's end."""
        sampling = self._mine.latest
        if steps and sampling is not None and not sampling.is_known:
            sampling.boundary, sampling.is_known = self.clock.boundary_in([step.timestep for step in steps]), True
        return steps[0] if steps else None

    def _read(self, timestep: Any) -> Time | None:
        """Return the time by the argument's value, which waits for a GPU; None without one value for the batch."""
        if torch.is_tensor(timestep):
            is_wrapped = type(timestep) is not torch.Tensor or torch._C._functorch.is_functorch_wrapped_tensor(timestep)
            if timestep.is_meta or is_wrapped:  # by torch.func, vmap or a tracer: it has no value
                return None
            values = set(timestep.detach().reshape(-1).tolist())
            timestep = values.pop() if len(values) == 1 else None
        if timestep is None:
            return None
        # also for a copy of the scheduler's timestep, which offloading may make
        steps = [] if self.scheduler_steps is None else self.scheduler_steps.steps_from(float(timestep))
        return self._first_of(steps) or STABLE_DIFFUSION.time_of(float(timestep))


def is_captured(x: Any) -> bool:
    """Tell whether `x` is on CUDA and a graph is captured on its stream: nothing may wait then, or be kept."""
    return torch.is_tensor(x) and x.is_cuda and torch.cuda.is_current_stream_capturing()
