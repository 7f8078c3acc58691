"""The panel's line on the next picture: the gain in the user's own pictures, or what to expect, and why."""

from collections.abc import Mapping
from typing import Any

from ..tome_core.hosting import MergeConfig, expected_share, pictures, why_not_at
from . import host
from .job_settings import HIRES, PASSES, JobSettings

_LEAST = 0.02  # a smaller share of the work is told as hardly any


def answer(settings: JobSettings, sizes: Mapping[bool, tuple[int, int]]) -> str:
    """Return the panel's line, such as ``1024x1536: about 1.3x faster, ...``, with a part for each pass that merges.

    `sizes` are each pass's (width, height) in pixels, by whether it is the hires pass. The model is not called.
    """
    if not settings.strength:
        return "strength 0: off"
    if settings.where == HIRES and True not in sizes:
        return "only the hires pass is to merge: turn on Hires. fix, or set Where to everywhere"
    if host.loaded_unet() is None:
        return "no model is loaded yet"
    configs = {hires: settings.config(hires, curve=host.curve()) for hires in sizes}
    if not any(configs.values()):
        return "the changed settings merge nothing: ratio 0, or cells of one token"
    texts = {hires: _answer(hires, *sizes[hires], config) for hires, config in configs.items() if config}
    return "; ".join(f"{PASSES[hires]} {text}" if len(sizes) > 1 else text for hires, text in texts.items())


def _answer(hires: bool, width: int, height: int, config: MergeConfig) -> str:
    """Return ``size: text`` of a pass: the gain in own pictures, why nothing merges, or an error."""
    size, unet, aside = f"{width}x{height}", host.loaded_unet(), host.reason_to_step_aside(hires)
    if aside is not None:
        return f"{size}: nothing merges, {aside}"
    try:
        why = why_not_at(unet, config, height, width)
        if why:
            return f"{size}: nothing merges, {why}"
        return f"{size}: {pictures.known_gain(unet, config, height, width) or expected(unet, config, height, width)}"
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # an unknown model, or an impossible size
        return f"{size}: {str(error).splitlines()[0]}"


def expected(unet: Any, config: MergeConfig, height: int, width: int) -> str:
    """Return what to expect of pictures whose gain was not measured yet, as a text: ``about 38% less work ...``.

    Call it for a size in pixels at which `why_not_at` gives "": something merges there. `unet` is the loaded model;
    it is not called. `config` has the settings of the pass. An UnsupportedModelError or a TypeError is raised if the
    model cannot be patched.
    """
    share = expected_share(unet, config, height, width)
    if share is None:
        return "merges; draw three pictures with merging and three without to see the gain"
    if share < _LEAST:
        return "merges, but hardly less work is expected of these settings at this size"
    gain = 1 / (1 - share)
    return f"about {share:.0%} less work expected in 20 steps, so up to {gain:.{1 if gain >= 1.1 else 2}f}x faster"
