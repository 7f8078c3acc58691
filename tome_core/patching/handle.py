"""The handle of a patch on a UNet: on and off, in force and in turn with others, and which one that is."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from torch import nn

from ..measuring.measured import Measured
from ..model.families import find_blocks
from ..reporting.ledger import LevelTally
from ..running.fingerprint import widths_of
from ..running.handle import Handle
from ..running.nested import Nested
from ..running.pipeline import SamplingScope, SchedulerClock
from ..running.run import Run
from ..settings.config import MergeConfig
from ..settings.noise import SchedulerNoise
from ..settings.phases import plain_rules
from ..settings.rule import MergeRule
from ..settings.schedule import NoiseSchedule, reaches
from ..unet.sites import PARTS
from ..unet.wiring import Holder, put_on, wiring_of


class Patch(Nested, Measured, Handle, Holder):
    """The handle of one patch: a context manager that can also be kept. It does not keep the UNet alive.

        with tome_core.patch(pipe, MergeConfig(ratio=0.5)) as handle:
            image = pipe("a lake").images[0]
            print(handle.report())

    It is installed when `patch` returns it. Leaving the ``with`` takes it off and puts back the patch that was
    there before, if any. Nothing else is left behind: no attribute, hook, class or state-dict key.
    """

    def __init__(self, unet: nn.Module, config: MergeConfig, schedule: NoiseSchedule | None) -> None:
        self._unet = weakref.ref(unet)
        self._outside = []
        places = find_blocks(unet)
        depths = sorted({place.halvings for place in places})
        downsamples = [2**depth for depth in depths]
        rules = plain_rules(config, downsamples)
        tallies = [LevelTally(2**depth, sum(p.halvings == depth for p in places)) for depth in depths]
        super().__init__(config, rules, tallies, schedule)
        self.needs = _needs(rules, downsamples)
        self.block_sizes = tuple((2**place.halvings, widths_of(place.block)[0]) for place in places)

    @property
    def is_installed(self) -> bool:
        """True while the model merges as this handle says, wherever nobody else is named."""
        wiring = self._wiring()
        return wiring is not None and wiring.switch.run is self.run

    def install(self) -> Patch:
        """Put the patch on, in place of another of ours if there is one.

        Idempotent, and also brings back what somebody else has overwritten.
        """
        self._put_on(merges=True)
        model = self.handed and self.handed()
        with suppress(TypeError):  # nothing that has a hash, or can be referred to weakly
            _OF_MODEL[model] = self
        return self

    def uninstall(self) -> None:
        """Take the patch off, keeping its counts. Idempotent.

        Waits for a call of the UNet that goes on in another thread; a thread that is itself inside a call of another
        UNet does not wait, and the patch comes off with that call's end.
        """
        self.detach()

    def attach(self) -> None:
        """Have the UNet's wraps on, merging nothing outside of `merging`.

        For a host whose branches share a UNet: once a sampling. Idempotent; brings back what somebody has overwritten.
        """
        self._put_on(merges=False)

    def detach(self) -> None:
        """No longer need the wraps, which come off when nobody does. Idempotent; waits as `uninstall` does."""
        super().detach()
        self._take_off_outside()
        model = self.handed and self.handed()
        with suppress(TypeError):
            if _OF_MODEL.get(model) is self:
                del _OF_MODEL[model]

    def merging(self) -> AbstractContextManager[Patch]:
        """While in there, this thread's calls of the UNet merge as this handle says. `attach` comes first."""
        return self._naming(self.run)

    def unmerged(self) -> AbstractContextManager[Patch]:
        """While in there, this thread's calls of the UNet merge nothing."""
        return self._naming(None)

    @contextmanager
    def _naming(self, run: Run | None) -> Iterator[Patch]:
        wiring = self._wiring()
        with nullcontext() if wiring is None else wiring.switch.naming(run):
            yield self

    def _put_on(self, merges: bool) -> None:
        unet = self.unet
        if unet is None:
            raise RuntimeError("the UNet that this handle patched is gone; patch the new one")
        self._removed = False
        wiring = self._wiring()
        if wiring is None or self not in wiring.holders:
            self.ask_whether_it_pays()
        put_on(unet, self, merges)
        self._put_on_outside()

    def _follow(self, model: Any) -> None:
        """Take the time from a pipeline's scheduler, and its pictures from its loop, where a rule asks for them."""
        scheduler = getattr(model, "scheduler", None)
        if not self.run.wants_time or not hasattr(scheduler, "scale_model_input"):
            return
        self.run.noise = SchedulerNoise(model)
        self._outside.append(SchedulerClock(scheduler, self.run))
        if self.run.keeps and hasattr(model, "progress_bar"):
            with suppress(TypeError):  # a class of somebody's own that allows no weak references
                self._outside.append(SamplingScope(model, self.run))

    def _in_force(self) -> Patch | None:
        return handle_in_force(self.unet)

    def __getstate__(self) -> dict[str, Any]:
        # a copy belongs to a copy of the UNet, which makes itself known (`wiring_of`), and to no pipeline
        return {**vars(self), "_unet": None, "handed": None, "_outside": [], "_previous": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _unet=lambda: None)


_OF_MODEL: weakref.WeakKeyDictionary[Any, Patch] = weakref.WeakKeyDictionary()  # what was handed to `patch`, while on


def take_by_model(model: Any) -> Patch | None:
    """The handle that was made of this very pipeline or wrapper, if one is on; it is not found so again."""
    try:
        return _OF_MODEL.pop(model, None)
    except TypeError:  # nothing that can be referred to weakly
        return None


def handle_in_force(unet: nn.Module | None) -> Patch | None:
    """The handle that merges wherever nobody else is named; else the last that holds the wraps."""
    wiring = None if unet is None else wiring_of(unet)
    if wiring is None:
        return None
    return wiring.merging or next((one for one in reversed(wiring.holders) if isinstance(one, Patch)), None)


def _needs(rules: tuple[MergeRule, ...], downsamples: list[int]) -> frozenset[tuple[int, str]]:
    """(level, part) of all that some rule merges at some time."""
    live = [rule for rule in rules if not rule.is_off]
    return frozenset(
        (level, part)
        for level, downsample in enumerate(downsamples)
        for rule in live
        for part in PARTS
        if getattr(rule, f"merge_{part}") and reaches(rule, level, downsample)
    )
