"""Whether merging pays here, in a line: as is known before a picture, or measured on request."""

from __future__ import annotations

from collections.abc import Mapping

from ..tome_core.hosting import MergeConfig, patch_of, pictures
from . import host
from .wish import HIRES, PASSES, Wish


def answer(wish: Wish, sizes: Mapping[bool, tuple[int, int]], measure: bool = False) -> str:
    """``1024x1536: about 1.3x faster``, for each pass that merges.

    sizes: width and height in pixels, by: is it the hires pass. measure: what is not known; else no model is called.
    """
    if not wish.strength:
        return "strength 0: off"
    if wish.where == HIRES and True not in sizes:
        return "only the hires pass is to merge: turn on Hires. fix"
    if host.loaded_unet() is None:
        return "no model is loaded yet"
    configs = {hires: wish.config(hires, layout=host.layout()) for hires in sizes}
    told = {hires: _answer(hires, *sizes[hires], config, measure) for hires, config in configs.items() if config}
    return "; ".join(f"{PASSES[hires]} {text}" if len(sizes) > 1 else text for hires, text in told.items())


def _answer(hires: bool, width: int, height: int, config: MergeConfig, measure: bool) -> str:
    size, unet, aside = f"{width}x{height}", host.loaded_unet(), host.reason_to_step_aside(hires)
    if aside is not None:
        return f"{size}: nothing merges, {aside}"
    try:
        patch = patch_of(unet, config)
        gain = patch.gain_for(height, width)
        if gain is None and measure:
            stayed = host.reason_of_unet(unet)  # from the last job; it is off in the next
            if stayed:
                return f"{size}: not measured, {stayed}"
            gain = host.on_the_card(lambda: patch.measure(height, width))
        if gain is not None:
            return gain.line
        why = patch.why_not(height, width)
        own = "" if why else pictures.told(unet, config, height, width)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # of a model that we do not know, or a job
        return f"{size}: {str(error).splitlines()[0]}"
    return f"{size}: {f'will not merge, {why}' if why else own or 'not measured yet'}"
