"""Unmerged and merged calls of a UNet, timed in turns: what merging gains over the steps of a picture.

Some steps match anew, some use what is kept. So each kind of step is timed a few times, and its median counts as often
as a picture has it. Nothing is timed in anybody's sampling, so the device may be waited for.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..engine.state import State
from ..engine.time import Clock
from ..models.unet_blocks import brings_compiled, is_compiled
from ..models.wrap import is_wrapped_by_others

ROUNDS, STEPS = 3, 20
_FIRST = 999.0  # timestep of a picture's first step

Timer = Callable[[], float]


def why_not_now(unet: nn.Module, state: State, is_called: bool, handed: Any = None) -> str:
    """Why the UNet's calls cannot be timed, and what to do about it; "" if they can.

    is_called: this thread is inside a call of the UNet. handed: see `patch`.
    """
    if state.time.is_sampling or is_called:
        return "a sampling goes on; measure before it or after it"
    if is_compiled(unet, state.adapter.places) or brings_compiled(handed):
        return "the UNet is compiled, and compiled calls are not measured; measure before compiling it"
    # by chance: a host that never trains may leave its UNet in training, in which nothing is dropped
    if any(isinstance(one, nn.Dropout) and one.training and one.p > 0 for one in unet.modules()):
        return "the UNet is in training, whose calls draw random numbers; call its eval() first"
    if is_wrapped_by_others(unet):
        return (
            "somebody else's wrapper lies on the UNet and would take the measurement for steps of a picture; measure "
            "before it is put on"
        )
    return ""


def whereabouts(unet: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where the UNet computes, and in what; accelerate brings one there only for its calls."""
    weight = next(one for one in unet.parameters() if one.is_floating_point())
    device = getattr(getattr(unet, "_hf_hook", None), "execution_device", None)
    return torch.device(weight.device if device is None else device), weight.dtype


class TimedStep(NamedTuple):
    """One step of a picture. kind: steps of one kind take equally long; None where no rule holds."""

    timestep: float
    kind: Hashable


def steps_of(clock: Clock, steps: int) -> list[TimedStep]:
    """The steps of a picture, evenly spaced: by which rules they merge, and whether they match anew for it.

    Where rules keep their matches for different times, a step at which any of them matches counts as one that does.
    """
    found, before, matched = [], None, 0.0
    for number in range(steps):
        timestep = _FIRST * (1 - number / steps)
        now = clock.at(clock.moment(timestep))
        if not now.live:
            before, kind = None, None
        elif now is not before:
            before, matched, kind = now, timestep, (id(now), "new")
        elif matched - timestep > min(rule.keep for rule in now.live):
            matched, kind = timestep, (id(now), "renewed")
        else:
            kind = (id(now), "kept")
        found.append(TimedStep(timestep, kind))
    return found


class Seconds(NamedTuple):
    """Of an unmerged call, and of a merged one on the average of a picture's steps. spread: see `Gain`."""

    unmerged: float
    merged: float
    spread: float


def time_calls(
    patch: Any, call: Callable[[torch.Tensor, torch.Tensor], Any], latents: torch.Tensor, pictures: int,
    steps: int = STEPS, rounds: int = ROUNDS, clock: Timer | None = None,
) -> Seconds:  # fmt: skip
    """Time them. patch: a `Patch` that is installed. call: of (latents ``[B, C, H, W]``, timesteps ``[B]``).

    pictures: as of `Patch.set_time`.
    """
    clock = clock or clock_for(latents.device)
    picture = steps_of(patch.clock, steps)
    unmerged: list[float] = []
    merged: dict[Hashable, list[float]] = {}

    def time_call(timestep: float) -> float:
        timesteps = torch.full((len(latents),), timestep, device=latents.device)
        _wait(latents.device)
        start = clock()
        call(latents, timesteps)
        _wait(latents.device)
        return clock() - start

    def plainly() -> None:
        with patch.unmerged():
            unmerged.append(time_call(picture[0].timestep))

    def one_round() -> None:
        sampling, seen = object(), set()
        for timestep, kind in picture:
            if kind is None or kind in seen:
                continue
            if len(seen) % 2 == 0:
                plainly()
            seen.add(kind)
            patch.set_time(timestep=timestep, sampling=sampling, pictures=pictures)
            merged.setdefault(kind, []).append(time_call(timestep))

    if latents.device.type == "cpu":
        plainly()
    else:  # kernels are chosen or compiled, and memory is taken, at the first call of each kind
        one_round()
    unmerged.clear()
    merged.clear()
    for _ in range(rounds):
        one_round()
    plain = statistics.median(unmerged) if unmerged else 0.0
    share = Counter(kind for _, kind in picture)
    whole = sum(count * (plain if kind is None else statistics.median(merged[kind])) for kind, count in share.items())
    return Seconds(plain, whole / steps, (max(unmerged) - min(unmerged)) / plain if plain else 0.0)


def clock_for(device: torch.device) -> Timer:
    """On one thread of a CPU the process's own time, which another program's load costs its evenness, not its value."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
