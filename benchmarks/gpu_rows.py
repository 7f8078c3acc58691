"""The rows of ``benchmarks.gpu`` that time something: calls of a network, and whole samplings.

A network stands beside twins of it that share its weights: one by tomesd, one for each strength.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tome_core
from benchmarks import memory, models, timing
from benchmarks.timing import Run
from tome_core.measuring.pays import Pays

UNMERGED, TOMESD, STRENGTHS, STEPS = "unmerged", "tomesd", ("balanced", "max"), 20
# timesteps told in turn: a match is made anew in each call, renewed from an older one, or kept
WHEN = {"new": (900.0,), "renewed": (900.0, 800.0), "kept": (900.0, 890.0)}
ROW = "the row"  # in a row's failures: all of it failed


class OutOfTime(Exception):
    """A row would not end in time."""


class Patched:
    """A network that is patched: not at all, by tomesd at half of the finest level's tokens, or by a strength."""

    def __init__(self, network: nn.Module, way: str, compiled: bool = False) -> None:
        self.handle = None
        if way == TOMESD:
            finest = 2 if hasattr(network, "label_emb") else 1  # SDXL has no attention at the latent's own size
            as_ldms = nn.Module()
            as_ldms.model = nn.Module()
            as_ldms.model.diffusion_model = network
            importlib.import_module("tomesd").apply_patch(as_ldms, ratio=0.5, max_downsample=finest)
        elif way != UNMERGED:
            self.handle = tome_core.patch(network, way, host_clock=True)
            self.handle.pays = Pays((), (), always=True)  # whether it pays is the question
        if compiled:  # each variant at each size is a graph of its own; the compiler gives up after eight
            limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
            setattr(torch._dynamo.config, limit, 256)
        self.network = torch.compile(network, dynamic=False) if compiled else network

    def call(self, arguments: tuple, when: str = "new") -> Run:
        """Calls that match anew, renew a match, or keep it; the first call of a row of them matches."""
        numbers, times, sampling = itertools.count(), WHEN[when], object()
        return lambda: self._step(arguments, times[next(numbers) % len(times)], sampling if times[1:] else object())

    def steps(self, arguments: tuple) -> Run:
        """Whole samplings, without what is not the network."""
        def run() -> None:
            sampling = object()
            for number in range(STEPS):
                self._step(arguments, 999.0 - 1000 / STEPS * number, sampling)

        return run

    def _step(self, arguments: tuple, timestep: float, sampling: object) -> Any:
        if self.handle is not None:
            self.handle.set_time(timestep=timestep, sampling=sampling, pictures=1)
        return self.network(*arguments)


class Bench:
    """A device, and the network that is in its memory. end: when all has to be done, by ``time.monotonic``."""

    def __init__(self, device: str, end: float) -> None:
        self.device, self.end, self.tiny = device, end, device == "cpu"
        self.dtype = torch.float32 if self.tiny else torch.float16
        self._made: dict[Any, Any] = {}  # the network in memory by its name, its twins by what they are

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def network(self, name: str) -> nn.Module:
        """One of `models.NAMES`, as it is; the one before it goes."""
        if name not in self._made:
            self._made.clear()
            memory.free(self.device)
            self._made[name] = models.make(name, self.device, self.dtype, self.tiny)
        return self._made[name]

    def twin(self, name: str, compiled: bool, way: str) -> Patched:
        network, key = self.network(name), (compiled, way)
        if key not in self._made:
            self._made[key] = Patched(models.twin(network), way, compiled)
        return self._made[key]

    def compare(self, makers: dict[str, Callable[[], Run]], single: bool = False) -> dict[str, Any]:
        """Times of what the makers make; one that fails has its reason in ``failed``, and the others go on.

        single: a turn is one run, and none before it is left untimed. Raises OutOfTime if this would not end in time.
        """
        runs, failed, once = {}, {}, 0.0
        for name, make in makers.items():
            try:
                run = make()
                if not single:
                    run()
                spent = timing.seconds(run, self.device)
                runs[name] = run
            except Exception as error:
                failed[name] = memory.reason(error)
            if name in failed:  # outside of the handler, whose traceback keeps the tensors of the failed call alive
                memory.free(self.device)
            elif not once:
                once = spent
                if once * len(makers) * (2 if single else 8) > self.left:
                    raise OutOfTime
        calls = 1 if single or self.tiny else max(1, min(10, int(0.3 / max(once, 1e-3))))

        def turn(run: Run) -> float:
            if not single:  # another variant may have taken the place of what was kept for this one
                run()
            return timing.seconds(run, self.device, calls)

        times = timing.in_turns(runs, 3 if single or self.tiny else 5, turn, self.end)
        found = {name: {"ms": 1e3 * statistics.median(taken), "least": 1e3 * min(taken), "most": 1e3 * max(taken)}
                 for name, taken in times.items()}  # fmt: skip
        if not (single or self.tiny):
            for name, run in runs.items():
                found[name] |= {**timing.card_work(run), "peak_mib": memory.cuda_peak(run)}
        return {"of": found, "failed": failed}


def calls(bench: Bench, name: str, pixels: int, compiled: bool = False) -> dict[str, Any]:
    """Calls of a network: unmerged, by tomesd, and by ``balanced`` with a match that is new, renewed or kept."""
    arguments = models.inputs(name, pixels, bench.device, bench.dtype, bench.tiny)
    ways = {UNMERGED: (UNMERGED, "new"), TOMESD: (TOMESD, "new"), **{when: (STRENGTHS[0], when) for when in WHEN}}
    return bench.compare({row: lambda way=way, when=when: bench.twin(name, compiled, way).call(arguments, when)
                          for row, (way, when) in ways.items()})  # fmt: skip


def sampling(bench: Bench, name: str, pixels: int, compiled: bool = False) -> dict[str, Any]:
    """Twenty steps: unmerged, by tomesd, by ``balanced`` and by ``max``."""
    arguments = models.inputs(name, pixels, bench.device, bench.dtype, bench.tiny)
    return bench.compare({way: lambda way=way: bench.twin(name, compiled, way).steps(arguments)
                          for way in (UNMERGED, TOMESD, *STRENGTHS)}, single=True)  # fmt: skip
