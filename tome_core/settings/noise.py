"""How much noise a scheduler's steps have, whatever it counts them in.

Schedulers count in training steps, in logarithms of sigma, in angles. Each step is read as the timestep at which Stable
Diffusion's schedule has the same log-SNR, so that limits in timesteps mean the same everywhere.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .schedule import NoiseSchedule, value_at

STABLE_DIFFUSION = NoiseSchedule.stable_diffusion()
_DIGITS = 1  # of a timestep; float32 schedules are good to a hundredth
_TINY = 1e-12


class Step(NamedTuple):
    """One of a sampling. timestep: Stable Diffusion's at the same log-SNR. percent: of the model's own schedule."""

    timestep: float
    percent: float


class SchedulerNoise:
    """What the steps of a pipeline's scheduler stand for. The pipeline is asked anew which scheduler it has."""

    def __init__(self, pipeline: Any) -> None:
        try:
            self._pipeline: Callable[[], Any] = weakref.ref(pipeline)
        except TypeError:  # a class that allows none: its scheduler is the one it has now
            self._pipeline = partial(SimpleNamespace, scheduler=pipeline.scheduler)

    def steps_of(self, values: list[float]) -> list[Step]:
        """What the scheduler's own ``values``, all that its ``timesteps`` hold, stand for.

        A scheduler that tells nothing of its noise is taken to count as Stable Diffusion does.
        """
        scheduler = self._scheduler()
        sigmas = _sigmas(scheduler, values)
        if sigmas is None:
            return [by_timestep(value) for value in values]
        own = own_schedule(scheduler) or STABLE_DIFFUSION
        return [Step(round(STABLE_DIFFUSION.timestep_of_sigma(sigma), _DIGITS),
                     own.percent_of(round(own.timestep_of_sigma(sigma), _DIGITS))) for sigma in sigmas]  # fmt: skip

    def step_of(self, value: float) -> Step:
        """The step of one timestep of the scheduler, found by its value."""
        known = _list(self._scheduler(), "timesteps")
        return self.steps_of(known)[known.index(value)] if value in known else by_timestep(value)

    def _scheduler(self) -> Any:
        return getattr(self._pipeline(), "scheduler", None)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of the UNet has no pipeline


def by_timestep(value: float) -> Step:
    """A timestep of Stable Diffusion's own."""
    return Step(value, STABLE_DIFFUSION.percent_of(value))


def own_schedule(scheduler: Any) -> NoiseSchedule | None:
    """The one that the model was trained with. Betas of a scheduler without ``alphas_cumprod`` are its steps' own."""
    betas = _list(scheduler, "betas")
    trained = torch.is_tensor(getattr(scheduler, "alphas_cumprod", None))
    return NoiseSchedule(tuple(betas)) if trained and betas else None


def _sigmas(scheduler: Any, values: list[float]) -> list[float] | None:
    """The noise's deviation beside data of unit variance, of each value; None where the scheduler does not tell it."""
    config = getattr(scheduler, "config", {})
    timesteps, sigmas, kept, alphas, betas = (
        _list(scheduler, name) for name in ("timesteps", "sigmas", "alphas_cumprod", "alphas", "betas")
    )
    # by place only in the schedule that the scheduler has now: another pipeline may draw by one of its own
    count = len(timesteps) if values[: len(timesteps)] == timesteps else 0
    if 0 < count <= len(sigmas):
        is_flow = config.get("prediction_type") == "flow_prediction" or config.get("use_flow_sigmas")
        if is_flow or "FlowMatch" in type(scheduler).__name__:  # sigma parts of noise are mixed with 1 - sigma of data
            found = [sigma / max(1 - sigma, _TINY) for sigma in sigmas[:count]]
        else:
            of_data = config.get("sigma_data") or 1.0  # the deviation to which noise of deviation sigma is added
            found = [sigma / of_data for sigma in sigmas[:count]]
    elif kept:  # the share of the picture's variance that is left at each training step
        shares = (value_at(kept, value) for value in values)
        return [math.sqrt((1 - share) / max(share, _TINY)) for share in shares]
    elif 0 < count <= min(len(alphas), len(betas)):  # of the step itself, not of training: IPNDM
        found = [beta / max(alpha, _TINY) for alpha, beta in zip(alphas[:count], betas[:count], strict=True)]
    else:
        return None
    return found + found[-1:] * (len(values) - count)  # its tensor may be the beginning of a longer one


def _list(scheduler: Any, name: str) -> list[float]:
    found = getattr(scheduler, name, None)
    return found.tolist() if torch.is_tensor(found) and found.dim() == 1 else []
