"""Patching a model in place, and undoing it: the functions, and the handle of a patch."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from ..engine.plan_cache import Guidance
from ..engine.time import ModelTime
from ..measuring.measured import Measured
from ..models import Adapter, adapter_of, find_models
from ..models.unet_blocks import UnsupportedModelError
from ..models.wrap import Wrap, drop_mark, drop_remains, put_on, take_off, why_passed, wraps_on
from ..reporting.report import Report
from ..settings.config import MergeConfig, reaches
from ..settings.presets import DEFAULT, TRANSFORMER, config_of
from ..settings.schedule import STABLE_DIFFUSION, NoiseSchedule, PipelineSteps, SchedulerNoise, own_schedule

logger = logging.getLogger(__name__)
_GUIDES = ("do_classifier_free_guidance", "do_perturbed_attention_guidance")  # what a pipeline says of itself


def patch(
    model: Any, config: MergeConfig | str | None = None, *, strength: float | None = None, host_clock: bool = False,
    **settings: Any,
) -> Patch:  # fmt: skip
    """Merge tokens in a model, in place, until the handle is left or removed.

    ``patch(pipe, strength=0.3)``, ``patch(pipe, "fast")``, ``patch(pipe, "fast", seed=5)``, ``patch(pipe, ratio=0.5)``

    Args:
        model: a UNet, a compiled one, a diffusers pipeline, an LDM model, or one of diffusers' known transformers
            (`models.transformer.NAMES`).
        config: settings, or the name of a preset: "quality", "balanced" (None is that), "fast" or "max".
        strength: instead of either, from 0, which is off, to 1; see `tome_core.strength`.
        host_clock: the caller will use `Patch.set_time`, so rules in percent are no reason for a warning.
        settings: keywords of `MergeConfig`, which make one, or change the one that is asked for.

    Returns:
        The handle. A patch of ours that is already there is replaced; leaving the ``with`` brings it back.

    Raises:
        UnsupportedModelError: (a ValueError) the model has no attentions that are known.
        TypeError: `model` is not a model.
        ValueError: `strength` is out of range or given together with `config`. Invalid settings raise either.
    """
    models = find_models(model)
    adapter = adapter_of(models[0])
    config = _config_of(config, strength, settings, adapter.layout)
    handle = Patch(models, config, _schedule_of(model), model, adapter)
    handle._previous = before = handle_on(models[0])
    if before is not None and not before._entered:
        before._previous = None  # nobody will leave it for what was before it; without this, the chain would grow
    if not host_clock and config.uses_percent and not handle.knows_schedule:
        logger.warning(
            "Merging is limited in percent or beta, which a bare model does not know: call "
            "handle.set_time(percent=...) before each step, patch the pipeline instead, or use min_timestep."
        )
    for note in handle.ledger.notes:
        logger.warning("%s", note)
    if adapter.layout == TRANSFORMER:
        _warn_once()
    return handle.install()


@cache
def _warn_once() -> None:
    logger.warning(
        "transformers' strengths and presets were chosen on one small transformer of Flux's layout; nobody has "
        "measured what they change in this model, so look at your pictures"
    )


def layout_of(model: Any) -> str:
    """Whose strengths a model has that `patch` takes, of `settings.presets.LAYOUTS`. Raises as `patch` does."""
    return adapter_of(find_models(model)[0]).layout


def _config_of(
    config: MergeConfig | str | None, strength: float | None, settings: dict[str, Any], layout: str
) -> MergeConfig:
    """What `patch` is asked for; a strength is that of the model's layout."""
    if strength is not None and config is not None:
        raise ValueError(f"strength={strength!r} and config={config!r} both say what merges; give one of them")
    if strength is None and config is None:
        config = MergeConfig() if settings else config_of(DEFAULT, layout)
    elif strength is not None or isinstance(config, str):
        config = config_of(config if strength is None else strength, layout)
    if not isinstance(config, MergeConfig):
        raise TypeError(f"config is {type(config).__name__}; it has to be a MergeConfig, a preset's name, or None")
    return replace(config, **settings) if settings else config


