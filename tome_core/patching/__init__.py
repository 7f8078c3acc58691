"""Patching a model in place, and undoing it."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ..models.find import adapter_of, find_models
from ..models.unet_blocks import UnsupportedModelError
from ..models.wrap import drop_remains
from ..models.wrap_set import drop_mark
from ..reporting.report import Report
from ..settings.config import MergeConfig
from ..settings.noise import STABLE_DIFFUSION, own_schedule
from ..settings.presets import DEFAULT, TRANSFORMER, config_of
from ..settings.schedule import NoiseSchedule
from .handle import OF_HANDED, Patch, back_from, handle_on

logger = logging.getLogger(__name__)


def patch(
    model: Any, config: MergeConfig | str | None = None, *, strength: float | None = None, host_clock: bool = False,
    **settings: Any,
) -> Patch:  # fmt: skip
    """Merge tokens in a model, in place, until the handle is left or removed.

    ``patch(pipe, strength=0.3)``, ``patch(pipe, "fast")``, ``patch(pipe, "fast", seed=5)``, ``patch(pipe, ratio=0.5)``

    Args:
        model: a UNet, a compiled one, a diffusers pipeline, an LDM model, or one of diffusers' known transformers
            (`models.transformer_layouts.NAMES`).
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
    handle.take_the_place_of(handle_on(models[0]))
    if not host_clock and config.uses_percent and not handle.knows_schedule:
        logger.warning(
            "Merging is limited in percent or beta, which a bare model does not know: call "
            "handle.set_time(percent=...) before each step, patch the pipeline instead, or use min_timestep."
        )
    for note in handle._notes:
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
    if strength is not None:
        if config is not None:
            raise ValueError(f"strength={strength!r} and config={config!r} both say what merges; give one of them")
        config = config_of(strength, layout)
    elif config is None:
        config = MergeConfig() if settings else config_of(DEFAULT, layout)
    elif isinstance(config, str):
        config = config_of(config, layout)
    if not isinstance(config, MergeConfig):
        raise TypeError(f"config is {type(config).__name__}; it has to be a MergeConfig, a preset's name, or None")
    return replace(config, **settings) if settings else config


def apply_patch(
    model: Any, ratio: float = 0.5, max_downsample: int | None = None, sx: int = 2, sy: int = 2, use_rand: bool = True,
    merge_attn: bool = True, merge_crossattn: bool = False, merge_mlp: bool = False, seed: int = 0,
) -> Any:  # fmt: skip
    """Merge tokens in a model, in place, and return the model. Takes tomesd's arguments and does what tomesd does.

    `patch` does more, and by default better: with proportional attention.
    ratio: share of tokens merged away, 0..1, clamped to ``1 - 1/(sx*sy)``. max_downsample: 1, 2, 4 or 8;
    None, unlike tomesd, is the finest level that has attention. use_rand: draw destinations from ``seed``
    and the timestep. Raises ValueError or TypeError for values outside, UnsupportedModelError for a model
    without LDM-style blocks.

        tome_core.apply_patch(pipe, ratio=0.5)
        image = pipe("a lake").images[0]
        tome_core.remove_patch(pipe)
    """
    config = MergeConfig(
        ratio=ratio, max_downsample=max_downsample, sx=sx, sy=sy, use_rand=use_rand, merge_attn=merge_attn,
        merge_crossattn=merge_crossattn, merge_mlp=merge_mlp, seed=seed, proportional=False,
    )  # fmt: skip
    patch(model, config)
    return model


def remove_patch(model: Any) -> Any:
    """Take our merging off a model and return the model. Does nothing, and never fails, where there is none.

    Of a pipeline whose UNet was exchanged since, it is taken off the old one.
    """
    try:
        models = find_models(model)
    except (UnsupportedModelError, TypeError):
        models = []
    found = [handle_on(one) for one in models]
    with suppress(TypeError):  # nothing that has a hash, or can be referred to weakly
        handed = OF_HANDED.pop(model, None)
        found.append(None if handed is None or handed._removed else handed)
    for latest in found:
        for handle in list(back_from(latest)):
            handle.remove()
    modules = [one for module in models for one in module.modules()]
    for target in (*modules, model, getattr(model, "scheduler", None)):
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
