"""Steps of a match, and of a correction, as one GPU kernel each, where Triton is there.

Optional: Triton is asked for when the first tensor on a GPU comes by. Where it is missing, fails, or is not wanted
(``TOME_CORE_TRITON=0`` in the environment), and while torch.compile traces, torch's operators do the same, equal up to
the order in which numbers are added.

A kernel proves itself where it runs: its first result on a device, for each set of constants that it is compiled for,
is compared with that of torch's operators (`proof`). A kernel that differs, or cannot run, is off for the process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .proof import find_fault

_log = logging.getLogger(__name__)
DEVICES = ("cuda", "xpu")  # torch calls AMD's GPUs cuda too
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Products of tokens and groups up to which counting beats sorting: estimated, some 100 us of compares on a GPU of 132
# processors, where a sort is 18 launches and the host's time for them. 16,384 tokens in 2,304 groups are within.
_COUNTED_UP_TO = 2**26
# Pairs of scores up to which ranking by comparing all with all beats a sort, which is 4 launches and more: estimated,
# 16,384 tokens take 60 us on a GPU of 132 processors.
_COMPARED_UP_TO = 2**28
# channels of a head whose equations, and whose matrix, fit one program's registers
RIDGE_WIDEST, WIDEST_HEAD = 64, 128
_asked = False
_kernels: ModuleType | None = None
_why_off = ""
_off: dict[str, str] = {}  # kernels that are not used any more, by name, and why
_proven: set[tuple] = set()  # names, devices, and what else a kernel is compiled for


def notes() -> tuple[str, ...]:
    """For the report: that there are no kernels where there could be, or which are off, and why."""
    why = {**({"": _why_off} if _why_off else {}), **_off}
    names = {reason: ", ".join(name for name in why if why[name] == reason) for reason in why.values()}
    return tuple(f"Triton's kernels {name + ' ' if name else ''}are off, torch's operators do the same: {reason}"
                 for reason, name in names.items())  # fmt: skip


def ready(x: torch.Tensor) -> bool:
    """Whether the kernels can serve this tensor. Imports Triton where the first one asks that they could."""
    return x.dtype in _DTYPES and available(x.device)


def ready_for_halves(x: torch.Tensor) -> bool:
    """`ready`, for the kernels that multiply half precision alone: torch's products serve float32 as well."""
    return x.dtype in _DTYPES[1:] and available(x.device)


def available(device: torch.device) -> bool:
    """Whether there are kernels for this device."""
    if device.type not in DEVICES or torch.jit.is_tracing():
        return False
    return _supports(device) and _module() is not None


def fit_whole(q: torch.Tensor) -> bool:
    """Whether kernels fit a correction to all heads of ``q [B, N, H, d]`` at once, and hold little of it in memory."""
    return q.shape[3] <= RIDGE_WIDEST and ready_for_halves(q) and not needs_gradient(q)


def needs_gradient(*tensors: torch.Tensor) -> bool:
    """Whether a backward pass may follow, which kernels have none for."""
    return torch.is_grad_enabled() and any(one.requires_grad for one in tensors)


@functools.cache
def _supports(device: torch.device) -> bool:
    """Triton's oldest compute capability is 8.0 (Ampere); AMD's GPUs report 9 and more."""
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
    score, index = (torch.empty(batch, count, dtype=kind, device=keys.device) for kind in (torch.float32, torch.int64))
    x, rows = x.expand(batch, -1, -1), None if rows is None else rows.expand(batch, -1)
    which = "best_keys", keys.dtype, rows is None, bias is None, lengths
    return (score, index) if launch(x, which, x, rows, keys, bias, score, index, lengths) else None


class Means(NamedTuple):
    """What `mean_rows` gives: ``mean [K * G, C]`` of the rows of each group, and what else was asked for."""

    mean: torch.Tensor
    bias: torch.Tensor | None
    values: torch.Tensor | None
    exact: torch.Tensor | None


