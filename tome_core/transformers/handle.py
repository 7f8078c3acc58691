"""The handle of a patch on transformers: put on, taken off, and what was there before brought back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ..model.switch import patch_lock
from ..model.wrap import Wrap
from ..running.nested import Nested
from ..running.pipeline import SamplingScope
from ..sequence import SequenceMerging
from ..settings.config import MergeConfig
from ..settings.noise import SchedulerNoise, Step, by_timestep
from .families import Family, family_of, find_attentions
from .sites import AttentionSite, Calls, ModelSite, Settings

_MARK = "_tome_core_transformer"


class PipelineSteps(SchedulerNoise):
    """At which step a pipeline is, by its scheduler's own count: a timestep among arguments would be waited for.

    A flow model's timesteps are 1000 times its sigma, and stand for Stable Diffusion's of the same number.
    """

    def now(self) -> torch.Tensor | None:
        """Of the next call, an element of its scheduler's timesteps; None where the scheduler does not count."""
        scheduler = self._scheduler()
        steps = getattr(scheduler, "timesteps", None)
        if not hasattr(scheduler, "step_index") or not torch.is_tensor(steps) or steps.dim() != 1:
            return None
        index = scheduler.step_index
        if index is None:  # before the first step
            index = getattr(scheduler, "begin_index", None) or 0
        return steps[index] if index < len(steps) else None

    def steps_of(self, values: list[float]) -> list[Step]:
        """What the scheduler's ``values``, all that its ``timesteps`` hold, stand for."""
        return [by_timestep(value) for value in values]


class TransformerPatch(Nested, SequenceMerging):
    """Merging on the transformers of one pipeline, or on one by itself; a context manager that can also be kept.

    Installed when `patch` returns it; leaving the ``with`` takes it off and brings back the one that was there before.
    It does not keep the models alive. A deep copy of a patched one merges nothing.
    """

    def __init__(self, models: list[nn.Module], config: MergeConfig, pipeline: Any) -> None:
        """models: all of one family, the pipeline's where they are in one."""
        family = family_of(models[0])
        blocks = len(find_attentions(models[0], family))
        super().__init__(config, family.downsample, blocks)
        self._models = [weakref.ref(one) for one in models]
        self.take_the_place_of(handle_on(models[0]))
        self.is_installed = False
        self._outside = []
        # each of the pipeline's loops makes one picture, or one batch of them; and it tells its steps
        if self.run.wants_time and hasattr(pipeline, "progress_bar"):
            with suppress(TypeError):  # a class that allows no weak references
                self._outside.append(SamplingScope(pipeline, self.run))
                self.run.noise = PipelineSteps(pipeline)

    def timestep(self, family: Family, given: Mapping[str, Any]) -> Any:
        """Of a call, as Stable Diffusion's: of the pipeline's step, else from the call's arguments."""
        steps = self.run.noise
        step = steps.now() if steps is not None and self.run.is_sampling else None
        return family.timestep(given) if step is None else step

    def install(self) -> TransformerPatch:
        """Put it on, in place of another of ours. Idempotent."""
        self._removed = False
        with patch_lock():
            for model in self._present():
                on = vars(model).get(_MARK) or _On(model)
                on.give(self)
                vars(model)[_MARK] = on
            self._put_on_outside()
            self.is_installed = True
        return self

    def uninstall(self) -> None:
        """Take it off, keeping its counts. Idempotent."""
        with patch_lock():
            for model in self._present():
                on = vars(model).get(_MARK)
                if on is not None and on.settings.merging is self:
                    on.take_off()
                    del vars(model)[_MARK]
            self.step_down()

    def step_down(self) -> None:
        """It is in force no longer: taken off, or another of ours is."""
        self.is_installed = False
        self._take_off_outside()

    def _present(self) -> Iterator[nn.Module]:
        return (model for model in (one() for one in self._models) if model is not None)

    def _in_force(self) -> TransformerPatch | None:
        return next((handle_on(model) for model in self._present()), None)


class _On:
    """All wraps on one transformer."""

    def __init__(self, model: nn.Module) -> None:
        family, calls = family_of(model), Calls()
        self.settings = Settings()
        sites = [
            AttentionSite(path, one, family.text_first, self.settings, calls)
            for path, one in find_attentions(model, family)
        ]
        self._wraps: list[Wrap] = [ModelSite(model, family, self.settings, calls), *sites]

    def give(self, merging: TransformerPatch) -> None:
        """These settings are in force from now on; brings back what somebody has overwritten."""
        before, self.settings.merging = self.settings.merging, merging
        if before is not None and before is not merging:
            before.step_down()
        self._wraps = [wrap.install() for wrap in self._wraps]

    def take_off(self) -> None:
        """Leave the model as it was found."""
        self.settings.merging = None
        for wrap in reversed(self._wraps):
            wrap.uninstall()


def handle_on(model: nn.Module) -> TransformerPatch | None:
    """The handle in force on a transformer."""
    on = vars(model).get(_MARK)
    return None if on is None else on.settings.merging
