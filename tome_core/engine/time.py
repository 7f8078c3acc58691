"""At which step of which picture a model is, and which rules hold there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..settings.noise import STABLE_DIFFUSION, SchedulerNoise, Step, by_timestep
from ..settings.schedule import UNKNOWN
from .clock import Clock, InForce
from .plan_cache import KeptPlans, Sampling

_LONGEST = 4096  # a longer tensor is no schedule
Guidance = tuple[int, int]  # of a call, see `Sampling.next_call`


class ModelTime:
    """Takes the time from a host, a pipeline's scheduler, or the model's own argument, in this order.

    clock: tells the rules. keeps: a rule keeps its matches over steps. noise: of a pipeline's scheduler, if there is
    one. now: what was in force at the latest call.
    """

    def __init__(self, clock: Clock, keeps: bool) -> None:
        self.clock, self.keeps = clock, keeps
        self.is_wanted = clock.limited or keeps
        self.noise: SchedulerNoise | None = None
        self.now: InForce = clock.at(UNKNOWN)
        self._is_given = False
        self._sampling = Sampling()  # the one that `set` named
        self._guidance: Guidance | None = None  # in it
        self._timesteps: Sequence[float] | None = None  # of its steps
        self._boundary: float | None = None  # of its early phase
        self._mine = _Pictures()

    @property
    def is_sampling(self) -> bool:
        """Is a picture being made that a host has named, or that this thread has begun?"""
        return bool(self._mine.scopes) or self._sampling.goes_on

    def set(
        self, percent: float | None, timestep: float | None, sigma: float | None, sampling: Hashable = None,
        pictures: int | None = None, timesteps: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """Take the time from outside until further notice; all None hands the clock back to the model's argument."""
        self._is_given = not (percent is None and timestep is None and sigma is None)
        if sigma is not None and timestep is None:
            timestep = STABLE_DIFFUSION.timestep_of_sigma(sigma)
        time = self.clock.moment(timestep, percent)
        self._sampling.set(sampling, time.timestep)
        self._guidance = (pictures, 0) if pictures else None
        if timesteps is not self._timesteps:
            self._timesteps, self._boundary = timesteps, self.clock.boundary_in(timesteps or ())
        self.now = self.clock.at(time, self._boundary)

    @contextmanager
    def sample(
        self, guidance_of: Callable[[torch.Tensor], Guidance | None] | None = None,
        timesteps: Sequence[float] | None = None, continues: bool = False,
    ) -> Iterator[None]:  # fmt: skip
        """While in here, this thread's calls are the steps of one picture.

        Args:
            guidance_of: the guidance of a call, from its latents.
            timesteps: of all steps; None: a pipeline's are found.
            continues: it goes on with a picture that was begun elsewhere, whose steps belong to a whole one.
        """
        scope = _Scope(guidance_of, self.clock.boundary_in(timesteps or ()), continues or timesteps is not None)
        scopes = self._mine.scopes
        scopes.append(scope)
        try:
            yield
        finally:
            scopes.remove(scope)
            self._mine.sampling.set(None, None)

    def tell(self, timestep: Any) -> None:
        """The timestep of the next call, from a pipeline's scheduler; `set` outweighs it."""
        if self._is_given or (torch.is_tensor(timestep) and timestep.numel() != 1):
            return
        step = self._mine.told = self._look(timestep) or self._read(timestep)
        if step is not None:
            self.now = self._at(step)

    def next_call(self, timestep: Any, latent: Any, called: Hashable = None) -> tuple[InForce, KeptPlans | None]:
        """What holds in the call that begins now, and what it may use of earlier calls; None if nothing is kept."""
        if is_captured(latent):  # plans would lie where the next replay writes, and nothing may wait
            return self.now, None
        now, keeps = self.now, self.keeps and not torch.is_grad_enabled()  # a backward pass would meet later plans
        if self.is_wanted and not self._is_given:
            now = self._look_at(timestep)
        if not keeps:
            return now, None
        sampling = self._sampling if self._is_given else self._mine.sampling
        return now, sampling.next_call(latent, self._guidance_in(latent), called)

    def forget(self) -> None:
        """Let go of what was kept of pictures."""
        for one in (self._sampling, self._mine.sampling):
            one.set(None, None)
        self._sampling, self._mine = Sampling(), _Pictures()

    def _guidance_in(self, batch: Any) -> Guidance | None:
        if not torch.is_tensor(batch) or batch.dim() < 2:
            return None
        if batch.shape[0] > 1 and batch.stride(0) == 0:  # one latent, expanded
            return 1, 0
        if self._is_given:
            return self._guidance
        scope = self._mine.scope
        return scope.guidance_of(batch) if scope is not None and scope.guidance_of is not None else None

    def _look_at(self, timestep: Any) -> InForce:
        """The rules at the time of this call, from its arguments, the scheduler, or by waiting for the device."""
        mine = self._mine
        step = self._look(timestep) or mine.told
        mine.told = None  # a scheduler that is no longer asked must not stop the clock
        if step is None and (self.clock.limited or (mine.scope is not None and self.keeps)):
            step = self._read(timestep)
        mine.sampling.set(mine.scope, None if step is None else step.timestep)
        if self.clock.limited:
            self.now = self.clock.at(UNKNOWN) if step is None else self._at(step)
        return self.now

    def _at(self, step: Step) -> InForce:
        """The rules at a step of this thread's sampling."""
        scope = self._mine.scope
        return self.clock.at(self.clock.moment(*step), scope and scope.boundary)

    def _look(self, timestep: Any) -> Step | None:
        """An element of the scheduler's timesteps; the first one in a sampling tells which steps it has."""
        schedule, scope = self._mine.timesteps, self._mine.scope
        step = None if self.noise is None else schedule.look(timestep, self.noise.steps_of)
        if step is not None and scope is not None and not scope.is_known:
            steps = schedule.meanings[timestep.storage_offset() :]
            scope.boundary, scope.is_known = self.clock.boundary_in([one.timestep for one in steps]), True
        return step

    def _read(self, timestep: Any) -> Step | None:
        """A timestep of the caller's own making, for which a GPU is waited; None if it tells nothing."""
        if torch.is_tensor(timestep):
            is_wrapped = type(timestep) is not torch.Tensor or torch._C._functorch.is_functorch_wrapped_tensor(timestep)
            if timestep.is_meta or is_wrapped:  # by torch.func, vmap or a tracer: without a value
                return None
            values = set(timestep.detach().reshape(-1).tolist())
            timestep = values.pop() if len(values) == 1 else None
        if timestep is None:
            return None
        return (by_timestep if self.noise is None else self.noise.step_of)(float(timestep))


