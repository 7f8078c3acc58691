"""The handle of a patch: on and off, in turn with others, on UNets and transformers alike."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from ..engine.decision import around_of
from ..engine.state import State
from ..measuring.measured import Measured
from ..models import Adapter, adapter_of
from ..models.pipeline import SamplingScope, SchedulerClock
from ..models.transformer import PipelineSteps
from ..models.wrap_set import put_on, take_off, wraps_on
from ..settings.config import MergeConfig, reaches
from ..settings.noise import SchedulerNoise
from ..settings.schedule import NoiseSchedule
from .patch_stack import Nested


class Patch(Nested, Measured, State):
    """The handle of one patch: a context manager that can also be kept. It does not keep its models alive.

        with tome_core.patch(pipe, strength=0.5) as handle:
            image = pipe("a lake").images[0]
            print(handle.report())

    It is installed when `patch` returns it. Leaving the ``with`` takes it off and puts back the patch that was
    there before, if any. Nothing else is left behind: no attribute, hook, class or state-dict key. A copy or a pickle
    of a patched model merges nothing.

    Args:
        models: the UNet, or the transformers of one pipeline, all of one family.
        config: the settings.
        schedule: the noise schedule of the model, if it is known.
        handed: what was handed to `patch`: a pipeline, a compiled or wrapped model.
        adapter: of the first model, if it was made already.
    """

    def __init__(
        self, models: Sequence[nn.Module], config: MergeConfig, schedule: NoiseSchedule | None = None,
        handed: Any = None, adapter: Adapter | None = None,
    ) -> None:  # fmt: skip
        self._models = [weakref.ref(one) for one in models]
        self.adapter = adapter or adapter_of(models[0])
        super().__init__(config, self.adapter.tallies(), schedule)
        downsamples = self.adapter.downsamples
        self._levels = {level for level, covered in enumerate(self._covered) if covered}
        rules = [rule for rule in self.clock.rules if not rule.is_off and around_of(rule)]
        reached = {level for level in self._levels for rule in rules if reaches(rule, level, downsamples[level])}
        self._around = reached
        self._outside = []
        self.handed = None
        with suppress(TypeError):  # nothing that can be referred to weakly
            self.handed = weakref.ref(handed)
        self._follow(handed)

    @property
    def model(self) -> nn.Module | None:
        """The UNet, or the first of the transformers; None once nobody else holds it."""
        return next(self._present(), None)

    @property
    def is_installed(self) -> bool:
        """True while the model merges as this handle says."""
        return any((found := wraps_on(one)) is not None and found.handle is self for one in self._present())

    def install(self) -> Patch:
        """Put the patch on, in place of another of ours if there is one.

        Idempotent, and also brings back what another program has overwritten. Raises RuntimeError if the model is gone.
        """
        if self.model is None:
            raise RuntimeError("the model that this handle patched is gone; patch the new one")
        self._removed = False
        if not self.is_installed:
            self.ask_whether_it_pays()
        for number, model in enumerate(self._present()):
            adapter = self.adapter if number == 0 else adapter_of(model)
            before = put_on(model, adapter, self, self._levels, self._around)
            if before is not None and before is not self:
                before._take_off_outside()
        self._put_on_outside()
        with suppress(TypeError):  # nothing that has a hash, or can be referred to weakly
            _OF_HANDED[self.handed and self.handed()] = self
        return self

    def uninstall(self) -> None:
        """Take the patch off, keeping its counts. Idempotent. It waits for no call: one that goes on ends unmerged."""
        for model in self._present():
            take_off(model, self)
        self._take_off_outside()
        handed = self.handed and self.handed()
        with suppress(TypeError):
            if _OF_HANDED.get(handed) is self:
                del _OF_HANDED[handed]

    @contextmanager
    def unmerged(self) -> Iterator[Patch]:
        """While in there, this thread's calls of the model merge nothing."""
        calls = [found.calls for found in map(wraps_on, self._present()) if found is not None]
        for one in calls:
            one.off += 1
        try:
            yield self
        finally:
            for one in calls:
                one.off -= 1

    def _follow(self, handed: Any) -> None:
        """Take the time from a pipeline's scheduler, and its pictures from its loop, if a rule asks for them."""
        scheduler, is_unet = getattr(handed, "scheduler", None), self.adapter.layout != "transformer"
        if not self.wants_time or (is_unet and not hasattr(scheduler, "scale_model_input")):
            return
        has_loop = hasattr(handed, "progress_bar")
        if is_unet:
            self.time.noise = SchedulerNoise(handed)
            self._outside.append(SchedulerClock(scheduler, self.time))
            has_loop = has_loop and self.time.keeps
        elif has_loop:
            with suppress(TypeError):  # a class that allows no weak references
                self.time.noise = PipelineSteps(handed)
        if has_loop:
            with suppress(TypeError):
                self._outside.append(SamplingScope(handed, self.time))

    def _present(self) -> Iterator[nn.Module]:
        return (model for model in (one() for one in self._models) if model is not None)

    def _in_force(self) -> Patch | None:
        return handle_on(self.model)

    def __reduce__(self) -> tuple:
        raise TypeError("a patch belongs to its model and cannot be copied or pickled; patch the copy of the model")

    def __deepcopy__(self, memo: dict) -> None:
        return None  # in whatever holds a patched model


_OF_HANDED: weakref.WeakKeyDictionary[Any, Patch] = weakref.WeakKeyDictionary()


def handle_on(model: nn.Module | None) -> Patch | None:
    """The handle in force on a UNet or a transformer."""
    found = wraps_on(model)
    return None if found is None else found.handle


def take_handed(handed: Any) -> list[Patch]:
    """The handle that was put on by way of this pipeline or wrapped model; it is no longer remembered."""
    with suppress(TypeError):
        return [one for one in [_OF_HANDED.pop(handed, None)] if one is not None]
    return []
