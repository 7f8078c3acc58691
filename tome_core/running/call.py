"""One call of the UNet and of a transformer in it: what was decided for it, and what it may use of earlier ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..merging.grid import Grid
from ..settings.schedule import LevelRules
from .decision import Decision
from .keep import KeptPlans


class Call(NamedTuple):
    """One call of the UNet. stamp: its timestep argument, what draws depend on; rules: those in force, by level.

    thread: that made it; None in a compiled one. why_off: by level. kept: plans of the calls before it in the same
    sampling; None where nothing is kept. begun: in a compiled one, where plans are kept, what `plans` there is given.
    phase: of the report.
    """

    run: Any  # the `Run` that it belongs to
    thread: int | None
    stamp: Any
    rules: tuple[LevelRules, ...]
    why_off: tuple[str, ...]
    kept: KeptPlans | None = None
    begun: torch.Tensor | None = None
    phase: str = ""


class Latents(NamedTuple):
    """What a call of the UNet was given, without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class GridCall(NamedTuple):
    """One call of a transformer in the UNet's."""

    call: Call
    batch: int
    grid: Grid
    decision: Decision


def skip(outer: GridCall, level: int, part: str, why: str) -> None:
    """Count a part that was left alone, with its products of queries and keys where it is self-attention."""
    work = outer.batch * (outer.grid.height * outer.grid.width) ** 2 if part == "attn" else 0
    outer.call.run.ledger.skip(outer.call, level, part, why, work)


class MergeMap(NamedTuple):
    """What one block merged, to be looked at. group: int64 ``[B or 1, N]`` on the CPU, the group of each token."""

    grid: Grid
    group: torch.Tensor
    num_groups: int
