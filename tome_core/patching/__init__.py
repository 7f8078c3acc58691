"""Patching a model in place, and undoing it."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from ..model import families
from ..model.families import UnsupportedModelError, find_unet
from ..model.wrap import drop_remains
from ..reporting.report import Report
from ..running.nested import back_from
from ..settings.config import MergeConfig
from ..settings.noise import STABLE_DIFFUSION, own_schedule
from ..settings.presets import DEFAULT, TRANSFORMER, config_of
from ..settings.schedule import NoiseSchedule
from ..transformers import TransformerPatch, find_transformers, handle_on
from .handle import Patch, handle_in_force, take_by_model

logger = logging.getLogger(__name__)


def patch(
    model: Any, config: MergeConfig | str | None = None, *, strength: float | None = None, host_clock: bool = False,
    **settings: Any,
) -> Patch | TransformerPatch:  # fmt: skip
    """Merge tokens in a model, in place, until the handle is left or removed.

    model: a UNet, a compiled one, a diffusers pipeline, an LDM model, or one of diffusers' known transformers
    (`transformers.NAMES`). config: settings, or the name of a preset:
    "quality", "balanced" (None is that), "fast" or "max". strength: instead of either, from 0, which is off, to 1; see
    `tome_core.strength`. settings: keywords of `MergeConfig`, which make one, or change the one that is asked for.
    host_clock: the caller will use `Patch.set_time`, so rules in percent are no reason to speak up.
    A patch of ours that is already there is replaced; leaving the ``with`` brings it back.
    Raises UnsupportedModelError (a ValueError) where there is no LDM-style transformer block, TypeError for
    what is no model, ValueError for a strength that is none, or that comes with a config, and both for settings.

    ``patch(pipe, strength=0.3)``, ``patch(pipe, "fast")``, ``patch(pipe, "fast", seed=5)``, ``patch(pipe, ratio=0.5)``
    """
    transformers = find_transformers(model)
    if transformers:
        config = _config_of(config, strength, settings, TRANSFORMER)
        return _speak_up(TransformerPatch(transformers, config, model)).install()
    unet = find_unet(model)
    config = _config_of(config, strength, settings, families.layout_of(unet))
    handle = Patch(unet, config, _schedule_of(model))
    handle.take_the_place_of(handle_in_force(unet))
    if not host_clock and config.uses_percent and not handle.run.knows_schedule:
        logger.warning(
            "Merging is limited in percent or beta, which a bare UNet does not know: call handle.set_time(percent=...) "
            "before each step, patch the pipeline instead, or use min_timestep."
        )
    _speak_up(handle)
    handle._follow(model)
    with suppress(TypeError):  # nothing that can be referred to weakly
        handle.handed = weakref.ref(model)
    return handle.install()


def layout_of(model: Any) -> str:
    """Whose strengths a model has that `patch` takes, of `settings.presets.LAYOUTS`. Raises as `patch` does."""
    return TRANSFORMER if find_transformers(model) else families.layout_of(find_unet(model))


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


def _speak_up(handle: Any) -> Any:
    """Tell at once what of the settings reaches nothing."""
    for note in handle._notes:
        logger.warning("%s", note)
    return handle


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
    patched = [handle_on(one) for one in find_transformers(model)] or [_handle_of(model)]
    for handle in [one for latest in (*patched, take_by_model(model)) for one in back_from(latest)]:
        handle.remove()
    with suppress(UnsupportedModelError, TypeError):  # what was never patched
        for module in find_unet(model).modules():
            drop_remains(module)
    return model


def report(model: Any) -> Report:
    """What the model's patch did so far; also for a wrapped model and its inner one."""
    handle = _handle_of(model)
    return handle.report() if handle is not None else Report(patched=False)


def _handle_of(model: Any) -> Patch | TransformerPatch | None:
    transformers = find_transformers(model)
    if transformers:
        return handle_on(transformers[0])
    try:
        return handle_in_force(find_unet(model))
    except (TypeError, UnsupportedModelError):
        return None


def _schedule_of(model: Any) -> NoiseSchedule | None:
    """The noise schedule of a pipeline's scheduler, or of an LDM model itself; None for a bare UNet."""
    scheduler = getattr(model, "scheduler", None)
    if scheduler is not None:
        return own_schedule(scheduler) or (STABLE_DIFFUSION if hasattr(scheduler, "scale_model_input") else None)
    betas = getattr(model, "betas", None)
    if torch.is_tensor(betas) and betas.dim() == 1:
        return NoiseSchedule(tuple(betas.tolist()))
    return None
