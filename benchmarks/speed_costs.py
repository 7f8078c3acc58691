"""Peak memory and work of one call, apart from its time, and its roofline.

The roofline (Williams et al., 2009) is how quick a call could be here, computed from what it has to compute.
Counted are products (of matrices, convolutions, attention): each takes as long as its operations at the device's best
rate, or as its bytes (what it reads and writes, once) at the rate of a copy, whichever is longer. Everything else is
free, as if a compiler had put it into the products. So is what a kernel of somebody's own does inside: no bound is too
high for want of knowledge. What lies in a cache is read faster than a copy, which on a CPU can matter for small models.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

_MIB = 2**20
_PEAK = "peak "  # how a fork's answer begins
OUT_OF_MEMORY = "out of memory"
_SAID_SO = (OUT_OF_MEMORY, "can't allocate memory", "not enough memory")
_ATTENTION = ("scaled_dot_product", "_scaled_dot_product")
# operator -> which argument is its left factor, whose last dimension is summed over
_FACTORS = {"linear": 0, "mm": 0, "bmm": 0, "matmul": 0, "addmm": 1, "baddbmm": 1}
_CONVOLUTIONS = ("conv2d", "convolution")


class CallFailed(RuntimeError):
    """A call in another process failed; the message is its `reason`."""


def reason(error: BaseException) -> str:
    """Why a call failed, in a few words: ``out of memory``, or the error."""
    text = str(error).strip()
    if isinstance(error, MemoryError) or any(words in text.lower() for words in _SAID_SO):
        return OUT_OF_MEMORY
    if isinstance(error, CallFailed):
        return text
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"[:200]


def free_memory(device: torch.device) -> None:
    """Give back what nobody uses any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def cuda_peak(run: Callable[[], Any]) -> float:
    """Peak MiB of tensors on a GPU beyond those that were there before the call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / _MIB


def process_peak(run: Callable[[], Any], small: Callable[[], Any]) -> float | None:
    """Peak MiB of a process beyond what it had before the call; None except on Linux.

    The call is made in a fork of this process, which has the model already, and starts with a peak of its own.
    small: a call that makes the libraries allocate what they allocate once. Raises CallFailed where the call fails,
    for want of memory too: there the system may end the fork, which leaves this process and its results alone.
    """
    if sys.platform != "linux":
        return None
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls have freed would be used again, unseen
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(writing, run, small)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        raise CallFailed(OUT_OF_MEMORY)
    if not answer.startswith(_PEAK):
        raise CallFailed(answer or f"its process ended with status {status}")
    return float(answer.removeprefix(_PEAK))


def _answer(writing: int, run: Callable[[], Any], small: Callable[[], Any]) -> None:
    """In the fork: measure, tell, end; nothing of the parent's may run on here."""
    import resource  # which Windows has not

    try:
        small()
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        run()
        before = int(pages) * os.sysconf("SC_PAGE_SIZE")
        text = f"{_PEAK}{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / _MIB}"
    except BaseException as error:
        text = reason(error)
    os.write(writing, text.encode())
    os._exit(0)


class OperatorCount(TorchDispatchMode):
    """Counts operators that compute or move something; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not getattr(function, "is_view", False)
        return function(*args, **(kwargs or {}))


def kernels(run: Callable[[], Any]) -> int | None:
    """How many kernels one call launches on a GPU; None where the driver does not tell."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    launches = (event for event in recorded.events() if event.name.startswith(("cudaLaunch", "cuLaunch")))
    return sum(1 for _ in launches) or None


class Rates(NamedTuple):
    """What a device reaches: floating-point operations a second in a product, bytes a second, read and written."""

    operations: float
    bytes: float


class Roofline(NamedTuple):
    """Of one call: floating-point operations and bytes of its products, and the seconds they take at least."""

    operations: int
    bytes: int
    seconds: float


class _Products(TorchDispatchMode):
    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self._rates = rates
        self.operations = self.bytes = 0
        self.seconds = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        operations = product_operations(function.overloadpacket.__name__, args, out)
        if operations:
            written = out[0] if isinstance(out, tuple | list) else out  # attention's others may not be wanted
            moved = sum(_bytes(one) for one in (*args, *(kwargs or {}).values(), written))
            self.operations += operations
            self.bytes += moved
            self.seconds += max(operations / self._rates.operations, moved / self._rates.bytes)
        return out


def roofline(run: Callable[[], Any], rates: Rates) -> Roofline:
    """The roofline of what runs, on a device of these rates. It has to be eager: a compiled call is opaque."""
    with _Products(rates) as counted:
        run()
    return Roofline(counted.operations, counted.bytes, counted.seconds)


def product_operations(name: str, args: tuple, out: Any) -> int:
    """Floating-point operations of an operator; 0 where it is no product. A multiply and an add are two."""
    if name.startswith(_ATTENTION):
        queries, keys, values = args[:3]
        return 2 * math.prod(queries.shape[:-1]) * keys.shape[-2] * (queries.shape[-1] + values.shape[-1])
    if name in _CONVOLUTIONS:
        return 2 * out.numel() * args[1][0].numel()
    if name in _FACTORS:
        return 2 * out.numel() * args[_FACTORS[name]].shape[-1]
    return 0


def _bytes(one: Any) -> int:
    """Of a tensor as it lies in memory: one that is expanded is no longer for it."""
    if not torch.is_tensor(one):
        return 0
    return min(one.numel() * one.element_size(), one.untyped_storage().nbytes())