def apply_patch(
    model: Any, ratio: float = 0.5, max_downsample: int | None = None, sx: int = 2, sy: int = 2, use_rand: bool = True,
    merge_attn: bool = True, merge_crossattn: bool = False, merge_mlp: bool = False, seed: int = 0,
) -> Any:  # fmt: skip
    """Merge tokens in a model, in place, and return the model. Takes tomesd's arguments and does what tomesd does.

    `patch` does more, and by default better: with proportional attention.

    Args:
        ratio: share of tokens merged away, 0..1, clamped to ``1 - 1/(sx*sy)``.
        max_downsample: 1, 2, 4 or 8; None, unlike tomesd, is the finest level that has attention.
        use_rand: draw destinations from ``seed`` and the timestep.

    Raises:
        ValueError, TypeError: for values outside; UnsupportedModelError for a model without LDM-style blocks.
    """
    patch(model, MergeConfig(
        ratio=ratio, max_downsample=max_downsample, sx=sx, sy=sy, use_rand=use_rand, merge_attn=merge_attn,
        merge_crossattn=merge_crossattn, merge_mlp=merge_mlp, seed=seed, proportional=False,
    ))  # fmt: skip
    return model


def remove_patch(model: Any) -> Any:
    """Take our merging off a model and return the model. Does nothing, and never fails, where there is none."""
    try:
        models = find_models(model)
    except (UnsupportedModelError, TypeError):
        models = []
    for handle in filter(None, map(handle_on, models)):
        handle.remove()
    modules = [one for module in models for one in module.modules()]
    for target in (*modules, model):
        if hasattr(target, "__dict__"):
            drop_remains(target)
    for module in models:
        drop_mark(module)
    return model


def report(model: Any) -> Report:
    """What the model's patch did so far; also for a wrapped model and its inner one."""
    try:
        handle = handle_on(find_models(model)[0])
    except (TypeError, UnsupportedModelError):
        handle = None
    return Report(patched=False) if handle is None else handle.report()


def _schedule_of(model: Any) -> NoiseSchedule | None:
    """The noise schedule of a pipeline's scheduler, or of an LDM model itself; None for a bare UNet."""
    scheduler = getattr(model, "scheduler", None)
    if scheduler is not None:
        return own_schedule(scheduler) or (STABLE_DIFFUSION if hasattr(scheduler, "scale_model_input") else None)
    betas = getattr(model, "betas", None)
    if torch.is_tensor(betas) and betas.dim() == 1:
        return NoiseSchedule(tuple(betas.tolist()))
    return None


