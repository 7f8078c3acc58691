"""Tells a merging model how late each step is, where its source knows that and no scheduler does."""

from __future__ import annotations

import tome_core
from demo.source import OnStep, Source


def tell_times(source: Source, steps: int, merging: tome_core.Patch, on_step: OnStep) -> OnStep:
    """An `on_step` for one picture: tells the next step's time, then calls the given one; tells the first's at once."""
    times, sampling = iter(source.timesteps(steps) or ()), object()

    def tell() -> None:
        if (timestep := next(times, None)) is not None:
            merging.set_time(timestep=timestep, sampling=sampling)

    def stepped() -> None:
        tell()
        on_step()

    tell()
    return stepped
