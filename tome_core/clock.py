"""The clock of a diffusers pipeline: its scheduler, asked outside the UNet and without waiting for the device."""

from __future__ import annotations

from typing import Any

from .runtime import Run
from .wrap import Wrap


class SchedulerClock(Wrap):
    """Around ``scheduler.scale_model_input``, which every pipeline calls with the timestep before the UNet.

    For UNets that are compiled as a whole and cannot look at their own arguments, and for timesteps that the UNet
    gets as copies. Others find the timestep among their arguments, also after the scheduler was exchanged.
    """

    def __init__(self, scheduler: Any, run: Run) -> None:
        super().__init__(scheduler, "scale_model_input")
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the scheduler answers, after telling the run the time."""
        timestep = args[1] if len(args) > 1 else kwargs.get("timestep")
        if self.active and timestep is not None:
            self.run.tell(timestep)
        return self.original(*args, **kwargs)
