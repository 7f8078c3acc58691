"""One patch while its UNet runs: whose rules are in force in a call, and what the call may use of earlier ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..compiling import compiles_here
from ..merging.grid import Grid
from ..merging.plan import MergePlan
from ..reporting.gains import PIXELS
from ..reporting.ledger import Ledger
from ..settings.config import MergeConfig
from ..settings.noise import STABLE_DIFFUSION, SchedulerNoise, Step, by_timestep
from ..settings.schedule import UNKNOWN, NoiseSchedule
from .call import Call, Latents
from .clock import Clock, InForce
from .decision import Decision, decide
from .keep import Guidance, KeptPlans, Sampling
from .latch import Latch
from .pictures import GuidanceOf, Pictures, Scope
from .tensors import common_value, is_captured, is_mapped

_MAPPED = "torch.vmap maps over the call"
_MOST_DECISIONS = 1024  # kept; pictures of ever new sizes must not fill the memory


class Run:
    """What a patch knows while it is in force. downsamples: of each level. schedule: None on a bare UNet."""

    def __init__(
        self, config: MergeConfig, downsamples: Sequence[int], schedule: NoiseSchedule | None, ledger: Ledger
    ) -> None:
        self.ledger = ledger
        self.knows_schedule = schedule is not None
        self.clock = Clock(config, downsamples, schedule)
        self.in_order = self.clock.rules
        self.keeps = any(rule.keep for rule in self.in_order)
        self.wants_time = self.clock.limited or self.keeps
        self._uses_pixels = any(rule.min_pixels for rule in self.in_order)
        self.noise: SchedulerNoise | None = None  # of the pipeline, where there is one
        self.time_is_given = False
        self.sampling = Sampling()  # the one that `set_time` named
        self._guidance: Guidance | None = None  # in it
        self._timesteps: Sequence[float] | None = None  # of its steps
        self._boundary: float | None = None  # of its early phase
        self._mine = Pictures()
        self.now: InForce = self.clock.at(UNKNOWN)
        self.maps: dict[int, tuple[Grid, MergePlan]] | None = None  # by level, on their device: fetching would wait
        self.latch: Latch | None = None  # whether merging pays, where somebody asks
        self.latest: Latents | None = None  # of the calls that were counted
        self.decisions: dict[tuple, Decision] = {}  # made so far; rules are known by their id, and the clock keeps them

    @property
    def is_sampling(self) -> bool:
        """Is a picture being made that somebody has named, or that this thread has begun?"""
        return bool(self._mine.scopes) or self.sampling.goes_on

    def set_time(
        self, percent: float | None, timestep: float | None, sigma: float | None, sampling: Hashable = None,
        pictures: int | None = None, timesteps: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """Take the time from outside until further notice; all None hands the clock back to the UNet's argument."""
        self.time_is_given = not (percent is None and timestep is None and sigma is None)
        if sigma is not None and timestep is None:
            timestep = STABLE_DIFFUSION.timestep_of_sigma(sigma)
        time = self.clock.moment(timestep, percent)
        self.sampling.set(sampling, time.timestep)
        self._guidance = Guidance(pictures) if pictures else None
        if timesteps is not self._timesteps:
            self._timesteps, self._boundary = timesteps, self.clock.boundary_in(timesteps or ())
        self._mine.kept = None
        self.now = self.clock.at(time, self._boundary)

    @contextmanager
    def sample(
        self, guidance_of: GuidanceOf | None = None, timesteps: Sequence[float] | None = None, continues: bool = False
    ) -> Iterator[None]:
        """While in here, this thread's calls are the steps of one picture.

        timesteps: of all of them; None: a pipeline's are found. continues: with a picture that was begun elsewhere,
        whose steps belong to a whole one.
        """
        scope = Scope(guidance_of, self.clock.boundary_in(timesteps or ()), continues or timesteps is not None)
        try:
            with self.step_of(scope):
                yield
        finally:
            self._mine.sampling.set(None, None)
            self._mine.kept = None

    @contextmanager
    def step_of(self, scope: Scope) -> Iterator[None]:
        """While in here, this thread's calls are steps of the scope's picture, which may go on afterwards."""
        scopes = self._mine.scopes
        scopes.append(scope)
        try:
            yield
        finally:
            scopes.remove(scope)

    def tell(self, timestep: Any) -> None:
        """The timestep of the next call of the UNet, from a pipeline's scheduler; `set_time` outweighs it."""
        if self.time_is_given or (torch.is_tensor(timestep) and timestep.numel() != 1):
            return
        mine = self._mine
        mine.told = self._look(timestep) or self._read(timestep)
        if mine.told is not None:
            self.now = self._at(mine.told)

    def begin(
        self, timestep: Any, latent: Any, thread: int | None, begun: torch.Tensor | None = None, called: Hashable = None
    ) -> Call:
        """A call of the UNet starts; these are its arguments.

        timestep: a number, or a tensor ``[]`` or ``[B]``. latent: ``[B, C, H, W]`` or ``[B, C, frames, H, W]``, only
        its size is looked at. thread: that calls; None where a compiler traces. begun: see `Call`. called: as of
        `Sampling.next_call`.
        """
        now, kept, captured = self.now, None, False
        if thread is not None and is_mapped():
            return Call(self, thread, timestep, self.clock.nothing, (_MAPPED,) * len(now.why_off))
        if thread is not None:
            self.ledger.calls += 1
            if torch.is_tensor(latent) and latent.dim() == 4:
                self.latest = Latents(latent.shape, latent.dtype, latent.device)
            captured = is_captured(latent)
            if self.wants_time and not self.time_is_given and not captured:
                now = self._look_at(timestep)
            # a backward pass would meet later plans; in a CUDA graph they would lie where its next replay writes
            if self.keeps and not captured and not torch.is_grad_enabled():
                sampling = self.sampling if self.time_is_given else self._mine.sampling
                kept = sampling.next_call(latent, self._guidance_in(latent), called)
        rules = now.rules
        if self._uses_pixels and torch.is_tensor(latent) and latent.dim() in (4, 5):
            pixels = latent.shape[-2] * latent.shape[-1] * PIXELS**2
            rules = self.clock.for_pixels(now.live, pixels)
        why_off = now.why_off
        if self.latch is not None and thread is not None and not captured:  # no graph waits for its host
            rules, why_off = self.latch.apply(rules, why_off, latent, self.clock.apply_gate)
        return Call(self, thread, timestep, rules, why_off, kept, begun, now.phase)

    def begin_in_graph(self, timestep: Any, latent: torch.Tensor) -> None:
        """As `begin`, of a UNet that is compiled as a whole; what it may use of earlier calls is `kept_in_graph`."""
        mine = self._mine
        mine.kept = None
        if is_captured(latent):
            return
        if not self.time_is_given:
            self._step_at(timestep)
        sampling = self.sampling if self.time_is_given else mine.sampling
        mine.kept = sampling.next_call(latent, self._guidance_in(latent))

    def keep_in_graph(self, call: Call) -> Call:
        """A call that a graph has begun: what it may use of earlier ones is `kept_in_graph` until the next begins."""
        self._mine.kept = call.kept
        return call._replace(kept=None)

    @property
    def kept_in_graph(self) -> KeptPlans | None:
        """What is kept for the call that this thread makes."""
        return self._mine.kept

    def _guidance_in(self, batch: Any) -> Guidance | None:
        if not torch.is_tensor(batch) or batch.dim() < 2:
            return None
        if batch.shape[0] > 1 and batch.stride(0) == 0:  # one latent, expanded
            return Guidance(1)
        if self.time_is_given:
            return self._guidance
        scopes = self._mine.scopes
        return scopes[-1].guidance_of(batch) if scopes and scopes[-1].guidance_of is not None else None

    def decide(self, key: tuple, call: Call, level: int, tokens: int, channels: int, device: str) -> Decision:
        """What merges in a transformer of this level and size; kept under ``key``, but not in a compiled graph."""
        found = decide(call.rules[level], call.why_off[level], tokens, channels, device)
        if not (torch.compiler.is_compiling() and compiles_here()):
            if len(self.decisions) >= _MOST_DECISIONS:
                self.decisions.clear()
            self.decisions[key] = found
        return found

    def _look_at(self, timestep: Any) -> InForce:
        """The rules at the time of this call."""
        step = self._step_at(timestep)
        if self.clock.limited:
            self.now = now = self.clock.at(UNKNOWN) if step is None else self._at(step)
            return now
        return self.now

    def _at(self, step: Step) -> InForce:
        """The rules at a step of this thread's sampling."""
        scopes = self._mine.scopes
        return self.clock.at(self.clock.moment(*step), scopes[-1].boundary if scopes else None)

    def _step_at(self, timestep: Any) -> Step | None:
        """This call's step, from its arguments, the scheduler, or by waiting for the device."""
        mine = self._mine
        scope = mine.scopes[-1] if mine.scopes else None
        step = self._look(timestep) or mine.told
        mine.told = None  # a scheduler that is no longer asked must not stop the clock
        if step is None and (self.clock.limited or (scope is not None and self.keeps)):
            step = self._read(timestep)
        mine.sampling.set(scope, None if step is None else step.timestep)
        return step

    def _look(self, timestep: Any) -> Step | None:
        """An element of the scheduler's timesteps; the first one in a sampling tells which steps it has."""
        mine = self._mine
        step = None if self.noise is None else mine.timesteps.look(timestep, self.noise.steps_of)
        scope = mine.scopes[-1] if mine.scopes else None
        if step is not None and scope is not None and not scope.is_known:
            steps = mine.timesteps.from_here(timestep)
            scope.boundary, scope.is_known = self.clock.boundary_in([one.timestep for one in steps]), True
        return step

    def _read(self, timestep: Any) -> Step | None:
        """A timestep of somebody's own making, which has to be waited for; None where it tells nothing."""
        value = common_value(timestep)
        if value is None:
            return None
        return by_timestep(value) if self.noise is None else self.noise.step_of(value)

    def forget(self) -> None:
        """Let go of what was kept of pictures."""
        self.sampling, self._mine = Sampling(), Pictures()

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "decisions": {}}
        del state["_mine"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _mine=Pictures())