class _Scope:
    """A sampling that somebody has begun. guidance_of: its calls' guidance; None if nobody tells.

    boundary: of the early phase in it, see `Clock.boundary_in`. is_known: nothing is to be learned of its steps.
    """

    def __init__(
        self, guidance_of: Callable[[torch.Tensor], Guidance | None] | None, boundary: float | None, is_known: bool
    ) -> None:
        self.guidance_of, self.boundary, self.is_known = guidance_of, boundary, is_known


class _Pictures(threading.local):
    """What each thread knows of the picture it makes: pipelines that share a UNet may run at once."""

    def __init__(self) -> None:
        self.timesteps, self.sampling = Timesteps(), Sampling()
        self.scopes: list[_Scope] = []  # samplings, the latest last
        self.told: Step | None = None  # the step of the UNet's next call, as the scheduler gave it

    @property
    def scope(self) -> _Scope | None:
        """The latest sampling."""
        return self.scopes[-1] if self.scopes else None


class Timesteps:
    """Tells what a step's timestep stands for without waiting for the device, by its place in the schedule.

    Pipelines hand around views of their scheduler's timesteps, which are brought to the CPU once for a picture, and
    held, so that no other tensor comes to lie where they are. meanings: of all of them, in order.
    """

    def __init__(self) -> None:
        self.meanings: list[Any] = []
        self._steps: torch.Tensor | None = None
        self._key: tuple | None = None

    def look(self, timestep: Any, meanings: Callable[[list[float]], list[Any]]) -> Any | None:
        """What the step means, by ``meanings`` of its whole schedule, asked once; None for no element of a schedule."""
        if type(timestep) is not torch.Tensor or timestep.is_meta or (timestep.numel() != 1 and any(timestep.stride())):
            return None
        storage = timestep.untyped_storage()
        if not 1 < storage.nbytes() // timestep.element_size() <= _LONGEST:
            return None
        version = None if timestep.is_inference() else timestep._version  # tells whether somebody wrote into it
        key = storage.data_ptr(), timestep.dtype, timestep.device, version
        if key != self._key:
            self._steps = torch.empty(0, dtype=timestep.dtype, device=timestep.device).set_(storage)
            self.meanings, self._key = meanings(self._steps.tolist()), key
        return self.meanings[timestep.storage_offset()]


def is_captured(x: Any) -> bool:
    """Are kernels on this tensor being recorded into a CUDA graph? Nothing may wait for them there, or outlive it."""
    return torch.is_tensor(x) and x.is_cuda and torch.cuda.is_current_stream_capturing()
