"""The state of a patched UNet while it runs: its clock, the rules in force, and what one call knows."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from .config import MergeConfig, MergeRule
from .grid import Grid
from .keep import KeptPlans, Sampling
from .phases import plain_rules
from .report import TIME_IS_UNKNOWN, Ledger
from .schedule import UNKNOWN, LevelRules, NoiseSchedule, Time, choose, live_at, reaches
from .timesteps import Timesteps

_PIXELS_PER_LATENT = 8 * 8  # Stable Diffusion's latent is an eighth of the picture along each side


class Call(NamedTuple):
    """One call of the UNet. stamp: its timestep argument, what draws depend on; rules: those in force, by level.

    plans: those that a level's blocks share, by level, part and shape; they end with the call. kept: those of the
    calls before it in the same sampling; None where nothing is kept.
    """

    stamp: Any
    rules: tuple[LevelRules, ...]
    plans: dict[tuple, Any]
    kept: KeptPlans | None = None


class GridCall(NamedTuple):
    """One call of a transformer: the UNet call it belongs to, and the picture's batch and token grid."""

    call: Call
    batch: int
    grid: Grid


class MergeMap(NamedTuple):
    """What one block merged, to be looked at. group: int64 ``[B or 1, N]`` on the CPU, the group of each token."""

    grid: Grid
    group: torch.Tensor
    num_groups: int


class Pictures(threading.local):
    """What each thread knows of the picture it makes: pipelines that share a UNet may run at once.

    told: time and picture of the UNet's next call, as the scheduler gave them.
    """

    def __init__(self) -> None:
        self.timesteps = Timesteps()
        self.sampling = Sampling()
        self.told: tuple[float, int] | None = None


class Run:
    """Clock, rules in force and counts of one patch.

    config: the settings. downsamples: of each level. schedule: ties the scales of time together; None on a
    bare UNet, which knows its timestep alone. in_pipeline: the UNet's timesteps are a scheduler's, and name pictures.
    lock: one call of the UNet at a time, because its sites tell each other what they know of it.
    """

    def __init__(
        self, config: MergeConfig, downsamples: Sequence[int], schedule: NoiseSchedule | None, ledger: Ledger
    ) -> None:
        self.config = config
        self.downsamples = tuple(downsamples)
        self.knows_schedule = schedule is not None
        # times given in percent or sigma from outside are Stable Diffusion's where nothing else is known
        self.schedule = schedule or NoiseSchedule.stable_diffusion()
        self.ledger = ledger
        self.in_order = plain_rules(config.rules, self.downsamples)
        self.uses_time = any(rule.uses_time for rule in self.in_order)
        self.uses_pixels = any(rule.min_pixels for rule in self.in_order)
        self.wants_time = self.uses_time or any(rule.keep for rule in self.in_order)
        self.time_is_given = False
        self.in_pipeline = False
        self.sampling = Sampling()  # the one that `set_time` named
        self._mine, self.lock = Pictures(), threading.RLock()
        self.call: Call | None = None
        self.why_off: tuple[str, ...] = ()  # by level
        self.live: tuple[MergeRule, ...] = ()
        self.rules: tuple[LevelRules, ...] = ()
        self.maps: dict[int, MergeMap] | None = None
        self._choices: dict[tuple[LevelRules, ...], tuple[LevelRules, ...]] = {}
        self._choose(UNKNOWN)

    @property
    def lacks_schedule(self) -> bool:
        """True where a rule is limited on a scale that the timestep argument alone does not give."""
        limited = any(rule.uses_percent or rule.max_beta is not None for rule in self.in_order)
        return limited and not self.knows_schedule

    def set_time(
        self, percent: float | None, timestep: float | None, sigma: float | None, sampling: Hashable = None
    ) -> None:
        """Take the time from outside until further notice; all None hands the clock back to the UNet's argument.

        Whichever is given, the schedule supplies the other scales. sampling: see `Sampling.set`.
        """
        self.time_is_given = not (percent is None and timestep is None and sigma is None)
        if sigma is not None and timestep is None:
            timestep = self.schedule.timestep_of_sigma(sigma)
        if percent is not None and timestep is None:
            timestep = self.schedule.timestep_of(percent)
        with self.lock:  # a call that goes on in another thread keeps its rules
            self.sampling.set(sampling, timestep)
            self._choose(self._moment(timestep, percent, everything=True))

    def tell(self, timestep: Any) -> None:
        """The timestep of the next call of the UNet, from a pipeline's scheduler; `set_time` outweighs it."""
        if self.time_is_given or (torch.is_tensor(timestep) and timestep.numel() != 1):
            return
        mine = self._mine
        mine.told = told = mine.timesteps.look(timestep) or mine.timesteps.read(timestep)
        with self.lock:
            self._choose(self._moment(told[0], None, everything=True))

    def begin(self, timestep: Any, latent: Any) -> None:
        """A call of the UNet starts; these are its arguments.

        timestep: a number, or a tensor ``[]`` or ``[B]``. latent: ``[B, C, H, W]``, only its size is looked at.
        """
        if not torch.compiler.is_compiling():
            self.ledger.begin_call()
            if self.wants_time and not self.time_is_given and not is_captured(latent):
                self._look_at(timestep)
        rules = self.rules
        if self.uses_pixels and torch.is_tensor(latent) and latent.dim() == 4:
            pixels = latent.shape[2] * latent.shape[3] * _PIXELS_PER_LATENT
            rules = choose(self.live, self.downsamples, pixels)
        self.call = Call(timestep, rules, {}, self._kept(latent))

    def _look_at(self, timestep: Any) -> None:
        """The time of this call: among its arguments, as the scheduler gave it, or by waiting for the device."""
        mine = self._mine
        found = (mine.timesteps.look(timestep) if self.in_pipeline else None) or mine.told
        mine.told = None  # a scheduler that is no longer asked must not stop the clock
        value, picture = found or (None, None)
        mine.sampling.set(picture, value)
        if found is not None:
            self._choose(self._moment(value, None, everything=True))
        elif self.uses_time:
            self._choose(self._moment(_common_value(timestep), None, everything=self.knows_schedule))

    def _kept(self, latent: Any) -> KeptPlans | None:
        """Inside a compiled model kept plans would be a graph's outputs; a backward pass would meet later ones.

        In a CUDA graph they would lie where its next replay writes, or be gone when it reads them.
        """
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or is_captured(latent):
            return None
        return (self.sampling if self.time_is_given else self._mine.sampling).next_call()

    def end(self) -> None:
        """The call is over; nothing of it is kept."""
        self.call = None

    def call_without_time(self, x: Any) -> Call:
        """What stands for the UNet's call where somebody runs a part of it by itself. x: the part's input."""
        return Call(None, self.rules, {}, self._kept(x))

    def _moment(self, timestep: float | None, percent: float | None, everything: bool) -> Time:
        if timestep is None:
            return Time(percent=percent)
        if not everything:
            return Time(timestep=timestep)
        exact = self.schedule.percent_of(timestep) if percent is None else percent
        return Time(exact, timestep, self.schedule.beta_of(timestep))

    def _choose(self, time: Time) -> None:
        self.live = live_at(self.in_order, time)
        rules = choose(self.live, self.downsamples)
        # Equal choices are one object: a compiled graph is chosen by what it finds here.
        self.rules = self._choices.setdefault(rules, rules)
        in_large = choose(self.live, self.downsamples, sys.maxsize)
        self.why_off = tuple(self._why_off(level, in_large[level], time) for level in range(len(self.downsamples)))

    def _why_off(self, level: int, in_large: LevelRules, time: Time) -> str:
        """Why a level is left alone where no rule is in force; in_large: its rules in a picture of any size."""
        if any(in_large):
            return "the picture is smaller than min_pixels"
        if any(rule.is_off and reaches(rule, level, self.downsamples[level]) for rule in self.live):
            return "a rule of ratio 0 leaves it alone"
        return "outside the rules' time range" if time != UNKNOWN else TIME_IS_UNKNOWN

    def forget(self) -> None:
        """Let go of what was kept of pictures."""
        self.sampling, self._mine = Sampling(), Pictures()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_mine", "lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _mine=Pictures(), lock=threading.RLock())


