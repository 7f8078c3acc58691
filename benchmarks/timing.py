"""How long runs take: they take turns, so that what disturbs one disturbs all, and medians are made of the rounds.

A CPU's time is processor time, which other programs do not lengthen; a GPU's is the clock's, up to the end of its work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Run = Callable[[], Any]
_LONGEST = 12  # kernels that are named


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

    Args:
        runs: name -> what is timed.
        rounds: how often each run has its turn.
        measure: gives the seconds of one turn.
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
    """What a GPU does in a call, by the profiler.

    Returns:
        ``card_ms`` in which it works, its ``launches``, and ``kernels_us``: microseconds of those that take longest.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    launches = 0
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            launches += 1
            spent[event.name[:60]] = spent.get(event.name[:60], 0.0) + event.device_time / calls
    longest = sorted(spent.items(), key=lambda item: -item[1])[:_LONGEST]
    return {"card_ms": sum(spent.values()) / 1e3, "launches": launches / calls,
            "kernels_us": {name: round(us, 1) for name, us in longest}}  # fmt: skip
