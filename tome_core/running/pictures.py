"""Whose picture a call belongs to: what each thread knows of the one it makes, and samplings somebody has begun."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ..settings.noise import Step
from .keep import Guidance, KeptPlans, Sampling
from .timesteps import Timesteps

GuidanceOf = Callable[[torch.Tensor], Guidance | None]  # from the latents of a call


class Scope:
    """A sampling that somebody has begun. guidance_of: its calls' guidance; None where nobody tells.

    boundary: of the early phase in it, see `Clock.boundary_in`. is_known: nothing is to be learned of its steps.
    """

    def __init__(self, guidance_of: GuidanceOf | None, boundary: float | None = None, is_known: bool = False) -> None:
        self.guidance_of, self.boundary, self.is_known = guidance_of, boundary, is_known


class Pictures(threading.local):
    """What each thread knows of the picture it makes: pipelines that share a UNet may run at once."""

    def __init__(self) -> None:
        self.timesteps, self.sampling = Timesteps(), Sampling()
        self.scopes: list[Scope] = []  # samplings, the latest last
        self.told: Step | None = None  # the step of the UNet's next call, as the scheduler gave it
        self.kept: KeptPlans | None = None  # what a call of a compiled UNet may use