def mean_rows(
    x: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, tokens: int, bias: bool = False,
    values: torch.Tensor | None = None, exact: bool = True,
) -> Means | None:  # fmt: skip
    """Mean of the rows of each group; None if it could not run. Not differentiable.

    x: ``[K * tokens, C]``, any strides: K copies of so many rows, to each of which the same groups apply. order: int64,
    rows of one copy sorted by group. offsets: int64 ``[G + 1]``, where each group starts in it. An empty group has
    mean 0. Summed in float32, each group by one program in a fixed order, some rows at a time: equal bits every time.
    bias: minus half the squared length of each rounded mean, float32 ``[K * G]``, minus infinity for an empty group.
    values: as x; their means too, rounded as ``values`` and, if ``exact``, in float32.
    """
    shape, both = (x.shape[0] // tokens * (offsets.shape[0] - 1), x.shape[1]), values is not None
    means = Means(
        torch.empty(shape, dtype=x.dtype, device=x.device),
        torch.empty(shape[:1], dtype=torch.float32, device=x.device) if bias else None,
        torch.empty(shape, dtype=x.dtype, device=x.device) if both else None,
        torch.empty(shape, dtype=torch.float32, device=x.device) if both and exact else None,
    )
    filled = means.mean, means.values, means.exact, means.bias
    which = "mean_rows", x.shape[1], both, bias, exact
    return means if launch(x, which, x, values, order, offsets, tokens, *filled) else None


class Segments(NamedTuple):
    """The tokens sorted by group, and how many each has.

    order: int64 ``[R * N]``, in their order inside of each. offsets: int64 ``[R * G + 1]``, where they start. sizes:
    float32 ``[R, G]``. logs: of them, finite, float32 ``[R, G]``. rounded: in the dtype asked for.
    """

    order: torch.Tensor
    offsets: torch.Tensor
    sizes: torch.Tensor
    logs: torch.Tensor
    rounded: torch.Tensor


def segments(group: torch.Tensor, num_groups: int, empty: float, dtype: torch.dtype) -> Segments | None:
    """What follows from ``group``, int64 ``[R, N]``; None if it could not run. empty: the logarithm of no tokens.

    Every program goes through all tokens of a row for a few groups, in pieces that do not change: no sort, no atomics.
    """
    rows, tokens = group.shape
    if tokens * num_groups > _COUNTED_UP_TO or not available(group.device):
        return None
    lists = (torch.empty(size, dtype=torch.int64, device=group.device)
             for size in (rows * tokens, rows * num_groups + 1))  # fmt: skip
    tables = (torch.empty(rows, num_groups, dtype=kind, device=group.device)
              for kind in (torch.float32, torch.float32, dtype))  # fmt: skip
    found = Segments(*lists, *tables)
    group = group.contiguous()
    return found if launch(group, ("segments", dtype), group, *found, empty) else None


def place_tokens(
    score: torch.Tensor, index: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, removed: int
) -> torch.Tensor | None:
    """Groups, int64 ``[B, S + D]``; None if it could not run.

    score: float32 ``[B, S]``, of the sources; the highest merge, of equal ones the first. index: int64 ``[B, S]``, the
    destination of each source. sources, destinations: their tokens, int64 ``[B or 1, S or D]``. Destinations are
    numbered first, then the sources that stay, from the highest score on. Every score is compared with all others.
    """
    batch, count = index.shape
    if count * count > _COMPARED_UP_TO or not available(index.device):
        return None
    group = torch.empty(batch, count + destinations.shape[1], dtype=torch.int64, device=index.device)
    score, index = score.contiguous(), index.contiguous()
    sources, destinations = (one.contiguous().expand(batch, -1) for one in (sources, destinations))
    return group if launch(index, ("place_tokens",), score, index, sources, destinations, removed, group) else None


def first_order(
    keys: torch.Tensor, values: torch.Tensor, group: torch.Tensor, means: torch.Tensor, heads: int, scale: float
) -> torch.Tensor | None:
    """Sums over tokens of ``k^T (v - v_g) scale``: float32 ``[P, B*H, d, d]``, to be added up.

    None if it could not run, or heads are too wide. keys, values: ``[B, N, H*d]``, half precision, any strides. group:
    int64 ``[B or 1, N]``. means: of the groups' values, float32 ``[B, G, H*d]``, contiguous. P spans of tokens, which
    depend on N alone. Differences are multiplied in parts that together hold float32's digits.
    """
    batch, tokens, channels = keys.shape
    width, span = channels // heads, _span(tokens)
    if width > WIDEST_HEAD:
        return None
    found = torch.empty(-(-tokens // span), batch * heads, width, width, dtype=torch.float32, device=keys.device)
    group = group.contiguous().expand(batch, -1)
    return found if launch(keys, ("first_order", width), keys, values, group, means, span, scale, found) else None


class Answers(NamedTuple):
    """Of n queries of each head, float32: merged ``[B*H, n, d]``, from merged keys; full ``[P, B*H, n, d]``, from each
    of P spans of all keys; logs ``[P, B*H, n]``, the logarithms of what the weights in each add up to.
    """

    merged: torch.Tensor
    full: torch.Tensor
    logs: torch.Tensor


def answer_few(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, merged_keys: torch.Tensor,
    merged_values: torch.Tensor, bias: torch.Tensor, heads: int, scale: float,
) -> Answers | None:  # fmt: skip
    """Attention of a few queries over merged and over all keys, in one kernel; None if it could not run.

    q: ``[B, n, H*d]``, half precision, any strides, as keys and values ``[B, N, H*d]`` are. merged_keys, merged_values:
    ``[B, G, H*d]``, contiguous. bias: of the merged keys, ``[B or 1, G]``, finite. All of one dtype. Spans as
    `first_order` has them, so that few queries keep a whole GPU busy.
    """
    batch, tokens, channels = keys.shape
    width, span, count = channels // heads, _span(tokens), q.shape[1]
    real = {"dtype": torch.float32, "device": q.device}
    full = torch.empty(-(-tokens // span), batch * heads, count, width, **real)
    found = Answers(torch.empty(full.shape[1:], **real), full, torch.empty(full.shape[:3], **real))
    made = q, keys, values, merged_keys, merged_values, bias.contiguous().expand(batch, -1)
    return found if launch(q, ("answer_few", width), *made, span, scale, *found) else None


def _span(tokens: int) -> int:
    """Eight spans of a long sequence: with a batch's heads enough for any GPU, and few to be put together again."""
    return max(512, -(-tokens // 8))


def ridge(q: torch.Tensor, answers: Answers, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The correction that `attention.correction` describes, in the dtype of q; None if it could not run.

    q: as `answer_few` has it, with its answers. first: as `first_order` gives it. d is at most `RIDGE_WIDEST`.
    Returns ``[B*H, 2d, d]`` and ``[B*H, 1, d]``.
    """
    width = first.shape[2]
    matrix = torch.empty(first.shape[1], 2 * width, width, dtype=q.dtype, device=q.device)
    constant = torch.empty(first.shape[1], 1, width, dtype=q.dtype, device=q.device)
    return (matrix, constant) if launch(q, ("ridge", width, len(first)), q, *answers, first, matrix, constant) else None


def correct(out: torch.Tensor, q: torch.Tensor, matrix: torch.Tensor, constant: torch.Tensor) -> torch.Tensor | None:
    """``out + q M1 + out M2 + b`` in each head; None if it could not run, or heads are too wide.

    out, q: ``[B, N, H*d]``, half precision. matrix: ``[B*H, 2d, d]``, constant: ``[B*H, 1, d]``, contiguous. All of one
    dtype.
    """
    width = matrix.shape[2]
    if width > WIDEST_HEAD:
        return None
    to = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    return to if launch(out, ("correct", width), out, q, matrix, constant, to) else None


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Inside it torch's operators are taken, to compare with."""
    global _asked, _kernels
    before, (_asked, _kernels) = (_asked, _kernels), (True, None)
    try:
        yield
    finally:
        _asked, _kernels = before


def _module() -> ModuleType | None:
    global _asked, _kernels, _why_off
    if _asked:
        return _kernels
    _asked = True
    if os.environ.get("TOME_CORE_TRITON") == "0":
        _why_off = "TOME_CORE_TRITON is 0"
        return None
    try:
        from . import triton_kernels as _kernels
    except Exception as error:  # a Triton that does not fit this Python or driver raises anything
        _why_off = f"{type(error).__name__}: {error}"
        _log.debug("no Triton kernels here, torch's operators do the same: %s", _why_off)
    return _kernels


def launch(x: torch.Tensor, which: tuple[Any, ...], *arguments: Any) -> bool:
    """Launch a kernel on the tensor's device, where it has been proven, or proves itself now.

    Args:
        x: what the kernel is compiled for the dtype of.
        which: its name, and what else it is compiled for.
        arguments: of the function of this name in `triton_kernels`.

    Returns:
        Whether its outputs can be used. What cannot be compiled or launched, or is wrong, is not tried again.
    """
    kernels, name = _module(), which[0]
    if kernels is None or name in _off:
        return False
    key = (*which, x.device, x.dtype)
    is_proven = key in _proven
    if not is_proven and x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False  # a graph that is recorded can wait for nothing
    backend = torch.xpu if x.device.type == "xpu" else torch.cuda
    try:
        with backend.device_of(x):  # Triton launches on the current device, whatever the tensors' is
            getattr(kernels, name)(*arguments)
        return is_proven or _proves_itself(key, arguments)
    except (torch.cuda.OutOfMemoryError, MemoryError):  # passes: torch's operators may find some, or say that none is
        return False
    except Exception as error:  # no C compiler, too old a GPU, too little shared memory: each its own type
        _give_up(name, f"{type(error).__name__}: {error}")
        return False


def _proves_itself(key: tuple, arguments: tuple[Any, ...]) -> bool:
    fault = find_fault(key[0], arguments)
    if fault == "":
        _proven.add(key)
    elif fault:
        _give_up(key[0], f"on {key[-2]} in {key[-1]} {fault}")
    return fault == ""


def _give_up(name: str, why: str) -> None:
    _off[name] = why
    _log.debug("Triton's kernel %s is off, torch's operators do the same: %s", name, why)
