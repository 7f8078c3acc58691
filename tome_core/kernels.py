"""Steps of a match as one GPU kernel each, where Triton is there.

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
from typing import NamedTuple

import torch

_log = logging.getLogger(__name__)
DEVICES = ("cuda", "xpu")  # torch calls AMD's GPUs cuda too
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Products of tokens and groups up to which counting beats sorting: estimated, some 100 us of compares on a GPU of 132
# processors, where a sort is 18 launches and the host's time for them. 16,384 tokens in 2,304 groups are within.
_COUNTED_UP_TO = 2**26
# channels of a head whose equations, and whose matrix, fit one program's registers
RIDGE_WIDEST, WIDEST_HEAD = 64, 128
_NO_MEMORY = (torch.cuda.OutOfMemoryError, MemoryError)
_asked = False
_kernels: ModuleType | None = None
_why_off = ""


def notes() -> tuple[str, ...]:
    """For the report: that there are no kernels where there could be, and why."""
    return (f"Triton's kernels are off, torch's operators do the same: {_why_off}",) if _why_off else ()


def ready(x: torch.Tensor) -> bool:
    """Whether the kernels can serve this tensor. Imports Triton where the first one asks that they could."""
    return x.dtype in _DTYPES and available(x.device)


def ready_for_halves(x: torch.Tensor) -> bool:
    """`ready`, for the kernels that multiply half precision alone: torch's products serve float32 as well."""
    return x.dtype in _DTYPES[1:] and available(x.device)


def available(device: torch.device) -> bool:
    """Whether there are kernels for this device."""
    if device.type not in DEVICES or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return _supported(device) and _module() is not None


def needs_gradient(*tensors: torch.Tensor) -> bool:
    """Whether a backward pass may follow, which kernels have none for."""
    return torch.is_grad_enabled() and any(one.requires_grad for one in tensors)


@functools.cache
def _supported(device: torch.device) -> bool:
    """Triton names compute capability 8.0 (Ampere) as its oldest; AMD's GPUs report 9 and more."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def best_keys(
    x: torch.Tensor, rows: torch.Tensor | None, keys: torch.Tensor, bias: torch.Tensor | None, lengths: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Score and number of the best key of each query: float32 and int64 ``[B, Q]``; None if it could not run.

    x: ``[B or 1, N, C]``, float32, float16 or bfloat16. rows: int64 ``[B or 1, Q]``, which rows of x are queries,
    None for all. keys: ``[B, K, C]``, float32 or x's dtype, K at least 1. bias: float32 ``[B, K]``, added to the
    scores. Any strides. lengths: take half of each query's squared length off its score.

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
    done = _ran(x, lambda kernels: kernels.best_keys(x, rows, keys, bias, score, index, lengths))
    return (score, index) if done else None


class Means(NamedTuple):
    """Of the rows of each group: ``mean [K * G, C]`` in the dtype of x, and what else was asked for: `mean_rows`."""

    mean: torch.Tensor
    exact: torch.Tensor | None
    bias: torch.Tensor | None


def mean_rows(
    x: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, tokens: int, exact: bool = False, bias: bool = False
) -> Means | None:
    """Mean of the rows of each group; None if it could not run. Not differentiable.

    x: ``[K * tokens, C]``, any strides: K copies of so many rows, to each of which the same groups apply. order: int64,
    rows of one copy sorted by group. offsets: int64 ``[G + 1]``, where each group starts in it. An empty group has
    mean 0. Summed in float32, each group by one program in a fixed order, eight rows at a time: equal bits every time.
    exact: as float32, unrounded, too. bias: minus half the squared length of each rounded mean, float32 ``[K * G]``,
    minus infinity for an empty group.
    """
    count = x.shape[0] // tokens * (offsets.shape[0] - 1)
    means = Means(
        torch.empty(count, x.shape[1], dtype=x.dtype, device=x.device),
        torch.empty(count, x.shape[1], dtype=torch.float32, device=x.device) if exact else None,
        torch.empty(count, dtype=torch.float32, device=x.device) if bias else None,
    )
    return means if _ran(x, lambda kernels: kernels.mean_rows(x, order, offsets, tokens, *means)) else None


class Segments(NamedTuple):
    """order: int64 ``[R * N]``, tokens by group, in their order inside of each. offsets: int64 ``[R * G + 1]``, where
    each group starts. sizes: float32 ``[R, G]``. logs: of the sizes, finite, float32 ``[R, G]``.
    """

    order: torch.Tensor
    offsets: torch.Tensor
    sizes: torch.Tensor
    logs: torch.Tensor


def segments(group: torch.Tensor, num_groups: int, empty: float) -> Segments | None:
    """What follows from ``group``, int64 ``[R, N]``; None if it could not run. empty: the logarithm of no tokens.

    Every program goes through all tokens of a row for 16 groups, in pieces that do not change: no sorting, no atomics.
    """
    rows, tokens = group.shape
    if tokens * num_groups > _COUNTED_UP_TO or not available(group.device):
        return None
    found = Segments(
        torch.empty(rows * tokens, dtype=torch.int64, device=group.device),
        torch.empty(rows * num_groups + 1, dtype=torch.int64, device=group.device),
        torch.empty(rows, num_groups, dtype=torch.float32, device=group.device),
        torch.empty(rows, num_groups, dtype=torch.float32, device=group.device),
    )
    group = group.contiguous()
    return found if _ran(group, lambda kernels: kernels.segments(group, *found, empty)) else None


def spread(x: torch.Tensor, parts: int) -> torch.Tensor | None:
    """``x [B, N, C]`` centred, and each of so many parts of its channels at a variance of 1, in the dtype of x.

    None if it could not run. Two kernels: moments of spans of tokens, which are as many whatever else runs, and the
    rest. In float32 in between.
    """
    batch, tokens, channels = x.shape
    span = max(1024, -(-tokens // 16))
    moments = torch.empty(batch, -(-tokens // span), 2, channels, dtype=torch.float32, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    least = torch.finfo(x.dtype).tiny

    def launch(kernels: ModuleType) -> None:
        kernels.moments(x, moments, span)
        kernels.spread(x, moments, span, parts, least, out)

    return out if _ran(x, launch) else None


def placed(
    order: torch.Tensor, index: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, removed: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Groups ``[B, S + D]`` and representatives ``[B, S + D - removed]``, int64; None if it could not run.

    order: int64 ``[B, S]``, sources from the first to merge to the last. index: int64 ``[B, S]``, the destination of
    each source. sources, destinations: their tokens, int64 ``[B or 1, S or D]``. Destinations are numbered first.
    """
    (batch, count), groups = index.shape, index.shape[1] + destinations.shape[1] - removed
    group = torch.empty(batch, count + destinations.shape[1], dtype=torch.int64, device=index.device)
    representative = torch.empty(batch, groups, dtype=torch.int64, device=index.device)
    order, index = order.contiguous(), index.contiguous()
    sources, destinations = (one.contiguous().expand(batch, -1) for one in (sources, destinations))
    done = _ran(index, lambda kernels: kernels.placed(
        order, index, sources, destinations, removed, group, representative
    ))  # fmt: skip
    return (group, representative) if done else None


