"""The panel's line on the gain of merging: as known before a picture, or measured on request."""

from collections.abc import Mapping

from ..tome_core.hosting import MergeConfig, patch_of, pictures
from . import host
from .job_settings import HIRES, PASSES, JobSettings


def answer(settings: JobSettings, sizes: Mapping[bool, tuple[int, int]], measure: bool = False) -> str:
    """Return the panel's line, such as ``1024x1536: about 1.3x faster``, with a part for each pass that merges.

    `sizes` are each pass's (width, height) in pixels, by whether it is the hires pass. With two, each part begins with
    the name of its pass. The line says why nothing merges or no gain is known. Unknown gains are measured, which takes
    seconds, if `measure`; otherwise the model is not called.
    """
    if not settings.strength:
        return "strength 0: off"
    if settings.where == HIRES and True not in sizes:
        return "only the hires pass is to merge: turn on Hires. fix"
    if host.loaded_unet() is None:
        return "no model is loaded yet"
    configs = {hires: settings.config(hires, layout=host.layout()) for hires in sizes}
    if not any(configs.values()):
        return "the changed settings merge nothing: ratio 0, or cells of one token"
    texts = {hires: _answer(hires, *sizes[hires], config, measure) for hires, config in configs.items() if config}
    return "; ".join(f"{PASSES[hires]} {text}" if len(sizes) > 1 else text for hires, text in texts.items())


def _answer(hires: bool, width: int, height: int, config: MergeConfig, measure: bool) -> str:
    """Return ``size: text`` of a pass: gain (known, measured if `measure`, or of own pictures), why not, or error."""
    size, unet, aside = f"{width}x{height}", host.loaded_unet(), host.reason_to_step_aside(hires)
    if aside is not None:
        return f"{size}: nothing merges, {aside}"
    try:
        patch = patch_of(unet, config)
        gain = patch.gain_for(height, width)
        if gain is None and measure:
            reason = host.reason_of_unet(unet)  # left from the last job; the next job turns it off
            if reason:
                return f"{size}: not measured, {reason}"
            gain = host.run_as_job(lambda: patch.measure(height, width))
        if gain is not None:
            return gain.line
        why = patch.why_not(height, width)
        own = "" if why else pictures.known_gain(unet, config, height, width)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # an unknown model, or a job in progress
        return f"{size}: {str(error).splitlines()[0]}"
    return f"{size}: {f'nothing merges, {why}' if why else own or 'not measured yet'}"
