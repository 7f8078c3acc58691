"""Two steps as one GPU kernel each, where Triton is there: best keys without scores, and means of groups.

Optional all through: Triton is asked for when the first tensor on a GPU comes by, and where it is missing, does
not compile or does not run, torch's operators do the same (equal up to the order in which numbers are added).
``TOME_CORE_TRITON=0`` in the environment does without it. While torch.compile traces, torch's operators are taken:
the compiler makes its own kernels of them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

_log = logging.getLogger(__name__)
DEVICES = ("cuda", "xpu")  # torch calls AMD's GPUs cuda too
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NO_MEMORY = (torch.cuda.OutOfMemoryError, MemoryError)
_asked = False
_kernels: ModuleType | None = None
_why_off = ""


def notes() -> tuple[str, ...]:
    """For the report: that there are no kernels where there could be, and why."""
    return (f"Triton's kernels are off, torch's operators do the same: {_why_off}",) if _why_off else ()


def ready(x: torch.Tensor) -> bool:
    """Whether the kernels can serve this tensor. Imports Triton where the first one asks that they could."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return x.device.type in DEVICES and x.dtype in _DTYPES and _supported(x.device) and _module() is not None


@functools.cache
def _supported(device: torch.device) -> bool:
    """Triton names compute capability 8.0 (Ampere) as its oldest; AMD's GPUs report 9 and more."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def best_keys(
    x: torch.Tensor, rows: torch.Tensor | None, keys: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Score and number of the best key of each query: float32 and int64 ``[B, Q]``; None if it could not run.

    x: ``[B or 1, N, C]``, float32, float16 or bfloat16. rows: int64 ``[B or 1, Q]``, which rows of x are queries,
    None for all. keys: ``[B, K, C]``, float32 or x's dtype, K at least 1. bias: float32 ``[B, K]``, added to the
    scores. Any strides.

    Sums in float32. Float32 keys of half precision queries are multiplied in parts of that dtype that together hold
    float32's digits: no TF32, and no rounding of keys to half precision. Of equal scores the first wins; one that
    is no number never does.
    Law: a query's result has the same bits whatever else is in the batch. With float16 queries keys have to be in
    float16's range, as directions and means of such queries are.
    """
    batch, count = keys.shape[0], x.shape[1] if rows is None else rows.shape[1]
    score = torch.empty(batch, count, dtype=torch.float32, device=keys.device)
    index = torch.empty(batch, count, dtype=torch.int64, device=keys.device)
    x, rows = x.expand(batch, -1, -1), None if rows is None else rows.expand(batch, -1)
    done = _ran(x, lambda kernels: kernels.best_keys(x, rows, keys, bias, score, index))
    return (score, index) if done else None


def mean_rows(x: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor | None:
    """Mean of the rows of each group ``[G, C]``, in the dtype of ``x``; None if it could not run. Not differentiable.

    x: ``[M, C]``, any strides. order: int64 ``[M]``, rows sorted by group. offsets: int64 ``[G + 1]``, where each
    group starts in it. An empty group has mean 0. Summed in float32, each group by one program in a fixed order,
    eight rows at a time: equal bits every time.
    """
    mean = torch.empty(offsets.shape[0] - 1, x.shape[1], dtype=x.dtype, device=x.device)
    return mean if _ran(x, lambda kernels: kernels.mean_rows(x, order, offsets, mean)) else None


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Inside it torch's operators are taken, to compare with."""
    global _asked, _kernels
    before = _asked, _kernels
    _asked, _kernels = True, None
    try:
        yield
    finally:
        _asked, _kernels = before


def _module() -> ModuleType | None:
    global _asked, _kernels, _why_off
    if not _asked:
        _asked = True
        if os.environ.get("TOME_CORE_TRITON") == "0":
            _why_off = "TOME_CORE_TRITON is 0"
        else:
            try:
                from . import triton_kernels as _kernels
            except Exception as error:  # a Triton that does not fit this Python or driver raises anything
                _give_up(error)
    return _kernels


def _ran(x: torch.Tensor, launch: Callable[[ModuleType], None]) -> bool:
    """Launch on the tensor's device; what cannot be compiled or launched here is not tried again."""
    kernels = _module()
    if kernels is None:
        return False
    backend = torch.xpu if x.device.type == "xpu" else torch.cuda
    try:
        with backend.device_of(x):  # Triton launches on the current device, whatever the tensors' is
            launch(kernels)
    except _NO_MEMORY:  # passes: torch's operators may still find some, or say themselves that there is none
        return False
    except Exception as error:  # no C compiler, too old a GPU, too little shared memory: each its own type
        _give_up(error)
        return False
    return True


def _give_up(error: Exception) -> None:
    global _kernels, _why_off
    _kernels = None
    _why_off = f"{type(error).__name__}: {error}"
    _log.debug("no Triton kernels here, torch's operators do the same: %s: %s", type(error).__name__, error)
