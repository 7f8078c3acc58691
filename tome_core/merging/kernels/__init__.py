"""Optional Triton kernels for the steps of a match and of a correction.

Triton is imported when a kernel could serve a tensor for the first time. Torch's operators do the same work, up to the
order of additions, if Triton is missing or fails, if ``TOME_CORE_TRITON=0`` is in the environment, and while
torch.compile traces. For each device and set of constants, a kernel's first result is compared with that of torch's
operators (`proof`). A kernel that differs, or that cannot run, is off until the process ends.

A function of this package returns None if its kernel could not run. Its caller then uses torch's operators.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .proof import find_fault

_log = logging.getLogger(__name__)
DEVICES = ("cuda", "xpu")  # torch calls AMD's GPUs cuda too
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The largest product of tokens and groups for which counting is faster than sorting. Estimated: about 100 us of
# comparisons on a GPU of 132 processors, whereas a sort takes 18 launches. 16,384 tokens in 2,304 groups are below it.
_COUNTED_UP_TO = 2**26
# The largest number of pairs of scores for which comparing all pairs is faster than sorting, which takes at least 4
# launches. Estimated: 16,384 tokens take 60 us on a GPU of 132 processors.
_COMPARED_UP_TO = 2**28
EMPTY_LOGIT = -1000.0  # logit of a group without tokens: 0 after the softmax, but finite, as some kernels need it
WIDEST_HEAD = 256  # channels of a head, a tile of which fits the registers of one program
_is_loaded = False
_kernels: ModuleType | None = None
_why_off = ""
_off: dict[str, str] = {}  # the reason why a kernel is off, by its name
_by_torch: dict[str, None] = {}  # texts of what torch's operators do for a tensor that no kernel takes, in order
_verified: set[tuple] = set()  # kernels that were checked: name, constants, device and dtype


def notes() -> tuple[str, ...]:
    """Return a text for the report for each reason, known by now, why torch's operators do a kernel's work.

    `kernels_off` is no such reason.
    """
    why = {**({"": _why_off} if _why_off else {}), **_off}
    names = {reason: ", ".join(name for name in why if why[name] == reason) for reason in why.values()}
    off = (f"Triton's kernels {name + ' ' if name else ''}are off, torch's operators do the same: {reason}"
           for reason, name in names.items())  # fmt: skip
    return *off, *_by_torch


def ready(x: Tensor) -> bool:
    """Return whether the tensor is float32, float16 or bfloat16 on a device that is `available`."""
    return x.dtype in _DTYPES and available(x.device)


def corrects(q: Tensor) -> bool:
    """Return whether kernels fit and add corrections of `q` ``(batch, tokens, heads, head_dim)``; note why they do not.

    They do in half precision, on a device that is `available`, for heads of up to `WIDEST_HEAD` channels.
    """
    if not available(q.device):
        return False
    why = (f"in {q.dtype}; kernels need half precision" if q.dtype not in _DTYPES[1:]
           else f"of heads of {q.shape[3]} channels; kernels take up to {WIDEST_HEAD}" if q.shape[3] > WIDEST_HEAD
           else "")  # fmt: skip
    if why:
        _by_torch[f"torch's operators, which take longer, make and add corrections {why}"] = None
    return not why


def available(device: torch.device) -> bool:
    """Return whether a device has kernels; False while torch.jit traces. The first call for a GPU imports Triton."""
    if device.type not in DEVICES or torch.jit.is_tracing():
        return False
    return _module() is not None and _supports(device)


def needs_gradient(*tensors: Tensor) -> bool:
    """Return whether gradients are enabled and a tensor requires a gradient, which kernels do not support."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@functools.cache
def _supports(device: torch.device) -> bool:
    """Return whether Triton supports a device of `DEVICES`: all but "cuda" with a compute capability below 8.0.

    Triton before 3.2, which is that of torch 2.4 and 2.5, ends the process when it compiles for 9.0 or newer.
    """
    if device.type != "cuda":
        return True
    capability, kernels = torch.cuda.get_device_capability(device), _module()
    if capability < (8, 0) or kernels is None:
        return False
    if capability < (9, 0) or torch.version.hip is not None or kernels.TRITON >= (3, 2):
        return True
    _by_torch["torch's operators do the work of Triton's kernels, which need Triton 3.2 (torch 2.6) on this GPU"] = None
    return False


