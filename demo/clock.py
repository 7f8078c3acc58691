"""Tells a merging model how late each step is, where its source knows that and no scheduler does."""

from __future__ import annotations

from collections.abc import Callable

import tome_core
from demo.source import Source


def told_times(
    source: Source, steps: int, merging: tome_core.Patch, on_step: Callable[[], None]
) -> Callable[[], None]:
    """An `on_step` for one picture: tells the time of the step that comes next, then calls the given one.

    The first step's time is told at once.
    """
    times, sampling = iter(source.timesteps(steps) or ()), object()

    def tell() -> None:
        if (timestep := next(times, None)) is not None:
            merging.set_time(timestep=timestep, sampling=sampling)

    def stepped() -> None:
        tell()
        on_step()

    tell()
    return stepped
