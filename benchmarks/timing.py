"""The time of runs, which take turns so that a disturbance hits all, their peak memory, and why a run failed."""

from __future__ import annotations

import ctypes
import gc
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

Run = Callable[[], Any]
_SOURCES = Path(__file__).parents[1] / "tome_core" / "merging" / "kernels"
OURS = frozenset(name for path in _SOURCES.glob("triton_kernels*.py")  # which a card's profile calls by these names
                 for name in re.findall(r"^def (_\w+)", path.read_text(encoding="utf-8"), re.M))  # fmt: skip
_OTHERS, _NAME = 12, 60  # how many other kernels are told, the heaviest, and with how many characters of their names
UNMERGED_CALLS = 1  # unmerged calls after each picture; figures are medians over pictures
OUT_OF_MEMORY = "out of memory"
_OF_MEMORY = (OUT_OF_MEMORY, "can't allocate memory", "not enough memory")


def seconds(run: Run, device: str = "cpu", calls: int = 1) -> float:
    """Return the mean seconds of a run over `calls`: processor time on a CPU, the clock's on a GPU until it is done."""
    on_gpu = torch.device(device).type == "cuda"
    clock, wait = (time.perf_counter, torch.cuda.synchronize) if on_gpu else (time.process_time, lambda: None)
    wait()
    since = clock()
    for _ in range(calls):
        run()
    wait()
    return (clock() - since) / calls


def in_turns(runs: Mapping[str, Run], rounds: int, measure: Callable[[Run], float] = seconds,
             until: float | None = None) -> dict[str, list[float]]:  # fmt: skip
    """Measure each run once a round, in random but repeatable order; return the values by name, one a round.

    measure: gives the seconds of a run. until: the ``time.monotonic`` after which no round but the first begins.
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
    """Return means of `calls` GPU runs, no warm-up: ``card_ms`` of kernels and copies, ``launches``, their number, and
    ``kernels_us`` as `by_kernel` gives them."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spent = sum(event.device_time for event in events) / calls
    each = by_kernel((event.name, event.device_time / calls) for event in events)
    return {"card_ms": spent / 1e3, "launches": len(events) / calls, "kernels_us": each}


def by_kernel(launches: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Add up microseconds of launches by kernel: name -> us of all `OURS`, and of the `_OTHERS` heaviest others."""
    total: Counter[str] = Counter()
    for name, spent in launches:
        total[name[:_NAME]] += spent
    others = [name for name, _ in total.most_common() if name not in OURS][:_OTHERS]
    return {name: round(spent, 1) for name, spent in total.most_common() if name in OURS or name in others}


def reason(error: BaseException) -> str:
    """Say why a call failed: ``out of memory``, a CPU's too, or `error`'s type and first line, up to 200 characters."""
    text = str(error).strip()
    if isinstance(error, MemoryError) or any(words in text.lower() for words in _OF_MEMORY):
        return OUT_OF_MEMORY
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"[:200]


def free(device: str) -> None:
    """Collect garbage and, if the device is a CUDA GPU, give unused GPU memory back."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def cuda_peak(run: Run) -> float:
    """Measure the peak MiB of tensors on a GPU during a call, beyond those from before the call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def process_peak(run: Run) -> float | None:
    """Make a call; on Linux return this process's peak MiB in it, beyond its memory before, on other systems None."""
    if sys.platform != "linux":
        run()
        return None
    ctypes.CDLL(None).malloc_trim(0)  # memory that earlier calls freed would be used again, unseen
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins at the present memory
    before = _resident("VmRSS")
    run()
    return (_resident("VmHWM") - before) / 1024


def _resident(field: str) -> int:
    """Read a field of this process's memory, as ``VmRSS``, in KiB, on Linux."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return int(fields[field].split()[0])


class CallTimes:
    """A context manager whose hooks list in `seconds` the processor seconds of every call of the network; enter it
    before the network is patched, to time the patch too. `seconds` stays until the next entering.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __enter__(self) -> CallTimes:
        self.seconds: list[float] = []
        self._hooks = [self.network.register_forward_pre_hook(self._start, with_kwargs=True, prepend=True),
                       self.network.register_forward_hook(self._stop)]  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def time_unmerged(self) -> float:
        """Repeat the latest call `UNMERGED_CALLS` times, unpatched by the caller; return median processor seconds."""
        arguments, named = self._latest
        return median(seconds(lambda: self.network(*arguments, **named)) for _ in range(UNMERGED_CALLS))

    def _start(self, network: nn.Module, args: tuple, kwargs: dict) -> None:
        """Note a call's arguments; append minus the processor time to `seconds`, which `_stop` completes."""
        self._latest = args, kwargs
        self.seconds.append(-time.process_time())

    def _stop(self, network: nn.Module, args: tuple, out: object) -> None:
        """Complete the call's processor seconds, those of all threads, without waiting for a GPU."""
        self.seconds[-1] += time.process_time()