def best_keys(
    x: Tensor, rows: Tensor | None, keys: Tensor, bias: Tensor | None, lengths: bool = False
) -> tuple[Tensor, Tensor] | None:
    """Return the highest score of each query, float32, and the number of its key, int64, both ``(batch, queries)``.

    None if the kernel could not run. Arguments are those of `methods.base.best_keys`, with any strides; `lengths`
    subtracts half of the query's squared length from a score.

    Float32 keys of queries in half precision are split into several numbers of half precision that together hold all
    digits: there is no TF32, and keys are not rounded. So keys of float16 queries must be in the range of float16, as
    directions and means of these queries are. Of equal scores the first wins. A NaN never wins; key 0 with minus
    infinity is returned if all scores are NaN. The bits of a result do not depend on the other samples of the batch.
    """
    batch, count = keys.shape[0], x.shape[1] if rows is None else rows.shape[1]
    score = keys.new_empty(batch, count, dtype=torch.float32)
    index = keys.new_empty(batch, count, dtype=torch.int64)
    x, rows = _expanded(x, batch), None if rows is None else _expanded(rows, batch)
    variant = "best_keys", keys.dtype, rows is None, bias is None, lengths
    return (score, index) if launch(x, variant, x, rows, keys, bias, score, index, lengths) else None


def spread(keys: Tensor, values: Tensor, places: Tensor, largest: float) -> Tensor | None:
    """Return `metric.of_unit_spread` of keys and values; None if the kernel could not run.

    Both are ``(batch, tokens, channels)``, any strides; `places` are the numbers of the tokens that tell means and
    spreads, int64 ``(count,)``, up to 64.
    """
    batch, tokens, channels = keys.shape
    features = keys.new_empty(batch, tokens, 2 * channels)
    return features if launch(keys, ("spread", channels), keys, values, places, largest, features) else None


class Means(NamedTuple):
    """The result of `mean_rows`; a field is None if not requested. Rows are ordered by copy (sample), then by group."""

    mean: Tensor  # of each group's rows, (copies * groups, channels) in their dtype
    # minus half the squared length of each rounded mean, minus infinity for an empty group, float32 (copies * groups,)
    bias: Tensor | None
    values: Tensor | None  # the means of the second tensor, of the form of `mean`
    exact: Tensor | None  # the means of the second tensor in float32, not rounded, of the form of `mean`


class Segments(NamedTuple):
    """The tokens sorted by row (sample) and group, and the sizes of the groups."""

    # token t of row r has the number r * tokens + t, int64 (rows * tokens,); tokens of one group keep their order
    order: Tensor
    offsets: Tensor  # each group's start in `order`, then the length of `order`, int64 (rows * groups + 1,)
    sizes: Tensor  # the number of tokens of each group, float32 (rows, groups)
    logs: Tensor  # logarithms of the sizes, `EMPTY_LOGIT` for size 0, float32 (rows, groups)
    rounded: Tensor  # `logs` in the requested dtype


