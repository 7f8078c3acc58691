"""One call of a model, and what was merged in it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ..merging.grid import Grid
from ..settings.schedule import LevelRules
from .plan_cache import KeptPlans


class Call(NamedTuple):
    """One call of a model.

    stamp: its timestep argument, what draws depend on. rules: those in force, by level. why_off: by level, why there
    are none. kept: plans of the calls before it in the same sampling; None if nothing is kept. phase: of the report.
    turns: how often each attention was called in it so far.
    """

    stamp: Any
    rules: tuple[LevelRules, ...]
    why_off: tuple[str, ...]
    kept: KeptPlans | None
    phase: str
    turns: dict[Hashable, int]


class Latents(NamedTuple):
    """What a call of a UNet was given, without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class MergeMap(NamedTuple):
    """What one attention merged, to be looked at. group: int64 ``[B or 1, N]`` on the CPU, the group of each token."""

    grid: Grid
    group: torch.Tensor
    num_groups: int
