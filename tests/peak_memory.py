"""The most memory that a call holds at once: in bytes of tensors, which do not vary, and of the process."""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from tome_core.merging.grid import Grid
from tome_core.merging.methods import METHODS, MatchOptions


def peak_bytes(run) -> int:
    """The most that a call holds at once beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    held = most = 0
    changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def process_peak_mib(run) -> float:
    """By how much a call raises the most that this process has held: what an allocator leaves torn counts too."""
    import resource  # Windows has none

    unit = 2**20 if sys.platform == "darwin" else 2**10
    peak = before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ballast = []
    while peak - before < unit:  # importing peaked higher than what is in use now: fill up to that mark
        ballast.append(b"\1" * 2**20)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / unit


def merge_once(x: torch.Tensor, side: int) -> None:
    """A match of half of the tokens, a merge and an unmerge."""
    plan = METHODS["bipartite"].match(x, Grid(side, side), MatchOptions(0.5, 2, 2))
    plan.unmerge(plan.merge(x))