def first_order(
    both: torch.Tensor, group: torch.Tensor, means: torch.Tensor, heads: int, scale: float
) -> torch.Tensor | None:
    """Sums over tokens of ``k^T (v - v_g) scale``: float32 ``[P, B*H, d, d]``, to be added up.

    None if it could not run, or heads are too wide. both: keys and values side by side, ``[B, N, 2*H*d]``, half
    precision, any strides. group: int64 ``[B or 1, N]``. means: float32 ``[B, G, 2*H*d]``, of the groups, contiguous.
    P spans of tokens, which depend on N alone. Differences are multiplied in parts that together hold float32's digits.
    """
    batch, tokens, channels = both.shape
    width, span = channels // (2 * heads), max(512, -(-tokens // 32))
    if width > WIDEST_HEAD:
        return None
    found = torch.empty(-(-tokens // span), batch * heads, width, width, dtype=torch.float32, device=both.device)
    group = group.contiguous().expand(batch, -1)
    done = _ran(both, lambda kernels: kernels.first_order(
        both, group, means, span, kernels.parts_of(both.dtype, means.dtype), scale, found
    ))  # fmt: skip
    return found if done else None


def ridge(
    q: torch.Tensor, merged: torch.Tensor, full: torch.Tensor, first: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The correction that `attention.correction` describes, in the dtype of q; None if it could not run.

    q: ``[B, n, H*d]``, half precision. merged, full: its answers ``[B, H, n, d]`` from merged and from all keys.
    first: as `first_order` gives it. d is at most `RIDGE_WIDEST`. Returns ``[B*H, 2d, d]`` and ``[B*H, 1, d]``.
    """
    width = first.shape[2]
    matrix = torch.empty(first.shape[1], 2 * width, width, dtype=q.dtype, device=q.device)
    constant = torch.empty(first.shape[1], 1, width, dtype=q.dtype, device=q.device)
    done = _ran(q, lambda kernels: kernels.ridge(q, merged, full, first, matrix, constant))
    return (matrix, constant) if done else None


def corrected(
    out: torch.Tensor, q: torch.Tensor, matrix: torch.Tensor, constant: torch.Tensor
) -> torch.Tensor | None:
    """``out + q M1 + out M2 + b`` in each head; None if it could not run, or heads are too wide.

    out, q: ``[B, N, H*d]``, half precision. matrix: ``[B*H, 2d, d]``, constant: ``[B*H, 1, d]``, contiguous. All of one
    dtype.
    """
    if matrix.shape[2] > WIDEST_HEAD:
        return None
    to = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    return to if _ran(out, lambda kernels: kernels.corrected(out, q, matrix, constant, to)) else None


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
