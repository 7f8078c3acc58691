"""At which step of which picture a model is, and which rules hold there: asked once a step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..reporting.ledger import TIME_IS_UNKNOWN
from ..settings.config import MergeConfig, MergeRule, plain_rules, reaches
from ..settings.schedule import STABLE_DIFFUSION, UNKNOWN, LevelRules, NoiseSchedule, SchedulerNoise, Time, choose
from .plan_cache import Guidance, KeptPlans, Sampling

# the timestep from which on a pass is a whole picture: schedules with leading spacing begin late (951 for 20 steps), a
# model with zero terminal SNR at 880 where its sigmas begin at Stable Diffusion's 14.6, as Karras' and AYS' do
WHOLE_FROM = 850.0
FEW = 8  # steps up to which half a step weighs too much to be rounded away
_ALL = 1000.0  # timesteps of a schedule


class InForce(NamedTuple):
    """What holds at a moment. rules: by level; live: of any level, in order.

    why_off: by level, why nothing merges.
    """

    rules: tuple[LevelRules, ...]
    live: tuple[MergeRule, ...]
    why_off: tuple[str, ...]


class Clock:
    """Tells the rules in force from the time. schedule: the model's own; where it is not known, Stable Diffusion's."""

    def __init__(self, config: MergeConfig, downsamples: Sequence[int], schedule: NoiseSchedule | None = None) -> None:
        rules = plain_rules(config, downsamples)
        self.rules = tuple(rules)
        self._early = {rule: late for rule, late in rules.items() if late}
        self._early_until = config.early_until
        self.downsamples = tuple(downsamples)
        self.schedule = schedule or STABLE_DIFFUSION
        self._window = self.schedule.window_of(config)
        self.limited = self._window is not None or not all(rule.holds_at(None) for rule in self.rules)
        self._found: dict[tuple, InForce] = {}

    def moment(self, timestep: float | None, percent: float | None = None) -> Time:
        """The time on both scales. timestep: of Stable Diffusion's schedule; percent: of the model's own.

        Whichever is given, the schedules supply the other.
        """
        own = self.schedule
        if timestep is None and percent is None:
            return UNKNOWN
        if timestep is None:
            timestep = STABLE_DIFFUSION.timestep_of_sigma(own.sigma_of(own.timestep_of(percent)))
        if percent is None:
            percent = own.percent_of(own.timestep_of_sigma(STABLE_DIFFUSION.sigma_of(timestep)))
        return Time(timestep, percent)

    def boundary_in(self, timesteps: Sequence[float]) -> float | None:
        """Where the early phase ends in a pass of these steps, for `at`; None where it ends as in a whole picture."""
        return boundary_in(timesteps, self._early_until) if self._early else None

    def at(self, time: Time, boundary: float | None = None) -> InForce:
        """The rules in force at this time; one object for all times at which the same ones hold.

        boundary: of the early phase in this pass.
        """
        start, end = self._window or (0.0, 1.0)
        within = self._window is None or (time.percent is not None and start <= time.percent <= end)
        holds = tuple(self._holds(rule, time, boundary) for rule in self.rules)
        key = (within, holds, time == UNKNOWN)
        if key not in self._found:
            live = tuple(rule for rule, on in zip(self.rules, holds, strict=True) if on) if within else ()
            why_off = tuple(self._why_off(level, live, time) for level in range(len(self.downsamples)))
            self._found[key] = InForce(choose(live, self.downsamples), live, why_off)
        return self._found[key]

    def _holds(self, rule: MergeRule, time: Time, boundary: float | None) -> bool:
        late = self._early.get(rule) if boundary is not None else None
        if late is None:
            return rule.holds_at(time.timestep)
        return time.timestep is not None and time.timestep >= boundary and late.holds_at(time.timestep)

    def _why_off(self, level: int, live: tuple[MergeRule, ...], time: Time) -> str:
        """Why a level is left alone if no rule is in force there."""
        if any(rule.is_off and reaches(rule, level, self.downsamples[level]) for rule in live):
            return "a rule of ratio 0 leaves it alone"
        return "outside the rules' time range" if time != UNKNOWN else TIME_IS_UNKNOWN


def boundary_in(timesteps: Sequence[float], until: float) -> float | None:
    """The timestep at and above which a step of this pass is early; None where the whole picture's holds.

    A mark promises a share of the steps, which a boundary by time does not keep in a pass that begins late (image to
    image, a hires pass) or has few steps. There the pass's own steps have the promised share of late ones, to the
    nearest step; a half goes to the late ones, which change less.

    timesteps: of the pass's steps, in any order. until: the boundary in a whole picture.

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
        late = min(late, len(steps) - 1)  # whatever strength is above 0 merges something
        if len(steps) > FEW or sum(one < until for one in steps) >= late:
            return None
    early = len(steps) - late
    if late == 0 or early == 0:
        return math.inf if early == 0 else 0.0
    return (steps[early - 1] + steps[early]) / 2  # between two, because hosts round a time in more ways than one


