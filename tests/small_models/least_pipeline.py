"""The least pipeline that a patch accepts: a UNet, a scheduler and a loop."""

import contextlib
from typing import Any

import torch
from diffusers import DDIMScheduler

from tests.small_models.unets import call_unet, inputs, sd15


class Pipeline:
    """The parts of a pipeline that the patch uses."""

    def __init__(self, scheduler: Any = None) -> None:
        self.unet, self.scheduler = sd15(), scheduler or DDIMScheduler()

    def progress_bar(self, total: int) -> Any:
        return contextlib.nullcontext(range(total))


def picture(pipe: Any, steps: int = 2) -> torch.Tensor:
    x, text = inputs(4, 1, 8, 8)
    pipe.scheduler.set_timesteps(steps)
    with torch.no_grad(), pipe.progress_bar(total=steps):
        for timestep in pipe.scheduler.timesteps:
            scaled = pipe.scheduler.scale_model_input(x, timestep)
            x = pipe.scheduler.step(call_unet(pipe.unet, scaled, timestep, text), timestep, x).prev_sample
    return x
