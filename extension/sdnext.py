"""The differences of SD.Next from the other webuis: it runs diffusers' pipelines, and calls no hook between passes.

A job makes new pipelines (for an image, for another kind of guidance), all around one UNet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

INIT_HIRES = "init_hr"
TILED = "HyperTile is on, whose tiles need every token"
_RATIOS = {"ToMe": "tome_ratio", "ToDo": "todo_ratio"}  # settings of its own merging, by method


def is_pipeline(model: Any) -> bool:
    """Tell whether a model is a diffusers pipeline of any architecture."""
    return hasattr(model, "scheduler") and (hasattr(model, "unet") or hasattr(model, "transformer"))


class RunningPipeline:
    """A stand-in for the pipeline that runs at the moment, with the attributes that the engine reads.

    Args:
        running: returns the current pipeline.
    """

    def __init__(self, running: Callable[[], Any]) -> None:
        self._running = running

    @property
    def scheduler(self) -> Any:
        """The scheduler, which each pass exchanges."""
        return getattr(self._running(), "scheduler", None)

    @property
    def unet(self) -> Any:
        """The UNet, or the transformer of a model without a UNet."""
        running = self._running()
        unet = getattr(running, "unet", None)
        return getattr(running, "transformer", None) if unet is None else unet


def when_hires_begins(p: Any, callback: Callable[[], None]) -> None:
    """Call ``callback`` just before the hires pass of ``p`` begins, when its size is known."""
    this = weakref.ref(p)

    def init_hires(*args: Any, **kwargs: Any) -> None:
        job = this()
        type(job).init_hr(job, *args, **kwargs)
        callback()

    setattr(p, INIT_HIRES, init_hires)


def reason_to_step_aside(option: Callable[[str, Any], Any], hires: bool) -> str | None:
    """Return why a pass must not merge, see `host`: SD.Next's own merging, which comes after ours, or HyperTile."""
    method = option("token_merging_method", "None")
    ratio = option(_RATIOS.get(method, ""), 0.0)
    if ratio:
        return f"SD.Next's own token merging ({method} {ratio:g}) is on; set it to None to use this extension"
    if option("hypertile_unet_enabled", False) and (hires or not option("hypertile_hires_only", False)):
        return TILED
    return None
