"""One patch while its UNet runs: whose rules are in force in a call, and what the call may use of earlier ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..merging.grid import Grid
from ..merging.plan import MergePlan
from ..reporting.ledger import Ledger
from ..settings.config import MergeConfig
from ..settings.noise import STABLE_DIFFUSION, SchedulerNoise, Step, by_timestep
from ..settings.rule import MergeRule
from ..settings.schedule import UNKNOWN, LevelRules, NoiseSchedule
from .clock import Clock, InForce
from .decision import Decision, decide
from .keep import Guidance, KeptPlans, Sampling
from .latch import Latch
from .timesteps import Timesteps

_PIXELS_PER_LATENT = 8 * 8  # Stable Diffusion's latent is an eighth of the picture along each side
_MAPPED = "torch.vmap maps over the call"
_MOST_DECISIONS = 1024  # kept; pictures of ever new sizes must not fill the memory


class Call(NamedTuple):
    """One call of the UNet. stamp: its timestep argument, what draws depend on; rules: those in force, by level.

    thread: that made it; None in a compiled one. why_off: by level. kept: plans of the calls before it in the same
    sampling; None where nothing is kept. begun: in a compiled one, where plans are kept, what `in_graph.plans` takes.
    phase: of the report.
    """

    run: Run
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
    """One call of a transformer: the UNet call it belongs to, its batch and token grid, and what is decided for it.

    shared: what its blocks match once for all of them, by the rule's id.
    """

    call: Call
    batch: int
    grid: Grid
    decision: Decision
    shared: dict[int, Any]


def skip(outer: GridCall, level: int, part: str, why: str) -> None:
    """Count a part that was left alone, with its products of queries and keys where it is self-attention."""
    work = outer.batch * (outer.grid.height * outer.grid.width) ** 2 if part == "attn" else 0
    outer.call.run.ledger.skip(outer.call, level, part, why, work)


class MergeMap(NamedTuple):
    """What one block merged, to be looked at. group: int64 ``[B or 1, N]`` on the CPU, the group of each token."""

    grid: Grid
    group: torch.Tensor
    num_groups: int


GuidanceOf = Callable[[torch.Tensor], Guidance | None]  # from the latents of a call


class Scope:
    """A sampling that somebody has begun. guidance_of: its calls' guidance; None where nobody tells.

    boundary: of the early phase in it, see `Clock.boundary_in`. is_known: nothing is to be learned of its steps.
    """

    def __init__(self, guidance_of: GuidanceOf | None, boundary: float | None = None, is_known: bool = False) -> None:
        self.guidance_of = guidance_of
        self.boundary = boundary
        self.is_known = is_known


class Pictures(threading.local):
    """What each thread knows of the picture it makes: pipelines that share a UNet may run at once.

    scopes: samplings, the latest last. told: the step of the UNet's next call, as the scheduler gave it. kept: what a
    call of a compiled UNet may use.
    """

    def __init__(self) -> None:
        self.timesteps = Timesteps()
        self.sampling = Sampling()
        self.scopes: list[Scope] = []
        self.told: Step | None = None
        self.kept: KeptPlans | None = None


class Run:
    """What a patch knows while it is in force.

    config: the settings. downsamples: of each level. schedule: ties the scales of time together; None on a bare UNet,
    which knows its timestep alone.
    """

    def __init__(
        self, config: MergeConfig, downsamples: Sequence[int], schedule: NoiseSchedule | None, ledger: Ledger
    ) -> None:
        self.config = config
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
        self.maps: dict[int, tuple[Grid, MergePlan]] | None = None
        self.latch: Latch | None = None  # whether merging pays, where somebody asks
        self.latest: Latents | None = None  # of the calls that were counted
        self.decisions: dict[tuple, Decision] = {}  # made so far; rules are known by their id, and the clock keeps them

    @property
    def live(self) -> tuple[MergeRule, ...]:
        """The rules that hold at this moment, in order."""
        return self.now.live

    @property
    def is_sampling(self) -> bool:
        """Is a picture being made that somebody has named, or that this thread has begun?"""
        return bool(self._mine.scopes) or self.sampling.goes_on

    @property
    def lacks_schedule(self) -> bool:
        """True where merging is limited on a scale that the timestep argument alone does not give."""
        return self.config.uses_percent and not self.knows_schedule

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
        self, timestep: Any, latent: Any, thread: int | None, begun: torch.Tensor | None = None, replayed: bool = False,
        called: Hashable = None,
    ) -> Call:  # fmt: skip
        """A call of the UNet starts; these are its arguments.

        timestep: a number, or a tensor ``[]`` or ``[B]``. latent: ``[B, C, H, W]`` or ``[B, C, frames, H, W]``, only
        its size is looked at. thread: that calls; None where a compiler traces. begun: see `Call`. replayed: from a
        graph of `graphs`, so that no device waits for its host. called: as of `Sampling.next_call`.
        """
        now, kept, captured = self.now, None, False
        if thread is not None and is_mapped():
            return Call(self, thread, timestep, self.clock.nothing, (_MAPPED,) * len(now.why_off))
        if thread is not None:
            self.ledger.begin_call()
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
            pixels = latent.shape[-2] * latent.shape[-1] * _PIXELS_PER_LATENT
            rules = self.clock.for_pixels(now.live, pixels)
        why_off = now.why_off
        if self.latch is not None and thread is not None and not (captured or replayed):  # no graph waits for its host
            rules, why_off = self.latch.apply(rules, why_off, latent, self.clock.gated)
        return Call(self, thread, timestep, rules, why_off, kept, begun, now.phase)

    def begin_in_graph(self, timestep: Any, latent: torch.Tensor) -> None:
        """A call of a UNet that is compiled as a whole has begun; what it may use of earlier ones is `kept_in_graph`.

        As `begin` has them. Which rules are in force is in the graph.
        """
        mine = self._mine
        mine.kept = None
        if is_captured(latent):
            return
        if not self.time_is_given:
            self._step_at(timestep)
        sampling = self.sampling if self.time_is_given else mine.sampling
        mine.kept = sampling.next_call(latent, self._guidance_in(latent))

    @property
    def kept_in_graph(self) -> KeptPlans | None:
        """Of the call that this thread makes."""
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
        if not torch.compiler.is_compiling():
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
        """Of this call: among its arguments, as the scheduler gave it, or by waiting for it."""
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

    def keep_map(self, level: int, grid: Grid, plan: MergePlan) -> None:
        """Remember what a block merged, on its device: fetching it would wait."""
        self.maps[level] = (grid, plan)

    def fetch_maps(self) -> dict[int, MergeMap]:
        """Level -> the latest map of it, brought to the CPU."""
        kept = self.maps or {}
        return {level: MergeMap(grid, plan.group.cpu(), plan.num_groups) for level, (grid, plan) in kept.items()}

    def forget(self) -> None:
        """Let go of what was kept of pictures."""
        self.sampling, self._mine = Sampling(), Pictures()

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "decisions": {}}
        del state["_mine"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _mine=Pictures())


def is_captured(x: Any) -> bool:
    """Are kernels on this tensor being recorded into a CUDA graph? Nothing may wait for them there, or outlive it."""
    if not torch.is_tensor(x) or not x.is_cuda:
        return False
    return torch.cuda.is_current_stream_capturing()


def is_mapped() -> bool:
    """Are we inside `torch.vmap`? A match there would be one for each of the samples that it maps over."""
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is None:
        return False
    return any(one.key() == functorch.TransformType.Vmap for one in functorch.get_interpreter_stack())


def common_value(timestep: Any) -> float | None:
    """The timestep as a number; None where the samples of a batch are at different times, or it has no value.

    Only asked for where the time matters and nobody told it, because on a GPU the answer waits for the device.
    """
    if not torch.is_tensor(timestep):
        return None if timestep is None else float(timestep)
    if timestep.is_meta or is_transformed(timestep):
        return None
    values = timestep.detach().reshape(-1).tolist()
    return float(values[0]) if values and min(values) == max(values) else None


def is_transformed(x: torch.Tensor) -> bool:
    """Is it a stand-in of torch.func, vmap or a tracer, which has no value and no address?"""
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        return True
    return torch._C._functorch.is_functorch_wrapped_tensor(x)
