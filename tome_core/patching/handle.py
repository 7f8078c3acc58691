"""The handle of a patch: it puts the patch on its models, takes it off, and reports."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from torch import nn

from ..engine.scheduler_steps import PipelineSteps, SchedulerNoise
from ..engine.state import State
from ..measuring.pays import pays_of
from ..models import Adapter, adapter_of
from ..models.wrap import Wrap, why_missed
from ..models.wrap_set import put_on, take_off, wraps_on
from ..reporting.report import Report
from ..settings.config import MergeConfig
from ..settings.presets import TRANSFORMER
from ..settings.schedule import NoiseSchedule
from .pipeline import SamplingScope


class Patch(State):
    """A patch on a model: it reports, and takes itself off. It does not keep models alive.

        with tome_core.patch(pipe, strength=0.5) as handle:
            image = pipe("a lake").images[0]
            print(handle.report())

    `patch` returns a patch that is on the model; a new `Patch` is not, until `install`. Leaving the ``with`` takes the
    patch off and, if `patch` made it, brings back the earlier patch. No attribute, hook, class or state-dict key
    remains. Copies and pickles of a patched model do not merge.

    Args:
        models: the UNet, or the transformers of one pipeline, all of one family.
        config: the settings.
        schedule: the model's noise schedule; None if it is not known: Stable Diffusion's is then used.
        patched_object: the object that was passed to `patch`, such as a pipeline; None if it is not known.
        adapter: the adapter of the first model; None: one is made.
    """

    _removed = False
    _entered = False

    def __init__(
        self, models: Sequence[nn.Module], config: MergeConfig, schedule: NoiseSchedule | None = None,
        patched_object: Any = None, adapter: Adapter | None = None,
    ) -> None:  # fmt: skip
        self._models = [weakref.ref(model) for model in models]
        self.adapter = adapter or adapter_of(models[0])
        super().__init__(config, self.adapter.tallies(), schedule, self.adapter.outside)
        self._pipeline_wraps: list[Wrap] = []  # wraps of the pipeline, which hold no module
        self._previous: Patch | None = None  # comes back when the `with` is left
        self._follow(patched_object)

    @property
    def model(self) -> nn.Module | None:
        """The UNet, or the first transformer that still exists; None if all were garbage-collected."""
        return next(self._present(), None)

    @property
    def is_installed(self) -> bool:
        """True while this patch is on one of the models and no other program has taken it off."""
        return any(patch_on(model) is self and not wraps_on(model).is_lost() for model in self._present())

    def install(self) -> Patch:
        """Put the patch on the models, in place of an earlier one, and return this patch. Idempotent.

        Call it again if another program removed or wrapped the patch; it goes on top. A RuntimeError is raised if all
        models were garbage-collected.
        """
        if self.model is None:
            raise RuntimeError("the model that this handle patched is gone; patch the new one")
        self._removed = False
        if not self.is_installed:
            self.pays = pays_of(self.clock.rules, self.model, self.adapter)
        for number, model in enumerate(self._present()):
            adapter = self.adapter if number == 0 else adapter_of(model)
            before = put_on(model, adapter, self, self.ways)
            if before is not None and before is not self:
                before._uninstall_pipeline_wraps()
        self._pipeline_wraps = [wrap.install() for wrap in self._pipeline_wraps if wrap.wrapped() is not None]
        return self

    def uninstall(self) -> None:
        """Take the patch off the model and keep its counts and plans; `install` puts it back.

        An earlier patch does not come back. Calls in progress are not waited for; their next attentions do not merge.
        """
        for model in self._present():
            take_off(model, self)
        self._uninstall_pipeline_wraps()

    def remove(self) -> None:
        """Take the patch off the model and drop all kept plans, not the counts. Never fails, also if called again.

        An earlier patch does not come back, also if a ``with`` of this patch is left later.
        """
        self._removed = True
        self.uninstall()
        self.time.forget()

    def __enter__(self) -> Patch:
        self._entered = True
        return self.install()

    def __exit__(self, *error: object) -> None:
        self._entered = False
        latest, before = None if self._removed else patch_on(self.model), self._previous
        self.remove()
        if latest is None:  # another caller has taken all patches off
            return
        latest.remove()  # a patch put on inside this `with` ends with it
        if before is not None and not before._removed:
            before.install()

    def report(self) -> Report:
        """Return a copy of the counts since the last reset, with a note if another program keeps calls away."""
        report = super().report()
        sets = () if report.calls else (wraps for wraps in map(wraps_on, self._present()) if wraps and wraps.wraps)
        over = [f"nothing will merge: no call counted yet; {why_missed(wraps.wraps[0])}" for wraps in sets
                if wraps.patch is self and not wraps.wraps[0].is_on_top()]  # fmt: skip
        return replace(report, notes=(*report.notes, *over))

    @contextmanager
    def unmerged(self) -> Iterator[Patch]:
        """Return a context manager in which this thread's calls do not merge; it yields this patch, may be nested."""
        calls = [wraps.calls for wraps in map(wraps_on, self._present()) if wraps is not None]
        for thread_calls in calls:
            thread_calls.disabled += 1
        try:
            yield self
        finally:
            for thread_calls in calls:
                thread_calls.disabled -= 1

    def _follow(self, patched_object: Any) -> None:
        """Let `time` read a pipeline's scheduler, if the settings need it, and make a wrap of its progress bar.

        `install` puts the wrap on: each picture begins in the bar. A UNet's bar gets one only if matches are kept.
        """
        scheduler, is_unet = getattr(patched_object, "scheduler", None), self.adapter.curve != TRANSFORMER
        if not self.wants_time or (is_unet and not hasattr(scheduler, "scale_model_input")):
            return
        with suppress(TypeError):  # a class that allows no weak references
            if is_unet:
                self.time.scheduler_steps = SchedulerNoise(patched_object)
            if hasattr(patched_object, "progress_bar") and (self.time.keeps or not is_unet):
                self.time.scheduler_steps = self.time.scheduler_steps or PipelineSteps(patched_object)
                self._pipeline_wraps.append(SamplingScope(patched_object, self.time))

    def _uninstall_pipeline_wraps(self) -> None:
        """Restore the methods of the pipeline that `install` replaced."""
        for wrap in self._pipeline_wraps:
            wrap.uninstall()

    def _present(self) -> Iterator[nn.Module]:
        """Return an iterator over the patched models that were not garbage-collected."""
        return (model for model in (reference() for reference in self._models) if model is not None)

    def __reduce__(self) -> tuple:
        raise TypeError("a patch belongs to its model and cannot be copied or pickled; patch the copy of the model")

    def __deepcopy__(self, memo: dict) -> None:
        return None  # a copy of an object that holds this handle is not patched


def patch_on(model: nn.Module | None) -> Patch | None:
    """Return the `Patch` that is on a UNet or a transformer; None if there is none, or if the model is None."""
    return getattr(wraps_on(model), "patch", None)
