"""The handle of a patch: on and off, and what was in force before it, on UNets and transformers alike."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from ..engine.decision import around_of
from ..measuring.measured import Measured
from ..models.find import Adapter, adapter_of
from ..models.pipeline import SamplingScope, SchedulerClock
from ..models.transformer import PipelineSteps
from ..models.wrap import Wrap
from ..models.wrap_set import put_on, take_off, wraps_on
from ..settings.config import MergeConfig
from ..settings.noise import SchedulerNoise
from ..settings.schedule import NoiseSchedule, reaches


class Patch(Measured):
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

    _removed = False
    _entered = False

    def __init__(
        self, models: Sequence[nn.Module], config: MergeConfig, schedule: NoiseSchedule | None = None,
        handed: Any = None, adapter: Adapter | None = None,
    ) -> None:  # fmt: skip
        self._models = [weakref.ref(one) for one in models]
        self.adapter = adapter or adapter_of(models[0])
        super().__init__(config, self.adapter.tallies(), schedule)
        self._levels = {level for level, covered in enumerate(self._covered) if covered}
        rules = [rule for rule in self.clock.rules if not rule.is_off and around_of(rule)]
        reached = enumerate(self.adapter.downsamples)
        self._around = {level for level, down in reached if any(reaches(rule, level, down) for rule in rules)}
        self._outside: list[Wrap] = []  # of a pipeline and its scheduler; they hold no module
        self._previous: Patch | None = None  # what leaving this one brings back
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
        return any(handle_on(one) is self for one in self._present())

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
        self._outside = [wrap.install() for wrap in self._outside if wrap.wrapped() is not None]
        with suppress(TypeError):  # nothing that has a hash, or can be referred to weakly
            OF_HANDED[self.handed and self.handed()] = self
        return self

    def uninstall(self) -> None:
        """Take the patch off, keeping its counts. Idempotent. It waits for no call: one that goes on ends unmerged."""
        for model in self._present():
            take_off(model, self)
        self._take_off_outside()

    def remove(self) -> None:
        """Take it off for good. Idempotent; never fails."""
        self._removed = True
        self.uninstall()
        self.time.forget()

    def take_the_place_of(self, current: Patch | None) -> None:
        """Remember what leaving this one brings back."""
        self._previous = current
        if current is not None and not current._entered:
            current._previous = None  # nobody will leave it for what was before it; without this, the chain would grow

    def __enter__(self) -> Patch:
        self._entered = True
        return self.install()

    def __exit__(self, *error: object) -> None:
        self._entered = False
        # patches put on inside this `with` end with it
        later = list(back_from(handle_on(self.model)))
        if self not in later:
            self.remove()
            return
        for one in later[: later.index(self) + 1]:
            one.remove()
        before = next((one for one in back_from(self._previous) if not one._removed), None)
        if before is not None:
            before.install()

    @contextmanager
    def unmerged(self) -> Iterator[Patch]:
        """While in there, this thread's calls of the model merge nothing."""
        calls = [found.shared.calls for found in map(wraps_on, self._present()) if found is not None]
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
        if is_unet:
            self.time.noise = SchedulerNoise(handed)
            self._outside.append(SchedulerClock(scheduler, self.time))
        if hasattr(handed, "progress_bar") and (self.time.keeps or not is_unet):
            with suppress(TypeError):  # a class that allows no weak references
                self.time.noise = self.time.noise or PipelineSteps(handed)
                self._outside.append(SamplingScope(handed, self.time))

    def _take_off_outside(self) -> None:
        for wrap in self._outside:
            if wrap.target is not None:
                wrap.uninstall()

    def _present(self) -> Iterator[nn.Module]:
        return (model for model in (one() for one in self._models) if model is not None)

    def __reduce__(self) -> tuple:
        raise TypeError("a patch belongs to its model and cannot be copied or pickled; patch the copy of the model")

    def __deepcopy__(self, memo: dict) -> None:
        return None  # in whatever holds a patched model


OF_HANDED: weakref.WeakKeyDictionary[Any, Patch] = weakref.WeakKeyDictionary()  # by what was handed to `patch`


def handle_on(model: nn.Module | None) -> Patch | None:
    """The handle in force on a UNet or a transformer."""
    return getattr(wraps_on(model), "handle", None)


def back_from(handle: Patch | None) -> Iterator[Patch]:
    """A handle and those it took the place of, the latest first."""
    while handle is not None:
        yield handle
        handle = handle._previous
