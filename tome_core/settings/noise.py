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

from .schedule import NoiseSchedule

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
        log_snrs = _log_snrs(scheduler, values)
        if log_snrs is None:
            return [by_timestep(value) for value in values]
        own = own_schedule(scheduler) or STABLE_DIFFUSION
        sigmas = [math.exp(-log_snr / 2) for log_snr in log_snrs]
        return [Step(round(STABLE_DIFFUSION.timestep_of_sigma(sigma), _DIGITS),
                     own.percent_of(round(own.timestep_of_sigma(sigma), _DIGITS))) for sigma in sigmas]  # fmt: skip

    def step_of(self, value: float) -> Step:
        """The step of one timestep of the scheduler, found by its value."""
        steps = getattr(self._scheduler(), "timesteps", None)
        known = steps.tolist() if torch.is_tensor(steps) and steps.dim() == 1 else []
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
    betas = getattr(scheduler, "betas", None)
    trained = torch.is_tensor(getattr(scheduler, "alphas_cumprod", None))
    if not trained or not torch.is_tensor(betas) or betas.dim() != 1:
        return None
    return NoiseSchedule(tuple(betas.tolist()))


def _log_snrs(scheduler: Any, values: list[float]) -> list[float] | None:
    # by place only in the schedule that the scheduler has now: another pipeline may draw by one of its own. Its tensor
    # may be the beginning of a longer one.
    own = _list(scheduler, "timesteps", 1) or []
    count = len(own) if own and values[: len(own)] == own else 0
    sigmas = _list(scheduler, "sigmas", count) if count else None
    if sigmas is not None:
        sigmas = _draw_out(sigmas[:count], len(values))
        if _is_flow(scheduler):  # data and noise are mixed, sigma parts of noise to 1 - sigma of data
            return [2 * math.log(max(1 - sigma, _TINY) / max(sigma, _TINY)) for sigma in sigmas]
        of_data = _config(scheduler, "sigma_data", 1.0)  # the deviation to which noise of deviation sigma is added
        return [-2 * math.log(max(sigma, _TINY) / of_data) for sigma in sigmas]
    kept = _list(scheduler, "alphas_cumprod", 1)
    if kept is not None:
        return [_of_kept(kept, value) for value in values]
    alphas, betas = (_list(scheduler, name, count) if count else None for name in ("alphas", "betas"))
    if alphas is not None and betas is not None:  # of the step itself, not of training: IPNDM
        pairs = zip(alphas[:count], betas[:count], strict=True)
        return _draw_out([2 * math.log(max(alpha, _TINY) / max(beta, _TINY)) for alpha, beta in pairs], len(values))
    return None


def _draw_out(values: list[float], count: int) -> list[float]:
    """So many of them, the last one again and again."""
    return values + values[-1:] * (count - len(values))


def _of_kept(kept: list[float], timestep: float) -> float:
    """From the share of the picture's variance that is kept at each training step, linear between them."""
    place = min(len(kept) - 1.0, max(0.0, timestep))
    below = int(place)
    share = kept[below] + (place - below) * (kept[min(below + 1, len(kept) - 1)] - kept[below])
    return math.log(max(share, _TINY)) - math.log(max(1 - share, _TINY))


def _list(scheduler: Any, name: str, least: int) -> list[float] | None:
    found = getattr(scheduler, name, None)
    if not torch.is_tensor(found) or found.dim() != 1 or len(found) < least:
        return None
    return found.tolist()


def _is_flow(scheduler: Any) -> bool:
    predicts = _config(scheduler, "prediction_type", "") == "flow_prediction"
    return predicts or bool(_config(scheduler, "use_flow_sigmas", False)) or "FlowMatch" in type(scheduler).__name__


def _config(scheduler: Any, name: str, default: Any) -> Any:
    config = getattr(scheduler, "config", None)
    value = config.get(name) if hasattr(config, "get") else None
    return default if value is None else value
