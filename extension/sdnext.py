"""What SD.Next does otherwise than the other webuis: it runs diffusers' pipelines, and calls no hook between passes.

A job makes new pipelines as it goes (for an image, for guidance of another kind), all around one UNet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

INIT_HIRES = "init_hr"
TILED = "HyperTile is on, whose tiles need every token"
_RATIOS = {"ToMe": "tome_ratio", "ToDo": "todo_ratio"}  # of its own merging, by method


def is_pipeline(model: Any) -> bool:
    """Is it one of diffusers' pipelines, of whatever architecture?"""
    return hasattr(model, "scheduler") and (hasattr(model, "unet") or hasattr(model, "transformer"))


class RunningPipeline:
    """What the engine asks a pipeline for, answered by whichever runs at that moment. running: says which."""

    def __init__(self, running: Callable[[], Any]) -> None:
        self._running = running

    @property
    def scheduler(self) -> Any:
        """Exchanged by each pass."""
        return getattr(self._running(), "scheduler", None)

    @property
    def unet(self) -> Any:
        """The UNet, or what a model without one has in its place."""
        running = self._running()
        unet = getattr(running, "unet", None)
        return getattr(running, "transformer", None) if unet is None else unet


def when_hires_begins(p: Any, tell: Callable[[], None]) -> None:
    """Have ``tell`` called once the hires pass of ``p`` knows its size, just before it begins. Dies with ``p``."""
    this = weakref.ref(p)

    def init_hires(*args: Any, **kwargs: Any) -> None:
        job = this()
        type(job).init_hr(job, *args, **kwargs)
        tell()

    setattr(p, INIT_HIRES, init_hires)


def reason_to_step_aside(option: Callable[[str, Any], Any], hires: bool) -> str | None:
    """As of `host`: its own merging is put on after ours, and HyperTile in its own way."""
    method = option("token_merging_method", "None")
    ratio = option(_RATIOS.get(method, ""), 0.0)
    if ratio:
        return f"SD.Next's own token merging ({method} {ratio:g}) is on; set it to None to merge by this one"
    if option("hypertile_unet_enabled", False) and (hires or not option("hypertile_hires_only", False)):
        return TILED
    return None