class ModelTime:
    """Takes the time from a host, else from the model's own argument, as a pipeline's scheduler means it.

    clock: tells the rules. keeps: a rule keeps its matches over steps. noise: of a pipeline's scheduler, if there is
    one. now: what was in force at the latest call.
    """

    def __init__(self, clock: Clock, keeps: bool) -> None:
        self.clock, self.keeps = clock, keeps
        self.is_wanted = clock.limited or keeps
        self.noise: SchedulerNoise | None = None
        self.now: InForce = clock.at(UNKNOWN)
        self._is_given = False
        self._sampling = Sampling()  # the one that `set` named
        self._timesteps: Sequence[float] | None = None  # of its steps
        self._mine = Samplings()

    @property
    def is_sampling(self) -> bool:
        """Is a picture being made that a host has named, or that this thread has begun?"""
        return bool(self._mine.begun) or self._sampling.name is not None

    def set(
        self, percent: float | None, timestep: float | None, sigma: float | None, sampling: Hashable = None,
        pictures: int | None = None, timesteps: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """Take the time from outside until further notice; all None hands the clock back to the model's argument."""
        self._is_given = not (percent is None and timestep is None and sigma is None)
        if sigma is not None and timestep is None:
            timestep = STABLE_DIFFUSION.timestep_of_sigma(sigma)
        time = self.clock.moment(timestep, percent)
        self._sampling.set(sampling, time.timestep)
        self._sampling.guidance_of = lambda batch: (pictures, 0) if pictures else None
        if timesteps is not self._timesteps:
            self._timesteps, self._sampling.boundary = timesteps, self.clock.boundary_in(timesteps or ())
        self.now = self.clock.at(time, self._sampling.boundary)

    @contextmanager
    def sample(
        self, guidance_of: Callable[[torch.Tensor], Guidance | None] = lambda batch: None,
        timesteps: Sequence[float] | None = None, continues: bool = False,
    ) -> Iterator[None]:  # fmt: skip
        """While in here, this thread's calls are the steps of one picture; matches of one begun before are let go of.

        Args:
            guidance_of: as of `Sampling`.
            timesteps: of all steps; None: a pipeline's are found.
            continues: it goes on with a picture that was begun elsewhere, whose steps belong to a whole one.
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

    def next_call(self, timestep: Any, latent: Any, called: Hashable = None) -> tuple[InForce, KeptPlans | None]:
        """What holds in the call that begins now, and what it may use of earlier calls; None if nothing is kept."""
        if is_captured(latent):  # plans would lie where the next replay writes, and nothing may wait
            return self.now, None
        now, keeps = self.now, self.keeps and not torch.is_grad_enabled()  # a backward pass would meet later plans
        if self.is_wanted and not self._is_given:
            now = self._look_at(timestep)
        sampling = self._sampling if self._is_given else self._mine.latest
        return now, sampling.next_call(latent, called) if keeps and sampling is not None else None

    def forget(self) -> None:
        """Let go of what was kept of pictures."""
        for one in (self._sampling, *self._mine.begun):
            one.set(None, None)
        self._mine = Samplings()

    def _look_at(self, timestep: Any) -> InForce:
        """The rules at the time of this call, from its place in the scheduler's timesteps, or by waiting for it."""
        sampling, step = self._mine.latest, self._look(timestep)
        if step is None and (self.clock.limited or (sampling is not None and self.keeps)):
            step = self._read(timestep)
        if sampling is not None:
            sampling.set("begun", None if step is None else step.timestep)
        if self.clock.limited:
            self.now = self.clock.at(UNKNOWN if step is None else step, sampling and sampling.boundary)
        return self.now

    def _look(self, timestep: Any) -> Time | None:
        """An element of the scheduler's timesteps; the first one in a sampling tells which steps it has."""
        steps = [] if self.noise is None else self.noise.look(timestep)
        if steps:
            self._note_steps(steps)
        return steps[0] if steps else None

    def _note_steps(self, steps: Sequence[Time]) -> None:
        """Of this thread's sampling, from its first call on."""
        sampling = self._mine.latest
        if sampling is not None and not sampling.is_known:
            sampling.boundary, sampling.is_known = self.clock.boundary_in([one.timestep for one in steps]), True

    def _read(self, timestep: Any) -> Time | None:
        """A timestep of the caller's own making, for which a GPU is waited; None if it tells nothing."""
        if torch.is_tensor(timestep):
            is_wrapped = type(timestep) is not torch.Tensor or torch._C._functorch.is_functorch_wrapped_tensor(timestep)
            if timestep.is_meta or is_wrapped:  # by torch.func, vmap or a tracer: without a value
                return None
            values = set(timestep.detach().reshape(-1).tolist())
            timestep = values.pop() if len(values) == 1 else None
        if timestep is None:
            return None
        steps = [] if self.noise is None else self.noise.steps_from(float(timestep))
        if not steps:
            return STABLE_DIFFUSION.time_of(float(timestep))
        self._note_steps(steps)  # a copy of its scheduler's, as offloading may make
        return steps[0]


class Samplings(threading.local):
    """Those that a thread has begun, the latest last: pipelines that share a UNet may run at once."""

    def __init__(self) -> None:
        self.begun: list[Sampling] = []

    @property
    def latest(self) -> Sampling | None:
        """What this thread's calls belong to."""
        return self.begun[-1] if self.begun else None


def is_captured(x: Any) -> bool:
    """Are kernels on this tensor being recorded into a CUDA graph? Nothing may wait for them there, or outlive it."""
    return torch.is_tensor(x) and x.is_cuda and torch.cuda.is_current_stream_capturing()
