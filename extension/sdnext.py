"""The differences of SD.Next from the other webuis: SD.Next runs diffusers' pipelines, with no hook between passes."""
# a job makes new pipelines (for an image, for another kind of guidance), all around one UNet

import weakref
from collections.abc import Callable
from typing import Any

INIT_HIRES = "init_hr"
TILED = "HyperTile is on, whose tiles need every token"
_RATIOS = {"ToMe": "tome_ratio", "ToDo": "todo_ratio"}  # settings of its own merging, by method


def is_pipeline(model: Any) -> bool:
    """Tell whether a model is like a diffusers pipeline: it has `scheduler`, and `unet` or `transformer`, even None."""
    return hasattr(model, "scheduler") and (hasattr(model, "unet") or hasattr(model, "transformer"))


class RunningPipeline:
    """Attributes of the pipeline that ``running()`` returns at each access, which may be None."""

    def __init__(self, running: Callable[[], Any]) -> None:
        self._running = running

    @property
    def scheduler(self) -> Any:
        """The current pipeline's scheduler, which changes with each pass; None if it has none."""
        return getattr(self._running(), "scheduler", None)

    @property
    def unet(self) -> Any:
        """The current pipeline's UNet; its transformer if it has no UNet; None if it has neither."""
        running = self._running()
        unet = getattr(running, "unet", None)
        return getattr(running, "transformer", None) if unet is None else unet

    @property
    def steps(self) -> int:
        """The number of steps of the current pipeline's call; 0 if it does not tell."""
        return getattr(self._running(), "num_timesteps", None) or 0


def when_hires_begins(p: Any, callback: Callable[[], None]) -> None:
    """Set a method `INIT_HIRES` on `p`: its class's, then ``callback``, before the hires pass. Callers delete it."""
    this = weakref.ref(p)

    def init_hires(*args: Any, **kwargs: Any) -> None:
        job = this()
        type(job).init_hr(job, *args, **kwargs)
        callback()

    setattr(p, INIT_HIRES, init_hires)


def reason_to_step_aside(option: Callable[[str, Any], Any], hires: bool) -> str | None:
    """Return why a pass must not merge: SD.Next's own merging is on, or HyperTile in this pass; else None."""
    method = option("token_merging_method", "None")
    ratio = option(_RATIOS.get(method, ""), 0.0)
    if ratio:
        return f"SD.Next's own token merging ({method} {ratio:g}) is on; set it to None to use this extension"
    if option("hypertile_unet_enabled", False) and (hires or not option("hypertile_hires_only", False)):
        return TILED
    return None
