"""The Triton kernels' twins in plain torch: the same functions, filling the same tensors, by formulas that are obvious.

What the kernels are held against (`tests/kernel_laws.py`, `tests/kernel_laws_correction.py`), and what stands for
them where launches are counted (`tests/engine/merging/test_launches.py`).
"""

from __future__ import annotations

import torch


def best_keys(x, rows, keys, bias, score, index, lengths):
    queries = x if rows is None else torch.stack([one[its] for one, its in zip(x, rows, strict=True)])
    scores = queries.float() @ keys.float().transpose(1, 2)
    best = (scores if bias is None else scores + bias[:, None]).max(-1)
    score.copy_(best.values - (queries.float().square().sum(-1) / 2 if lengths else 0))
    index.copy_(best.indices)


def mean_rows(x, values, order, offsets, tokens, mean, mean_values, exact, bias):
    groups, means = offsets.shape[0] - 1, []
    if values is not None:
        mean_rows(values, None, order, offsets, tokens, exact, None, None, None)
        mean_values.copy_(exact)
    for copy in x.unflatten(0, (-1, tokens)):
        for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            means.append(copy[order[start:stop]].float().sum(0) / max(1, stop - start))
    mean.copy_(torch.stack(means))
    if bias is not None:
        empty = (offsets.diff() == 0).repeat(len(means) // groups)
        bias.copy_((mean.float().square().sum(-1) * -0.5).masked_fill(empty, float("-inf")))


def segments(group, order, offsets, sizes, logs, rounded, empty):
    rows, groups = group.shape[0], sizes.shape[1]
    flat = (group + torch.arange(rows, device=group.device)[:, None] * groups).flatten()
    order.copy_(flat.argsort(stable=True))
    count = flat.bincount(minlength=rows * groups)
    offsets.copy_(torch.cat([count[:1] * 0, count.cumsum(0)]))
    sizes.copy_(count.view(rows, groups))
    logs.copy_(sizes.log().clamp(min=empty))
    rounded.copy_(logs)


def moments(parts, found, span):
    for number, part in enumerate(torch.cat(parts, -1).float().split(span, 1)):
        found[:, number, 0] = part.mean(1)
        found[:, number, 1] = (part - part.mean(1, keepdim=True)).square().sum(1)


def spread(parts, found, span, least, out):
    x = torch.cat(parts, -1).float()
    centred = (x - x.mean(1, keepdim=True)).unflatten(-1, (len(parts), -1))
    unit = centred.square().mean((1, 3), keepdim=True).sqrt().clamp(min=least)
    out.copy_((centred / unit).flatten(2))


def placed(score, index, sources, destinations, removed, group, representative):
    cells, order = destinations.shape[1], score.argsort(dim=1, descending=True, stable=True)
    for sample in range(index.shape[0]):
        group[sample, destinations[sample]] = torch.arange(cells, device=group.device)
        merged, alone = order[sample, :removed], order[sample, removed:]
        group[sample, sources[sample, merged]] = index[sample, merged]
        group[sample, sources[sample, alone]] = cells + torch.arange(len(alone), device=group.device)
        representative[sample] = torch.cat([destinations[sample], sources[sample, alone]])


def first_order(keys, values, group, means, span, scale, found):
    found.zero_()
    keys, values = keys.float(), values.float()
    own = torch.stack([one[its] for one, its in zip(means, group, strict=True)])
    by_head = found.shape[1] // keys.shape[0]
    for number, (key, away) in enumerate(zip(keys.split(span, 1), (values - own).split(span, 1), strict=True)):
        key, away = (one.unflatten(-1, (by_head, -1)).transpose(1, 2) for one in (key, away))
        found[number] = (key.transpose(2, 3) @ away * scale).flatten(0, 1)


def answered(q, rows, keys, values, merged_keys, merged_values, bias, span, scale, merged, full, logs):
    heads = merged.shape[0] // q.shape[0]

    def attend(own_keys, own_values, own_bias, answer, log):
        asked, k, v = (one.double().unflatten(-1, (heads, -1)).transpose(1, 2)
                       for one in (q[:, rows], own_keys, own_values))  # fmt: skip
        scores = asked @ k.transpose(2, 3) * scale + own_bias
        answer.copy_((scores.softmax(-1) @ v).flatten(0, 1))
        log.copy_(scores.logsumexp(-1).flatten(0, 1))

    attend(merged_keys, merged_values, bias[:, None, None].double(), merged, torch.empty_like(logs[0]))
    for number, (key, value) in enumerate(zip(keys.split(span, 1), values.split(span, 1), strict=True)):
        attend(key, value, 0, full[number], logs[number])


def ridge(q, rows, merged, full, logs, first, matrix, constant):
    """The normal equations of `attention.correction`, by torch's solver, in float64."""
    heads, (_, count, width) = merged.shape[0] // q.shape[0], merged.shape
    full = (logs.double().softmax(0)[..., None] * full.double()).sum(0)
    q = q[:, rows].double().unflatten(-1, (heads, -1)).transpose(1, 2)
    first, merged, full = (one.double().unflatten(0, (-1, heads)) for one in (first.sum(0), merged, full))
    left = full - merged - q @ first
    told = torch.cat([q, merged], -1)
    x = told - told.mean(2, keepdim=True)
    energy = x.square().sum(2).unflatten(2, (2, -1)).mean(3)
    unit = energy.clamp(min=1e-12).rsqrt().repeat_interleave(width, 2)
    normal = x.transpose(2, 3) @ x * unit[..., None] * unit[..., None, :]
    regular = normal + torch.eye(2 * width, dtype=x.dtype, device=x.device) * (2 * width / count)
    weights = unit[..., None] * torch.linalg.solve(regular, unit[..., None] * (x.transpose(2, 3) @ left))
    lost = first.flatten(2).any(2)[..., None, None]
    shift = (left.mean(2, keepdim=True) - told.mean(2, keepdim=True) @ weights) * lost
    matrix.copy_((weights * lost + torch.cat([first, first * 0], 2)).flatten(0, 1))
    constant.copy_(shift.flatten(0, 1))


def corrected(out, q, matrix, constant, to):
    batch, heads = out.shape[0], matrix.shape[0] // out.shape[0]
    q, own = (one.float().unflatten(-1, (heads, -1)).transpose(1, 2) for one in (q, out))
    told = torch.cat([q, own], -1).flatten(0, 1)
    more = (told @ matrix.float() + constant.float()).unflatten(0, (batch, heads))
    to.copy_((own + more).transpose(1, 2).flatten(2))


NAMES = (
    "answered", "best_keys", "corrected", "first_order", "mean_rows", "moments", "placed", "ridge", "segments",
    "spread",
)  # fmt: skip
