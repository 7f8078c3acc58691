"""What every handle can do while its model runs, however it got there: tell the time, look at what merged, report."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ..merging import kernels
from ..reporting.ledger import Ledger, LevelTally
from ..reporting.report import Report, make_report
from ..settings.config import MergeConfig, describe, notes_on
from ..settings.rule import MergeRule
from ..settings.schedule import NoiseSchedule, ever_merges
from .call import MergeMap
from .keep import Guidance
from .run import Run

Own = TypeVar("Own", bound="Handle")


class Handle:
    """Settings in force on a model, and what they came to.

    rules: all of the config's, `phases.plain_rules`. tallies: of the model's levels. schedule: its own, where known.
    is_installed: true while the model merges as this handle says, wherever nobody else is named.
    """

    is_installed: bool

    def __init__(
        self, config: MergeConfig, rules: Sequence[MergeRule], tallies: Sequence[LevelTally],
        schedule: NoiseSchedule | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        downsamples = [one.downsample for one in tallies]
        self._covered = [ever_merges(rules, level, down) for level, down in enumerate(downsamples)]
        self._notes = notes_on(config, self._covered, downsamples)
        self.run = Run(config, downsamples, schedule, Ledger(list(tallies), self._notes))

    @property
    def ever_merges(self) -> bool:
        """Is there a rule that merges at some time, whatever the picture's size?"""
        return any(self._covered)

    @contextmanager
    def sampling(self: Own, pictures: int | None = None, timesteps: Sequence[float] | None = None) -> Iterator[Own]:
        """While in here, this thread's calls of the UNet are the steps of one picture, or of one batch.

        pictures, timesteps: as of `set_time`; a diffusers pipeline tells them by itself.
        What ``keep`` keeps is kept inside and let go of at the end; outside of any sampling nothing is kept. A
        diffusers pipeline's loop is one by itself.
        """
        _check_pictures(pictures)
        _check_timesteps(timesteps)
        with self.run.sample(lambda batch: Guidance(pictures) if pictures else None, timesteps):
            yield self

    def set_time(
        self, *, percent: float | None = None, timestep: float | None = None, sigma: float | None = None,
        sampling: Hashable = None, pictures: int | None = None, timesteps: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """Tell the time before a call of the UNet, on whichever scale is at hand; without arguments, stop telling.

        percent: 0..1, ComfyUI's ``percent_to_sigma`` scale. timestep: of Stable Diffusion's schedule. sigma: the
        noise's standard deviation relative to data of unit variance. sampling: whatever tells this picture's sampling
        from all others, the same at each of its steps; matches are kept over steps (``keep``) only where it is given.
        pictures: how many it makes, where calls are made of copies of their latents in the same order, in one batch or
        in several, as guidance makes them for a prompt and a negative one. Copies share their matches then: what
        guidance multiplies is how differently its two predictions were changed.
        timesteps: of Stable Diffusion's schedule, of all steps of this sampling; the same object at each of them. A
        pass that begins late, as image to image and hires passes do, then leaves the share of the work that a whole
        picture leaves; give none where it goes on with a picture that another sampling has begun.
        Needed for rules in percent on a bare UNet, and for every rule that is limited in time on a UNet compiled as a
        whole, which cannot look at its own arguments. Raises ValueError for a number that is no such time.
        """
        _check_time("percent", percent, 1.0)
        _check_time("timestep", timestep)
        _check_time("sigma", sigma)
        _check_pictures(pictures)
        _check_timesteps(timesteps)
        self.run.set_time(percent, timestep, sigma, sampling, pictures, timesteps)

    def keep_maps(self, keep: bool = True) -> None:
        """From now on keep the latest map of each level on its device, for `maps`."""
        self.run.maps = {} if keep else None

    def maps(self) -> dict[int, MergeMap]:
        """Level -> what a block of it merged last; empty unless `keep_maps` was called before the model ran.

        Brings them to the CPU, which waits for the device.
        """
        kept = self.run.maps or {}
        return {level: MergeMap(grid, plan.group.cpu(), plan.num_groups) for level, (grid, plan) in kept.items()}

    def reset_counts(self) -> None:
        """Begin the report, and the maps, anew: for a host whose users ask about one picture at a time."""
        self.run.ledger.reset()
        if self.run.latch is not None:
            self.run.latch.used.clear()
        self.keep_maps(self.run.maps is not None)

    def report(self) -> Report:
        """What was merged so far, where, and what was skipped and why."""
        settings = tuple(describe(self.config, rule) for rule in self.config.rules)
        gains = () if self.run.latch is None else tuple(self.run.latch.used)
        return make_report(self.run.ledger, self._covered, settings, self.is_installed, kernels.notes(), gains)


def _check_time(name: str, value: float | None, most: float = math.inf) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; use a number")
    if not 0 <= value <= most or value == math.inf:
        raise ValueError(f"{name}={value!r} is no time; use a number from 0 {'up' if most == math.inf else 'to 1'}")


def _check_pictures(value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"pictures={value!r} is no number of pictures; use a whole number from 1 up, or None")


def _check_timesteps(values: Sequence[float] | None) -> None:
    for value in () if values is None else values:
        _check_time("timesteps", value)
