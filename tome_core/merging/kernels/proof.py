"""Checks of the results of kernels: each is computed again with torch's operators in float64, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TINY = 1e-12
_SCORES_AT_ONCE, _CHANNELS, _TOKENS = 2**23, 64, 4096  # sizes of pieces, which limit the memory of float64 tensors


class Output(NamedTuple):
    """A tensor that a kernel filled, or a part of it, with the values to expect."""

    name: str  # for messages
    found: Tensor
    expected: Tensor
    allowed: Tensor | float  # the largest allowed difference of each element


def find_fault(name: str, arguments: tuple[Any, ...]) -> str | None:
    """Check what a kernel filled: return a message about the first wrong output, or "" if nothing is wrong.

    None if the inputs are not finite: then the check means nothing. `name` is that of the kernel's function in
    `triton_kernels`, `arguments` are its arguments, already filled. Waits for the device.
    """
    check, finite = _CHECKS[name]
    if arguments[0].device.type == "xpu":  # small XPUs have no float64
        arguments = tuple(value.cpu() if torch.is_tensor(value) else value for value in arguments)
    excesses = [_excess(output) for output in check(*arguments)]  # one output at a time is in memory
    inputs = [value for value in arguments[:finite] if torch.is_tensor(value)]
    is_finite = torch.stack([tensor.isfinite().all() for tensor in inputs]).all()
    was_finite, *worst = torch.stack([is_finite.to(torch.float64), *excesses]).tolist()
    if not was_finite:
        return None
    if max(worst) <= 1:
        return ""
    return next(_message(output) for output, excess in zip(check(*arguments), worst, strict=True) if excess > 1)


def _excess(output: Output) -> Tensor:
    """Return the largest of `_shares`, a float64 scalar; 0 for an output without elements. A fault is above 1."""
    if not output.found.numel():
        return torch.zeros((), dtype=torch.float64, device=output.found.device)
    return _shares(output).max()


def _shares(output: Output) -> Tensor:
    """Return each element's difference, divided by the allowed difference: 0 for equal values, infinity for any NaN."""
    found, expected = output.found.double(), output.expected.double()
    share = (found - expected).abs() / (output.allowed + torch.zeros_like(expected))
    share = torch.where(share.isnan(), torch.inf, share)  # NaN also comes from two infinities, and from 0 / 0
    return torch.where(found == expected, 0.0, share)


def _message(output: Output) -> str:
    """Return ``its NAME has FOUND where torch's operators have EXPECTED``, of the worst element by `_shares`."""
    place = int(_shares(output).argmax())
    tensors = output.found, output.expected.expand_as(output.found)
    found, expected = (tensor.flatten()[place].item() for tensor in tensors)
    return f"its {output.name} has {found:.6g} where torch's operators have {expected:.6g}"