def is_captured(x: Any) -> bool:
    """Are kernels on this tensor being recorded into a CUDA graph? Nothing may wait for them there, or outlive it."""
    if torch.compiler.is_compiling() or not torch.is_tensor(x) or not x.is_cuda:
        return False
    return torch.cuda.is_current_stream_capturing()


def _common_value(timestep: Any) -> float | None:
    """The timestep as a number; None where the samples of a batch are at different times.

    Only asked for where a rule is limited in time, because on a GPU the answer waits for the device.
    """
    if not torch.is_tensor(timestep):
        return None if timestep is None else float(timestep)
    values = timestep.detach().reshape(-1).tolist()
    return float(values[0]) if values and min(values) == max(values) else None


class CallMemory:
    """Which call a tensor belonged to, for gradient checkpointing.

    A checkpoint runs a block again during the backward pass, when the UNet may have been called at another
    size and time since. The block's input is kept alive until then, so its address tells which call it was.
    """

    LIMIT = 4096

    def __init__(self) -> None:
        self._calls: OrderedDict[int, Any] = OrderedDict()

    def keep(self, x: torch.Tensor, call: Any, training: bool) -> None:
        """Remember the call of ``x``, unless no backward pass can follow."""
        if torch.compiler.is_compiling() or not (training or torch.is_grad_enabled() or x.requires_grad):
            return
        if type(x) not in (torch.Tensor, torch.nn.Parameter):  # a tracer's or a transform's has no address
            return
        self._calls[x.data_ptr()] = call
        self._calls.move_to_end(x.data_ptr())
        if len(self._calls) > self.LIMIT:
            self._calls.popitem(last=False)

    def recall(self, x: torch.Tensor) -> Any | None:
        """The call of ``x``, or None."""
        return self._calls.get(x.data_ptr()) if self._calls and type(x) is torch.Tensor else None

    def clear(self) -> None:
        """Remember nothing."""
        self._calls.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"_calls": OrderedDict()}  # addresses mean nothing to a copy
