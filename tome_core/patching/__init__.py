"""Functions that put a patch on a model and take it off, and the handle of a patch."""

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
from ..engine.state import State
from ..engine.time import ModelTime
from ..measuring.pays import pays_of
from ..models import Adapter, adapter_of, find_models
from ..models.unet_blocks import UnsupportedModelError
from ..models.wrap import Wrap, drop_remains, why_missed
from ..models.wrap_set import drop_mark, put_on, take_off, wraps_on
from ..reporting.report import Report
from ..settings.config import MergeConfig
from ..settings.presets import DEFAULT, TRANSFORMER, config_of
from ..settings.schedule import STABLE_DIFFUSION, NoiseSchedule, PipelineSteps, SchedulerNoise, training_schedule

logger = logging.getLogger(__name__)
_GUIDES = ("do_classifier_free_guidance", "do_perturbed_attention_guidance")  # a pipeline's properties


def patch(
    model: Any, config: MergeConfig | str | None = None, *, strength: float | None = None, host_clock: bool = False,
    **settings: Any,
) -> Patch:  # fmt: skip
    """Merge tokens in a model, in place, until `Patch.remove` is called or the ``with`` of the patch is left.

    ``patch(pipe, strength=0.3)``, ``patch(pipe, "fast")``, ``patch(pipe, "fast", seed=5)``, ``patch(pipe, ratio=0.5)``

    Args:
        model: a UNet, a compiled UNet, a diffusers pipeline, an LDM model, or one of the supported diffusers
            transformers (`models.transformer.NAMES`).
        config: settings, or the name of a preset: "quality", "balanced", "fast" or "max". It is "balanced" if neither
            `config`, `strength` nor any of `settings` is given.
        strength: from 0, which is off, to 1, in place of `config`; see `tome_core.strength`.
        host_clock: True if the caller will call `set_time` before each step, so that limits in percent need no warning.
        settings: keywords of `MergeConfig`. They change the settings of `config` or `strength`; if neither is given,
            the defaults of `MergeConfig`, not those of a preset.

    Returns:
        The `Patch`, which is on the model. It replaces an earlier patch, which comes back when the ``with`` of the new
        one is left, but not after `Patch.remove`.

    Raises:
        UnsupportedModelError: a ValueError; the model has no known attention.
        TypeError: `model` is not a model, or a setting has the wrong type.
        ValueError: `strength` is out of range or given together with `config`, or a setting is not possible.
    """
    models = find_models(model)
    adapter = adapter_of(models[0])
    config = _config_of(config, strength, settings, adapter.layout)
    handle = Patch(models, config, _schedule_of(model), model, adapter)
    handle._previous = before = patch_on(models[0])
    if before is not None and not before._entered:
        before._previous = None  # its `with` will not be left; otherwise the chain of patches would grow
    if not host_clock and config.uses_percent and not handle.knows_schedule:
        logger.warning(
            "Merging is limited in percent or beta, which a bare model does not know: call handle.set_time(percent=...)"
            " before each step, patch the pipeline instead, or use min_timestep.")
    for note in handle.ledger.notes:
        logger.warning("%s", note)
    if adapter.layout == TRANSFORMER:
        _warn_once()
    return handle.install()


@cache
def _warn_once() -> None:
    """Log a warning, once in this process, that transformers' strengths were not measured on the user's model."""
    logger.warning("transformers' strengths and presets were chosen on one small transformer of Flux's layout; their "
                   "effect on this model was not measured, so look at your pictures")


def layout_of(model: Any) -> str:
    """Return the name of the strengths' table for a model that `patch` takes: "sd", "sdxl" or "transformer".

    A UNet has "sdxl" without attention at the latent's full size. Raises an UnsupportedModelError or a TypeError.
    """
    return adapter_of(find_models(model)[0]).layout


def _config_of(config: MergeConfig | str | None, strength: float | None, settings: dict, layout: str) -> MergeConfig:
    """Return the settings that `patch`'s arguments ask for, changed by `settings`; raise what `patch` raises.

    Without config and strength, `settings` change ``MergeConfig()``; if there are none either, these are `DEFAULT`.
    `layout`, from `layout_of`, decides what a strength or a preset's name means.
    """
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
    """Merge tokens in a model, in place, with tomesd's arguments and method, and return the model.

    `patch` has better defaults, such as proportional attention.

    Args:
        model: see `patch`.
        ratio: share of tokens merged away, 0 to 1, clamped to ``1 - 1/(sx*sy)``.
        max_downsample: merge where a token covers up to this many latent cells along a side: 1, 2, 4 or 8. None (the
            default, not in tomesd): only at the finest level that has attention.
        sx: width of a cell, in tokens.
        sy: height of a cell, in tokens.
        use_rand: draw destination tokens by `seed` and the timestep; False: take a fixed token of each cell.
        merge_attn: merge in self-attention.
        merge_crossattn: merge in cross-attention.
        merge_mlp: merge in feed-forward layers.
        seed: of the random destinations (not in tomesd).

    Raises:
        UnsupportedModelError: the model has no known attention.
        ValueError: a value is out of range.
        TypeError: a value has the wrong type.
    """
    patch(model, MergeConfig(
        ratio=ratio, max_downsample=max_downsample, sx=sx, sy=sy, use_rand=use_rand, merge_attn=merge_attn,
        merge_crossattn=merge_crossattn, merge_mlp=merge_mlp, seed=seed, proportional=False,
    ))  # fmt: skip
    return model


