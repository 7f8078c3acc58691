"""Which rules are in force at a moment: asked once a step."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..reporting.ledger import TIME_IS_UNKNOWN
from ..settings.config import MergeConfig
from ..settings.noise import STABLE_DIFFUSION
from ..settings.phases import early_rules, plain_rules
from ..settings.rule import MergeRule
from ..settings.schedule import UNKNOWN, LevelRules, NoiseSchedule, Time, choose, holds_at, reaches, window_of

# the timestep from which on a pass is a whole picture: schedules with leading spacing begin late (951 for 20 steps), a
# model with zero terminal SNR at 880 where its sigmas begin at Stable Diffusion's 14.6, as Karras' and AYS' do
WHOLE_FROM = 850.0
FEW = 8  # steps up to which half a step weighs too much to be rounded away
_ALL = 1000.0  # timesteps of a schedule


class InForce(NamedTuple):
    """What holds at a moment. rules: by level, for a picture of unknown size; live: of any level and size, in order.

    why_off: by level, why nothing merges. phase: "early" or "late"; "" of rules without one, or at an unknown time.
    """

    rules: tuple[LevelRules, ...]
    live: tuple[MergeRule, ...]
    why_off: tuple[str, ...]
    phase: str


class Clock:
    """Tells the rules in force from the time. schedule: the model's own; where it is not known, Stable Diffusion's."""

    def __init__(self, config: MergeConfig, downsamples: Sequence[int], schedule: NoiseSchedule | None = None) -> None:
        self.rules = plain_rules(config, downsamples)
        self._early = early_rules(config, downsamples)
        self._early_until = config.early_until
        self.downsamples = tuple(downsamples)
        self.schedule = schedule or STABLE_DIFFUSION
        self._window = window_of(config, self.schedule)
        self.limited = self._window is not None or any(rule.uses_time for rule in self.rules)
        self._found: dict[tuple, InForce] = {}
        # equal choices are one object: a compiled graph is chosen by what it finds, decisions are kept by it
        self._choices: dict[tuple[LevelRules, ...], tuple[LevelRules, ...]] = {}

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
        return Time(percent, timestep)

    def boundary_in(self, timesteps: Sequence[float]) -> float | None:
        """Where the early phase ends in a pass of these steps, for `at`; None where it ends as in a whole picture."""
        return boundary_in(timesteps, self._early_until) if self._early else None

    def at(self, time: Time, boundary: float | None = None) -> InForce:
        """The rules in force at this time; one object for all times at which the same ones hold.

        boundary: of the early phase in this pass, see `boundary_in`.
        """
        within = self._window is None or self._window.holds(time)
        holds = tuple(self._holds(rule, time, boundary) for rule in self.rules)
        key = (within, holds, time == UNKNOWN)
        if key not in self._found:
            timely = tuple(rule for rule, on in zip(self.rules, holds, strict=True) if on)
            live, phase = timely if within else (), ""
            if self._early and time != UNKNOWN:  # outside of the window an early step is early, too
                phase = "early" if any(rule in self._early for rule in timely) else "late"
            in_large = choose(live, self.downsamples, sys.maxsize)
            why_off = tuple(self._why_off(level, rules, live, time) for level, rules in enumerate(in_large))
            self._found[key] = InForce(self.for_pixels(live), live, why_off, phase)
        return self._found[key]

    def for_pixels(self, live: tuple[MergeRule, ...], pixels: int | None = None) -> tuple[LevelRules, ...]:
        """The rules in force in a picture of so many pixels, None if that is not known."""
        return self._one_object(choose(live, self.downsamples, pixels))

    def apply_gate(self, rules: tuple[LevelRules, ...], opens: bool) -> tuple[LevelRules, ...]:
        """These rules if merging was found to pay, or not to.

        If it pays, those of the finest level that they reach merge whatever its size; else those that are to merge only
        if it pays do not.
        """
        finest = next((level for level, one in enumerate(rules) if any(one)), None)
        if not opens:
            rules = tuple(
                LevelRules(*(None if rule and rule.only_if_it_pays else rule for rule in one)) for one in rules
            )
        elif finest is not None:
            free = LevelRules(*(rule and _free(rule) for rule in rules[finest]))
            rules = (*rules[:finest], free, *rules[finest + 1 :])
        return self._one_object(rules)

    def _holds(self, rule: MergeRule, time: Time, boundary: float | None) -> bool:
        late = self._early.get(rule) if boundary is not None else None
        if late is None:
            return holds_at(rule, time)
        return time.timestep is not None and time.timestep >= boundary and holds_at(late, time)

    def _one_object(self, rules: tuple[LevelRules, ...]) -> tuple[LevelRules, ...]:
        return self._choices.setdefault(rules, rules)

    def _why_off(self, level: int, in_large: LevelRules, live: tuple[MergeRule, ...], time: Time) -> str:
        """Why a level is left alone where no rule is in force; in_large: its rules in a picture of any size."""
        if any(in_large):
            return "the picture is smaller than min_pixels"
        if any(rule.is_off and reaches(rule, level, self.downsamples[level]) for rule in live):
            return "a rule of ratio 0 leaves it alone"
        return "outside the rules' time range" if time != UNKNOWN else TIME_IS_UNKNOWN


@lru_cache(maxsize=256)
def _free(rule: MergeRule) -> MergeRule:
    """One object for a rule: parts that merge by the same one share its match, and steps what is kept of it."""
    return replace(rule, only_if_it_pays=False)


def boundary_in(timesteps: Sequence[float], until: float) -> float | None:
    """The timestep at and above which a step of this pass is early; None where the whole picture's holds.

    A mark promises a share of the steps, which a boundary by time does not keep in a pass that begins late (image to
    image, inpainting, a hires pass) or has few steps: of a pass from half of the noise on balanced left .10 of the work
    in place of .0625, and of four steps one late where 1.5 were promised. There the boundary goes to where the promised
    share of the pass's own steps is left.

    timesteps: of the pass's steps, in any order. until: the boundary in a whole picture. The share of late steps is the
    same in both, to the nearest step; a half goes to the late ones, which change less.

    >>> boundary_in([500, 400, 300, 200, 100], 375)
    250.0
    >>> boundary_in([999, 749, 499, 249], 375)
    624.0
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
