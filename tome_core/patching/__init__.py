"""Functions that put a patch on a model, take it off, and report on it."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ..engine.scheduler_steps import training_schedule
from ..models import adapter_of, find_models
from ..models.unet_blocks import UnsupportedModelError
from ..models.wrap import drop_remains
from ..models.wrap_set import drop_mark
from ..reporting.report import Report
from ..settings.config import MergeConfig
from ..settings.presets import DEFAULT, TRANSFORMER, config_of
from ..settings.schedule import STABLE_DIFFUSION, NoiseSchedule
from .handle import Patch, patch_on

logger = logging.getLogger(__name__)


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
    config = _config_of(config, strength, settings, adapter.curve)
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
    if adapter.curve == TRANSFORMER:
        _warn_once()
    return handle.install()


@cache
def _warn_once() -> None:
    """Log a warning, once in this process, that transformers' strengths were not measured on the user's model."""
    logger.warning("transformers' strengths and presets were chosen on two small transformers of Flux's layout; their "
                   "effect on this model was not measured, so look at your pictures")


def curve_of(model: Any) -> str:
    """Return the name of the curve of strengths for a model that `patch` takes: "sd", "sdxl" or "transformer".

    A UNet has "sdxl" without attention at the latent's full size. Raises an UnsupportedModelError or a TypeError.
    """
    return adapter_of(find_models(model)[0]).curve


def _config_of(config: MergeConfig | str | None, strength: float | None, settings: dict, curve: str) -> MergeConfig:
    """Return the settings that `patch`'s arguments ask for, on a curve of `curve_of`; raise what `patch` raises."""
    if strength is not None and config is not None:
        raise ValueError(f"strength={strength!r} and config={config!r} both say what merges; give one of them")
    if strength is None and config is None:
        config = MergeConfig() if settings else config_of(DEFAULT, curve)
    elif strength is not None or isinstance(config, str):
        config = config_of(config if strength is None else strength, curve)
    if not isinstance(config, MergeConfig):
        raise TypeError(f"config is {type(config).__name__}; it has to be a MergeConfig, a preset's name, or None")
    return replace(config, **settings) if settings else config


def apply_patch(
    model: Any, ratio: float = 0.5, max_downsample: int | None = None, sx: int = 2, sy: int = 2, use_rand: bool = True,
    merge_attn: bool = True, merge_crossattn: bool = False, merge_mlp: bool = False, seed: int = 0,
) -> Any:  # fmt: skip
    """Merge tokens in a model, in place, with tomesd's arguments and method, and return the model.

    `patch` has better defaults, such as proportional attention, and raises the same errors. In transformers, which
    tomesd does not patch, queries, keys and values merge after their projections, by the keys.

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
    """Return the noise schedule of a pipeline's scheduler or of an LDM model's ``betas``; None if it shows none."""
    scheduler = getattr(model, "scheduler", None)
    if scheduler is not None:  # one without betas of training counts as Stable Diffusion's if it scales inputs
        return training_schedule(scheduler) or (STABLE_DIFFUSION if hasattr(scheduler, "scale_model_input") else None)
    betas = getattr(model, "betas", None)
    if torch.is_tensor(betas) and betas.dim() == 1:
        return NoiseSchedule(tuple(betas.tolist()))
    return None