def remove_patch(model: Any) -> Any:
    """Take our merging off a model, a pipeline or a copy of one, and return it. Never fails, whatever `model` is."""
    try:
        models = find_models(model)
    except (UnsupportedModelError, TypeError):
        models = []
    for handle in filter(None, map(patch_on, models)):
        handle.remove()
    modules = [module for root in models for module in root.modules()]
    for target in (*modules, model):
        if hasattr(target, "__dict__"):
            drop_remains(target)
    for module in models:
        drop_mark(module)
    return model


def report(model: Any) -> Report:
    """Return the report of the patch on a model or inside a pipeline; of any other object, its `patched` is False."""
    try:
        handle = patch_on(find_models(model)[0])
    except (TypeError, UnsupportedModelError):
        handle = None
    return Report(patched=False) if handle is None else handle.report()


def _schedule_of(model: Any) -> NoiseSchedule | None:
    """Return the noise schedule of a pipeline's scheduler or of an LDM model's ``betas``; None if the model shows none.

    A scheduler without betas of the training counts as Stable Diffusion's if it has ``scale_model_input``.
    """
    scheduler = getattr(model, "scheduler", None)
    if scheduler is not None:  # one without betas of training counts as Stable Diffusion's if it scales inputs
        return training_schedule(scheduler) or (STABLE_DIFFUSION if hasattr(scheduler, "scale_model_input") else None)
    betas = getattr(model, "betas", None)
    if torch.is_tensor(betas) and betas.dim() == 1:
        return NoiseSchedule(tuple(betas.tolist()))
    return None


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
        super().__init__(config, self.adapter.tallies(), schedule)
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

        Call it again if another program removed or wrapped the patch; it goes on top. Unless it is on already, this
        asks again whether an estimate decides if merging pays, which it does not for a compiled UNet. A RuntimeError is
        raised if all models were garbage-collected.
        """
        if self.model is None:
            raise RuntimeError("the model that this handle patched is gone; patch the new one")
        self._removed = False
        if not self.is_installed:
            self.pays = pays_of(self.clock.rules, self.model, self.adapter)
        for number, model in enumerate(self._present()):
            adapter = self.adapter if number == 0 else adapter_of(model)
            before = put_on(model, adapter, self, self.levels)
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
        """Return a copy of the counts since the last reset.

        If no call was counted, and another program's wrapper lies over the patch, a note names the wrapper.
        """
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
        """Let `time` read a pipeline's scheduler, and make a wrap of its progress bar, in which each picture begins.

        `install` puts the wrap on; the scheduler gets none. Nothing is done if the settings need no time, for a UNet
        whose pipeline has no scheduler with ``scale_model_input``, or for a transformer whose pipeline has no bar. A
        UNet's bar gets a wrap only if matches are kept.
        """
        scheduler, is_unet = getattr(patched_object, "scheduler", None), self.adapter.layout != "transformer"
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


# --- a pipeline's loop ------------------------------------------------------------------------------------------------


class SamplingScope(Wrap):
    """A replacement of ``pipeline.progress_bar``, which returns the bar in a `_Bar` that tells `time` of samplings.

    Every diffusers pipeline runs the steps of its pictures inside the bar: the sampling begins and ends with it.
    """

    def __init__(self, pipeline: Any, time: ModelTime) -> None:
        super().__init__(pipeline, "progress_bar")
        self.time = time

    @property
    def target(self) -> Any:
        """The pipeline, referenced weakly because it holds the UNet; None if it is gone."""
        return None if self._target is None else self._target()

    @target.setter
    def target(self, pipeline: Any) -> None:
        """Reference a pipeline weakly; None drops the reference."""
        self._target = None if pipeline is None else weakref.ref(pipeline)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the pipeline's progress bar in a `_Bar`: a new sampling, or the rest of another pipeline's.

        It is the rest if the pipeline's ``denoising_start`` is not None.
        """
        bar = self.original(*args, **kwargs)
        continues = getattr(self._target(), "denoising_start", None) is not None  # another pipeline began it
        return _Bar(bar, partial(self.time.sample, partial(_guidance, self._target), continues=continues))


def _guidance(pipeline: weakref.ref[Any], batch: torch.Tensor) -> Guidance | None:
    """Return (number of pictures, index of the prompt's copy) for the latents of a call, by the pipeline's guidance.

    A batch has a copy of all pictures for each of: negative prompt, prompt, perturbed attention, if they are on, in
    this order. None without guidance, or if the batch is no multiple of the copies.
    """
    # a batch holds the copies for the negative prompt, the prompt, and perturbed attention, in this order
    by_prompt, by_perturbing = (bool(getattr(pipeline(), name, False)) for name in _GUIDES)
    copies = 1 + by_prompt + by_perturbing
    return (len(batch) // copies, int(by_prompt)) if copies > 1 and len(batch) % copies == 0 else None


class _Bar:
    """A stand-in for a progress bar. Its ``with`` or iteration is a sampling, begun before the bar, ended after it.

    `sampling` returns the context manager that is entered for the time of the sampling.
    """

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
