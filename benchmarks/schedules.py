"""How whole pictures of a scene model are made: which timesteps a solver runs, what it starts from, and guidance.

What merging may do without depends on how noisy the steps are, and samplers differ in that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from diffusers import DDPMScheduler

from demo.sampler import GUIDANCE

UNIFORM, KARRAS, LATE_HALF = "uniform", "karras", "late-half"
SCHEDULES = (UNIFORM, KARRAS, LATE_HALF)
NOISIEST = 14.6  # Stable Diffusion's highest sigma; a schedule that ends in pure noise has none
_RHO = 7  # Karras et al. 2022, section 3


class Manner(NamedTuple):
    """One way to make pictures. late-half: a picture at half of the times, as img2img and hires passes start."""

    schedule: str = UNIFORM
    guidance: float = GUIDANCE


AS_THE_DEMO = Manner()


def timesteps(schedule: str, config: dict[str, Any], steps: int) -> list[int] | None:
    """The `steps` timesteps to run, the noisiest first; None for the solver's own. config: of the noise schedule."""
    if schedule == UNIFORM:
        return None
    count = config["num_train_timesteps"]
    if schedule == LATE_HALF:
        return (np.arange(count / 2, 0, -count / 2 / steps).round() - 1).astype(int).tolist()[:steps]
    return _karras(DDPMScheduler(**config).alphas_cumprod.double().numpy(), steps)


def _karras(kept: np.ndarray, steps: int) -> list[int]:
    """Nearest timesteps to sigmas evenly spaced in their `_RHO`-th root, each of them once."""
    sigmas = np.sqrt((1 - kept[kept > 0]) / kept[kept > 0])
    roots = np.linspace(min(NOISIEST, sigmas[-1]) ** (1 / _RHO), sigmas[0] ** (1 / _RHO), steps)
    found = np.interp(_RHO * np.log(roots), np.log(sigmas), np.arange(len(sigmas)))
    return list(dict.fromkeys(found.round().astype(int).tolist()))
