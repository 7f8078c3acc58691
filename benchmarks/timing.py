"""How long runs take: they take turns, so that what disturbs one disturbs all, and medians are made of the rounds.

A CPU's time is processor time, which other programs do not lengthen; a GPU's is the clock's, up to the end of its work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

Run = Callable[[], Any]
BESIDE = 3  # unmerged calls after each picture


def seconds(run: Run, device: str = "cpu", calls: int = 1) -> float:
    """Mean seconds of so many calls in a row."""
    on_gpu = torch.device(device).type == "cuda"
    clock, wait = (time.perf_counter, torch.cuda.synchronize) if on_gpu else (time.process_time, lambda: None)
    wait()
    since = clock()
    for _ in range(calls):
        run()
    wait()
    return (clock() - since) / calls


def in_turns(
    runs: Mapping[str, Run], rounds: int, measure: Callable[[Run], float] = seconds, until: float | None = None
) -> dict[str, list[float]]:
    """Seconds of each run in each round, in another order every time.

    until: no round but the first begins after it, by ``time.monotonic``.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for number in range(rounds):
        if number and until is not None and time.monotonic() > until:
            break
        for name in order.sample(list(runs), len(runs)):
            taken[name].append(measure(runs[name]))
    return taken


def card_work(run: Run, calls: int = 2) -> dict[str, Any]:
    """What a GPU does in a call, by the profiler: ``card_ms`` in which it works, and its ``launches``."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spent = sum(event.device_time for event in events) / calls
    return {"card_ms": spent / 1e3, "launches": len(events) / calls}


class CallTimes:
    """A context manager: inside it the processor seconds of every call of the network are noted.

    Enter it before what patches the network, to time that too.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __enter__(self) -> CallTimes:
        self.seconds: list[float] = []
        self._hooks = [
            self.network.register_forward_pre_hook(self._start, with_kwargs=True, prepend=True),
            self.network.register_forward_hook(self._stop),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def time_unmerged(self) -> float:
        """Seconds of the latest call's like without merging: the median of `BESIDE`. Call it outside of a patch."""
        arguments, named = self._latest
        return median(seconds(lambda: self.network(*arguments, **named)) for _ in range(BESIDE))

    def _start(self, network: nn.Module, args: tuple, kwargs: dict) -> None:
        self._latest = args, kwargs
        self.seconds.append(-time.process_time())

    def _stop(self, network: nn.Module, args: tuple, out: object) -> None:
        self.seconds[-1] += time.process_time()