def _rounding(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bound of the error of rounding each exact value to a dtype: its ``eps`` times ``abs(exact) + tiny``."""
    return torch.finfo(dtype).eps * (exact.abs() + torch.finfo(dtype).tiny)


def _by_head(flat: Tensor, width: int) -> Tensor:
    """Return ``(batch, tokens, heads * width)`` as ``(batch * heads, tokens, width)``, in float64."""
    return flat.double().unflatten(2, (-1, width)).transpose(1, 2).flatten(0, 1)


# --- the checks: each takes the arguments of the function of its name in `triton_kernels`, filled tensors included ----


def best_keys(x, rows, keys, bias, score, index, lengths) -> Iterator[Output]:
    """Check `triton_kernels.best_keys`: yield keys' numbers, which must exist, then two outputs for a slice of queries.

    Both are expected to be close to the best score in float64: the score found, and the float64 score of the key found.
    So if scores nearly tie, each of their keys is right.
    """
    keys, count = keys.double(), keys.shape[1]
    longest = keys.norm(dim=2).amax(1)[:, None]
    yield Output("number of a key", index, index.clamp(0, count - 1), 0.0)
    step = max(1, _SCORES_AT_ONCE // (len(keys) * count))
    for start in range(0, index.shape[1], step):
        at = slice(start, start + step)
        if rows is None:
            queries = x[:, at].double()
        else:
            queries = x.gather(1, rows[:, at, None].expand(-1, -1, x.shape[2])).double()
        scores = queries @ keys.mT
        length = queries.norm(dim=2)
        allowed = 4e-6 * (length * longest + 1)
        if bias is not None:
            scores += bias.double()[:, None]
            allowed = allowed + 4e-6 * bias.double().abs().masked_fill(bias.isinf(), 0).amax(1)[:, None]
        if lengths:
            scores -= length[..., None].square() / 2
            allowed = allowed + 4e-6 * length.square()
        best, chosen = scores.amax(2), scores.gather(2, index[:, at, None].clamp(0, count - 1))[..., 0]
        yield Output("best score", score[:, at], best, allowed)
        yield Output("best key's score", chosen, best, allowed)


def spread(keys, values, places, largest, features) -> Iterator[Output]:
    """Check `triton_kernels.spread`: yield the features of keys and of values, by runs of tokens."""
    channels = keys.shape[2]
    for name, x, found in zip(("keys", "values"), (keys, values), features.split(channels, 2), strict=True):
        few = x[:, places].double()
        mean = few.mean(1, keepdim=True)
        unit = (few - mean).square().mean((1, 2), keepdim=True).clamp(min=_TINY).rsqrt()
        for rows, some in zip(x.split(_TOKENS, 1), found.split(_TOKENS, 1), strict=True):
            expected = ((rows.double() - mean) * unit).clamp(-largest, largest)
            allowed = 1e-5 * (rows.double().abs() + mean.abs()) * unit + 1e-5 * expected.abs()
            yield Output(f"spread of {name}", some, expected, allowed + _rounding(expected, some.dtype))


def mean_rows(
    x, values, order, offsets, tokens, mean, mean_values, exact, bias, group, counts, logs, rounded, empty
) -> Iterator[Output]:
    """Yield what was counted, if there is a `group`; the means that are not None, in pieces; then `bias`.

    Of what was counted only logarithms may differ. The allowed difference of means is a share of the group's mean
    absolute value, plus the rounding to the mean's dtype. `bias` is expected from `mean` as it was filled.
    """
    if group is not None:
        (rows, groups), row = counts.shape, torch.arange(len(counts), device=group.device)[:, None]
        ordered, places = (group + row * groups).flatten().sort(stable=True)
        starts = torch.searchsorted(ordered, torch.arange(rows * groups + 1, device=group.device))
        counted = starts.diff().view_as(counts).double()
        expected = counted.log().clamp(min=empty)
        yield Output("order", order, places, 0.0)
        yield Output("starts of groups", offsets, starts, 0.0)
        yield Output("sizes", counts, counted, 0.0)
        yield Output("logarithms", logs, expected, 1e-6 * (1 + expected.abs()))
        yield Output("rounded logarithms", rounded, expected, 1e-6 + torch.finfo(rounded.dtype).eps * expected.abs())
        order, offsets = places, starts
    sizes, copies = offsets.diff(), len(x) // tokens
    group = torch.repeat_interleave(sizes, output_size=len(order))
    row, group = ((numbers + torch.arange(copies, device=x.device)[:, None] * step).flatten()
                  for numbers, step in ((order, tokens), (group, len(sizes))))  # fmt: skip
    divisor = sizes.clamp(min=1).repeat(copies)[:, None]

    def means_of(rows: Tensor) -> Tensor:
        total = torch.zeros(len(mean), rows.shape[1], dtype=torch.float64, device=x.device)
        return total.index_add_(0, group, rows[row].double()) / divisor

    all_means = ("means", x, mean), ("values' means", values, mean_values), ("exact means", values, exact)
    for name, tensor, means in all_means:
        parts = () if means is None else zip(tensor.split(_CHANNELS, 1), means.split(_CHANNELS, 1), strict=True)
        for rows, found in parts:
            expected = means_of(rows)
            yield Output(name, found, expected, 2e-5 * means_of(rows.abs()) + _rounding(expected, found.dtype))
    if bias is not None:
        expected = mean.double().square().sum(1) / -2
        allowed = 4e-6 * (1 - expected)
        yield Output("half lengths", bias, expected.masked_fill((sizes == 0).repeat(copies), -torch.inf), allowed)


def assign_groups(score, index, sources, destinations, removed, group) -> Iterator[Output]:
    """Check `triton_kernels.assign_groups`: yield `group`, exactly as a stable sort by falling score gives it."""
    order, cells = score.argsort(dim=1, descending=True, stable=True), destinations.shape[1]
    merged, alone = order[:, :removed], order[:, removed:]
    group_of_source = torch.empty_like(index).scatter_(1, merged, index.gather(1, merged))
    group_of_source.scatter_(1, alone, torch.arange(alone.shape[1], device=index.device).expand_as(alone) + cells)
    cell = torch.arange(cells, device=index.device).expand_as(destinations)
    expected = torch.empty_like(group).scatter_(1, sources, group_of_source).scatter_(1, destinations, cell)
    yield Output("groups", group, expected, 0.0)


def answer(
    q, places, keys, values, merged_keys, merged_values, bias, group, means, span, scale, merged, full, logs, first
) -> Iterator[Output]:
    """Check `triton_kernels.answer`: yield `merged`, then each span's `full`, `logs`, `first`, see `kernels.Answers`.

    In `merged` and `full` attention weights may be rounded to the dtype of `q`; `logs` and `first` must be as exact as
    float32.
    """
    eps, width, heads = torch.finfo(q.dtype).eps, q.shape[3], q.shape[2]
    q = q[:, places].double().transpose(1, 2).flatten(0, 1)

    def answers(keys: Tensor, values: Tensor, bias: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        scores, values = q @ _by_head(keys, width).mT * scale + bias, _by_head(values, width)
        weights = scores.softmax(2)
        return weights @ values, scores.logsumexp(2), 4 * eps * (weights @ values.abs())

    expected, _, allowed = answers(merged_keys, merged_values, bias.double().repeat_interleave(heads, 0)[:, None])
    yield Output("answers from merged keys", merged, expected, allowed)
    spans = zip(*(tensor.split(span, 1) for tensor in (keys, values, group)), strict=True)
    for number, (some_keys, some_values, groups) in enumerate(spans):
        expected, summed, allowed = answers(some_keys, some_values, 0.0)
        yield Output("answers from all keys", full[number], expected, allowed)
        yield Output("sums of weights", logs[number], summed, 1e-5 * (1 + summed.abs()))
        spread = some_values.double() - means.double().gather(1, groups[..., None].expand(-1, -1, means.shape[2]))
        some_keys, spread = _by_head(some_keys, width), _by_head(spread, width) * (scale / keys.shape[1])
        allowed = 4e-5 * (some_keys.abs().mT @ spread.abs())  # as exact as in float32
        yield Output("sums of first order", first[number], some_keys.mT @ spread, allowed + _TINY)


def ridge(
    q, places, merged, full, logs, first, block, steps, penalty, least, matrix, constant, error, left
) -> Iterator[Output]:
    """Yield what `matrix` and `constant` add to the outputs, ``[q, merged] @ matrix + constant``, and `error`.

    These terms are compared, not the weights, since other weights may add the same. They are expected as a ridge fit in
    float64 predicts them, and may differ by a share of the sum of absolute terms. A block in which `first` adds up to
    zeros has no correction.
    """
    width, eps = merged.shape[2], torch.finfo(q.dtype).eps

    def by_block(rows: Tensor) -> Tensor:  # (heads, n, width) as (heads, blocks, n, block)
        return rows.unflatten(2, (-1, block)).transpose(1, 2)

    q, merged = q[:, places].double().transpose(1, 2).flatten(0, 1), merged.double()
    known = first.double().sum(0).to(matrix.dtype).double()
    answers, rest = by_block(merged), by_block((logs.double().softmax(0)[..., None] * full).sum(0) - merged - q @ known)
    features = torch.cat([by_block(q), answers], 3)
    average, mean = rest.mean(2, keepdim=True), features.mean(2, keepdim=True)
    x, unknowns = features - mean, 2 * block
    normal, sizes = x.mT @ x, features.square().sum(2)
    energy, sizes = (sums.unflatten(2, (2, -1)).mean(3) for sums in (normal.diagonal(dim1=2, dim2=3), sizes))
    unit = energy.maximum(least * sizes).clamp(min=_TINY).rsqrt().repeat_interleave(block, 2)[..., None]
    penalties = penalty * torch.eye(unknowns, dtype=x.dtype, device=x.device)
    solution = torch.linalg.inv(normal * unit * unit.mT + penalties)
    weights, scaled = unit * (solution @ (unit * (x.mT @ rest))), x * unit.mT
    left_out = rest - average - x @ weights
    left_out /= 1 - 1 / x.shape[2] - (scaled @ solution * scaled).sum(3, keepdim=True)
    lost = by_block(known).flatten(2).any(2)[..., None, None]
    weights, shift = weights * lost, (average - mean @ weights) * lost
    expected, named = features @ weights + shift, by_block(q @ known)
    found = by_block(q @ matrix[:, :width].double() + merged @ matrix[:, width:].double() + constant)
    allowed = features.abs() @ weights.abs() + shift.abs() + rest.abs().amax((2, 3), keepdim=True) * lost
    allowed = 8 * eps * (allowed + by_block(q.abs() @ known.abs()))
    yield Output("correction", found, expected + named, allowed + _TINY)
    alone, sized = left_out.square().mean((2, 3)) * lost[..., 0, 0], rest.square().mean((2, 3))
    error = error.view(*alone.shape, 2)
    yield Output("error", error[..., 0].sqrt(), alone.sqrt(), 16 * eps * (alone.sqrt() + sized.sqrt()) + _TINY)
    sizes = answers.square().mean((2, 3))
    yield Output("mean square of answers", error[..., 1], sizes, 1e-5 * sizes + _TINY)


def correct(out, q, matrix, constant, block, corrected) -> Iterator[Output]:
    """Check `triton_kernels.correct`: yield `corrected` by runs of tokens, as `kernels.correct` says, rounded once."""
    matrix, constant = matrix.double(), constant.double()
    for parts in zip(*(tensor.split(_TOKENS, 1) for tensor in (q, out, corrected)), strict=True):
        queries, answers, found = (part.double().transpose(1, 2).flatten(0, 1) for part in parts)
        features = torch.cat([queries, answers], 2)
        summed = answers.abs() + features.abs() @ matrix.abs() + constant.abs()
        expected = answers + features @ matrix + constant
        yield Output("output", found, expected, _rounding(expected, corrected.dtype) + 1e-5 * summed)


# Each kernel's check, and how many of its first arguments must hold finite numbers, or be None, to make it meaningful.
_CHECKS: dict[str, tuple[Callable[..., Iterator[Output]], int]] = {
    "spread": (spread, 2), "best_keys": (best_keys, 3), "mean_rows": (mean_rows, 2),
    "assign_groups": (assign_groups, 1), "answer": (answer, 9), "ridge": (ridge, 6), "correct": (correct, 4),
}  # fmt: skip