def mean_rows(
    x: Tensor, order: Tensor, offsets: Tensor, tokens: int, bias: bool = False,
    values: Tensor | None = None, exact: bool = True,
) -> Means | None:  # fmt: skip
    """Return the mean of the rows of each group, 0 for an empty group; None if the kernel could not run.

    `x` and `values`, a second tensor, are ``(copies * tokens, channels)``, any strides; the same groups apply to each
    copy (a sample, for instance), which has `tokens` rows. `order` has the numbers of one copy's rows, below `tokens`,
    sorted by group, int64; a row may be in no group. `offsets` has each group's start in `order`, then the length of
    `order`, int64 ``(groups + 1,)``. `bias` requests `Means.bias`; `values` requests `Means.values`, and `Means.exact`
    if `exact`. Sums are in float32, in a fixed order, so equal inputs give equal bits. Not differentiable.
    """
    means = _new_means(x, x.shape[0] // tokens * (offsets.shape[0] - 1), bias, values, exact)
    return means if _fill_means(x, values, order, offsets, tokens, means, exact) else None


def count_and_mean_rows(
    x: Tensor, group: Tensor, num_groups: int, bias: bool = False, values: Tensor | None = None, exact: bool = True
) -> tuple[Means, Segments] | None:
    """Return `mean_rows` of a plan that has not been counted yet, and its segments.

    `group`, int64 ``(rows, tokens)``, has each token's group, below `num_groups`; the groups of a row are its own.
    `Segments.rounded` has the dtype of `x`. None if the kernel could not run, or if ``tokens * num_groups`` exceeds
    `_COUNTED_UP_TO`. Each program goes through all tokens of a row for a group, without a sort and without atomics.
    """
    rows, tokens = group.shape
    if tokens * num_groups > _COUNTED_UP_TO:
        return None
    segments = Segments(
        group.new_empty(rows * tokens),
        group.new_empty(rows * num_groups + 1),
        group.new_empty(rows, num_groups, dtype=torch.float32),
        group.new_empty(rows, num_groups, dtype=torch.float32),
        x.new_empty(rows, num_groups),
    )
    means = _new_means(x, x.shape[0] // (rows * tokens) * rows * num_groups, bias, values, exact)
    counted = (group.contiguous(), *segments[2:])
    filled = _fill_means(x, values, *segments[:2], rows * tokens, means, exact, counted)
    return (means, segments) if filled else None


def _new_means(x: Tensor, numbers: int, bias: bool, values: Tensor | None, exact: bool) -> Means:
    """Return the tensors of `mean_rows`' result, not filled yet, for so many means in all."""
    channels, both = x.shape[1], values is not None
    return Means(
        x.new_empty(numbers, channels),
        x.new_empty(numbers, dtype=torch.float32) if bias else None,
        x.new_empty(numbers, channels) if both else None,
        x.new_empty(numbers, channels, dtype=torch.float32) if both and exact else None,
    )


def _fill_means(
    x: Tensor, values: Tensor | None, order: Tensor, offsets: Tensor, tokens: int, means: Means, exact: bool,
    counted: tuple[Tensor | None, ...] = (None,) * 4,
) -> bool:  # fmt: skip
    """Run the kernel of `mean_rows`; `counted` are the groups of tokens and the last three fields of `Segments`."""
    filled = means.mean, means.values, means.exact, means.bias
    variant = "mean_rows", x.shape[1], values is not None, means.bias is not None, exact, counted[0] is not None
    return launch(x, variant, x, values, order, offsets, tokens, *filled, *counted, EMPTY_LOGIT)


def assign_groups(score: Tensor, index: Tensor, sources: Tensor, destinations: Tensor, removed: int) -> Tensor | None:
    """Return the group of each token, ``(batch, tokens)``, after the `removed` sources with the highest scores merged.

    A merged source joins the group of its best destination. Group i is that of the i-th destination; then come those of
    the sources that stay, one each, by falling score. `sources` and `destinations`, ``(batch or 1, n)``, are numbers of
    tokens, and together all tokens. `score`, float32, and `index`, the place in `destinations` of each source's best
    destination, are ``(batch, sources)``. Indices and groups are int64. Of equal scores the first merges first; NaN
    merges before all numbers. None if the kernel could not run or has more than 16,384 sources.
    """
    batch, count = index.shape
    if count * count > _COMPARED_UP_TO or not available(index.device):
        return None
    group = index.new_empty(batch, count + destinations.shape[1])
    score, index = score.contiguous(), index.contiguous()
    sources, destinations = _expanded(sources.contiguous(), batch), _expanded(destinations.contiguous(), batch)
    return group if launch(index, ("assign_groups",), score, index, sources, destinations, removed, group) else None


class Answers(NamedTuple):
    """What a correction is fitted to, of each head, all in float32. A span is a run of tokens, see `_span`."""

    merged: Tensor  # outputs of a few queries over merged keys, (batch * heads, queries, head_dim)
    full: Tensor  # outputs over the keys of each span as if there were no others, (spans, *merged.shape)
    logs: Tensor  # logsumexp of the logits in each span, (spans, batch * heads, queries)
    # sums over the span's tokens of ``k^T (v - v_g)``, with the token's group's mean value v_g, times the factor of the
    # logits over the number of all tokens, (spans, batch * heads, head_dim, head_dim)
    first: Tensor


def answer(
    q: Tensor, places: Tensor, keys: Tensor, values: Tensor, merged_keys: Tensor, merged_values: Tensor, bias: Tensor,
    group: Tensor, means: Tensor, scale: float,
) -> Answers | None:  # fmt: skip
    """Compute attention of a few queries over merged keys and over all keys, and what is known of the difference.

    All tensors but the last two have the same half precision. `q` is ``(batch, tokens, heads, head_dim)``; `places` are
    the numbers of its tokens that are answered, int64 ``(queries,)``. Keys and values are ``(batch, number, heads *
    head_dim)``, any strides; merged ones, a row for each group, are contiguous. `bias`, ``(batch or 1, groups)``,
    finite, is added to the logits of merged keys, which are multiplied by `scale` before. `group` is int64 ``(batch or
    1, tokens)``; `means`, the groups' mean values, are contiguous float32. None if the kernel could not run.
    """
    batch, tokens, heads, width = *keys.shape[:2], *q.shape[2:]
    span, count = _span(tokens), places.shape[0]
    spans, programs = -(-tokens // span), batch * heads
    answers = Answers(
        q.new_empty(programs, count, width, dtype=torch.float32),
        q.new_empty(spans, programs, count, width, dtype=torch.float32),
        q.new_empty(spans, programs, count, dtype=torch.float32),
        q.new_empty(spans, programs, width, width, dtype=torch.float32),
    )
    bias, group = _expanded(bias.contiguous(), batch), _expanded(group.contiguous(), batch)
    inputs = q, places, keys, values, merged_keys, merged_values, bias, group, means
    return answers if launch(q, ("answer", width), *inputs, span, scale, *answers) else None


def _expanded(x: Tensor, batch: int) -> Tensor:
    """Return `x` ``(batch or 1, ...)`` as ``(batch, ...)``. A view costs the host 1 us, so a full `x` is not viewed."""
    return x if x.shape[0] == batch else x.expand(batch, *x.shape[1:])


def _span(tokens: int) -> int:
    """Return the length of a span of `tokens`: an eighth, rounded up, but at least 512. Eight spans keep a GPU busy."""
    return max(512, -(-tokens // 8))


def ridge(
    q: Tensor, places: Tensor, answers: Answers, block: int, steps: int, penalty: float, least: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Fit a correction by ridge regression: return matrix and constant, in the dtype of `q`, and the error.

    In each `block` of a head's channels, the correction predicts the output over all keys, less the output over merged
    keys, from the query and the latter; what `Answers.first` adds up to is known before, as a part of the matrix' upper
    half. If this is 0 in the dtype of `q`, merging loses nothing and the correction is 0. The error is that of
    `correction.Correction`. `q` and `places` are those of `answer`; `steps` is the number of Newton's steps for this
    `penalty`, see `correction.inverse`; `least` is the smallest variance that counts, as a share of the mean square.
    None if the kernel could not run.
    """
    heads, _, width = answers.merged.shape
    matrix, constant = q.new_empty(heads, 2 * width, width), q.new_empty(heads, 1, width)
    found = matrix, constant, q.new_empty(heads * (width // block), 2, dtype=torch.float32)
    given, left = (q, places, *answers, block, steps, penalty, least), torch.empty_like(answers.merged)
    return found if launch(q, ("ridge", width, len(answers.full)), *given, *found, left) else None


def correct(out: Tensor, q: Tensor, matrix: Tensor, constant: Tensor, block: int) -> Tensor | None:
    """Return ``out + q M1 + out M2 + b`` in each head, a new tensor; None if the kernel could not run.

    `out` and `q` are ``(batch, tokens, heads, head_dim)``; all have the same half precision. `matrix`, ``M1`` above
    ``M2``, whose blocks of `block` channels on the diagonal count, and `constant`, ``b``, are those of
    `correction.Correction`, contiguous.
    """
    width = matrix.shape[2]
    corrected = torch.empty_like(out, memory_format=torch.contiguous_format)
    return corrected if launch(out, ("correct", width), out, q, matrix, constant, block, corrected) else None


@contextlib.contextmanager
def kernels_off() -> Iterator[None]:
    """Turn all kernels off inside this context, in all threads, to compare them with torch's operators."""
    global _is_loaded, _kernels
    before, (_is_loaded, _kernels) = (_is_loaded, _kernels), (True, None)
    try:
        yield
    finally:
        _is_loaded, _kernels = before


def _module() -> ModuleType | None:
    """Return `triton_kernels`, imported by the first call; None if the import fails, or all kernels are off."""
    global _is_loaded, _kernels, _why_off
    if _is_loaded:
        return _kernels
    _is_loaded = True
    if os.environ.get("TOME_CORE_TRITON") == "0":
        _why_off = "TOME_CORE_TRITON is 0"
        return None
    try:
        from . import triton_kernels as _kernels
    except Exception as error:  # a Triton that does not fit this Python or driver can raise any error
        _why_off = f"{type(error).__name__}: {error}"
        _log.debug("no Triton kernels here, torch's operators do the same: %s", _why_off)
    return _kernels


def launch(x: Tensor, variant: tuple[Any, ...], *arguments: Any) -> bool:
    """Run a kernel, which fills some of `arguments`. Return False if torch's operators have to do the work, else True.

    `variant` is the kernel's name and the constants for which it is compiled, apart from the dtype and the
    (`available`) device of `x`. `arguments` are those of this function in `triton_kernels`. A result is checked unless
    an earlier one of the same constants, dtype and device was right. A kernel that cannot be compiled or launched, or
    whose result is wrong, is off until the process ends. If memory is too small, only this run fails, and so does a run
    that must be checked but cannot be: during the capture of a CUDA graph, or with inputs that are not finite.
    """
    kernels, name = _module(), variant[0]
    if kernels is None or name in _off:
        return False
    device = x.device
    key = (*variant, device, x.dtype)
    is_proven = key in _verified
    if not is_proven and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False  # a check waits for the device, which is not possible while a graph is captured
    try:
        if (guard := _guard(device)) is None:
            getattr(kernels, name)(*arguments)
        else:
            with guard(x):
                getattr(kernels, name)(*arguments)
        return is_proven or _proves_itself(key, arguments)
    except (torch.cuda.OutOfMemoryError, MemoryError):  # the kernel stays on; torch's operators run this time
        return False
    except Exception as error:  # no C compiler, too old a GPU, too little shared memory: each has its own type
        _give_up(name, f"{type(error).__name__}: {error}")
        return False


@functools.cache
def _guard(device: torch.device) -> Callable[[Tensor], contextlib.AbstractContextManager] | None:
    """Return a context that makes the device of a tensor current; None if there is no other device of its type.

    Triton launches on the current device, not on that of the tensors. A context costs the host 1 us a launch.
    """
    backend = torch.xpu if device.type == "xpu" else torch.cuda
    return backend.device_of if backend.device_count() > 1 else None


def _proves_itself(key: tuple, arguments: tuple[Any, ...]) -> bool:
    """Return whether what a kernel has just written is right; then keep its key, else turn the kernel off.

    A key is (name, *constants, device, dtype). Inputs that are not finite prove nothing: False, but the kernel stays.
    """
    fault = find_fault(key[0], arguments)
    if fault == "":
        _verified.add(key)
    elif fault:
        _give_up(key[0], f"on {key[-2]} in {key[-1]} {fault}")
    return fault == ""


def _give_up(name: str, why: str) -> None:
    """Turn the kernel `name` off for this process, all constants and devices; log (debug) and note (`notes`) why."""
    _off[name] = why
    _log.debug("Triton's kernel %s is off, torch's operators do the same: %s", name, why)