class Patch(Measured):
    """The handle of one patch: a context manager that can also be kept. It does not keep its models alive.

        with tome_core.patch(pipe, strength=0.5) as handle:
            image = pipe("a lake").images[0]
            print(handle.report())

    It is installed when `patch` returns it. Leaving the ``with`` takes it off and puts back the patch that was
    there before, if any. Nothing else is left behind: no attribute, hook, class or state-dict key. A copy or a pickle
    of a patched model merges nothing.

    models: the UNet, or the transformers of one pipeline, all of one family. schedule: of the model's noise, if it is
    known. handed: what was handed to `patch`. adapter: of the first model, if it was made already.
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
        self._levels = {level.level for level in self.ledger.levels if level.covered}
        around = [rule for rule in self.clock.rules if not rule.is_off and (
            rule.merge_crossattn or rule.merge_mlp or (rule.merge_attn and rule.is_as_tomesd))]  # fmt: skip
        reached = enumerate(self.adapter.downsamples)
        self._around = {level for level, down in reached if any(reaches(rule, level, down) for rule in around)}
        self._outside: list[Wrap] = []  # of a pipeline; they hold no module
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
        """True while the model merges as this handle says, and no other program has taken that off."""
        return any(handle_on(one) is self and not wraps_on(one).is_lost() for one in self._present())

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

    def __enter__(self) -> Patch:
        self._entered = True
        return self.install()

    def __exit__(self, *error: object) -> None:
        self._entered = False
        latest, before = None if self._removed else handle_on(self.model), self._previous
        self.remove()
        if latest is None:  # somebody has taken all of it off
            return
        latest.remove()  # a patch put on inside this `with` ends with it
        if before is not None and not before._removed:
            before.install()

    def report(self) -> Report:
        """What was merged so far, where, and what was skipped and why; if no call came here, what lies over it."""
        found = super().report()
        sets = () if found.calls else (one for one in map(wraps_on, self._present()) if one is not None and one.on)
        over = [f"nothing will merge: no call counted yet; {why_passed(one.on[0])}" for one in sets
                if one.handle is self and not one.on[0].is_on_top()]  # fmt: skip
        return replace(found, notes=(*found.notes, *over))

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
        with suppress(TypeError):  # a class that allows no weak references
            if is_unet:
                self.time.noise = SchedulerNoise(handed)
            if hasattr(handed, "progress_bar") and (self.time.keeps or not is_unet):
                self.time.noise = self.time.noise or PipelineSteps(handed)
                self._outside.append(SamplingScope(handed, self.time))

    def _take_off_outside(self) -> None:
        for wrap in self._outside:
            wrap.uninstall()

    def _present(self) -> Iterator[nn.Module]:
        return (model for model in (one() for one in self._models) if model is not None)

    def __reduce__(self) -> tuple:
        raise TypeError("a patch belongs to its model and cannot be copied or pickled; patch the copy of the model")

    def __deepcopy__(self, memo: dict) -> None:
        return None  # in whatever holds a patched model


def handle_on(model: nn.Module | None) -> Patch | None:
    """The handle in force on a UNet or a transformer."""
    return getattr(wraps_on(model), "handle", None)


# --- a pipeline's loop ------------------------------------------------------------------------------------------------


class SamplingScope(Wrap):
    """Around ``pipeline.progress_bar``, which brackets every pipeline's loop: one picture, or one batch of them."""

    def __init__(self, pipeline: Any, time: ModelTime) -> None:
        super().__init__(pipeline, "progress_bar")
        self.time = time

    @property
    def target(self) -> Any:
        """The pipeline, held weakly, because it holds the UNet; None once it is gone."""
        return None if self._target is None else self._target()

    @target.setter
    def target(self, pipeline: Any) -> None:
        self._target = None if pipeline is None else weakref.ref(pipeline)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The pipeline's bar, whose ``with`` or iteration is a sampling."""
        bar = self.original(*args, **kwargs)
        continues = getattr(self._target(), "denoising_start", None) is not None  # what another pipeline has begun
        return _Bar(bar, partial(self.time.sample, partial(_guidance, self._target), continues=continues))


def _guidance(pipeline: weakref.ref[Any], batch: torch.Tensor) -> Guidance | None:
    """Where a pipeline says that it guides, its batch is for the negative prompt, the prompt, and the perturbed one."""
    by_prompt, by_perturbing = (bool(getattr(pipeline(), name, False)) for name in _GUIDES)
    copies = 1 + by_prompt + by_perturbing
    return (len(batch) // copies, int(by_prompt)) if copies > 1 and len(batch) % copies == 0 else None


class _Bar:
    """A progress bar that begins and ends a sampling with itself."""

    def __init__(self, bar: Any, sampling: Callable[[], AbstractContextManager[None]]) -> None:
        self._bar, self._sampling, self._scope = bar, sampling, ExitStack()

    def __enter__(self) -> Any:
        self._scope.enter_context(self._sampling())
        return self._scope.enter_context(self._bar)

    def __exit__(self, *error: Any) -> Any:
        return self._scope.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        with self._sampling():
            yield from self._bar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)
