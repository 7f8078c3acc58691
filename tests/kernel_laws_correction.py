"""Laws of the Triton kernels that make a correction and add it: what torch's operators give, they give.

Run by test_kernels.py and test_on_cuda.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests import kernel_harness
from tests.kernel_harness import DEVICE, DTYPES, close, noise, together
from tome_core import MergePlan
from tome_core.attention.correction import Correction, _attend, _by_head, _ridge, first_order, fit_correction
from tome_core.attention.merged import add_correction
from tome_core.merging import kernels

used = kernel_harness.used  # a fixture, around every test


def attention(heads, width, tokens, dtype):
    """Queries, which of them are asked, keys and values far from zero, and a plan with empty and single groups."""
    q, k, v = (noise(2, tokens, heads * width, seed=seed) for seed in range(3))
    group = torch.randint(9, (1, tokens), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    group[0, 0] = 10
    rows = torch.arange(tokens - 1, -1, -2, device=DEVICE)[None]
    return q.to(dtype), rows, ((k + 3).to(dtype), (v - 2).to(dtype)), MergePlan(group, 11)


HEADS = [(1, 3, 40), (2, 16, 70), (3, 40, 130), (1, 64, 1100)]  # heads, width, tokens: one span of them, and three
every_size = pytest.mark.parametrize("dtype, size", together(DTYPES[1:], HEADS), ids=str)


@every_size
def test_of_first_order_it_is_what_torch_sums(size, dtype):
    heads, width, tokens = size
    _, _, made, plan = attention(heads, width, tokens, dtype)
    means, scale = plan.merge_pair(*made, exact=True)[2], 0.3 / tokens
    found, again = (kernels.first_order(*made, plan.group, means, heads, scale).sum(0) for _ in range(2))
    expected = first_order(*(one.double() for one in made), means.double(), plan, heads, 0.3).flatten(0, 1)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(found, again)


def answers(q, keys, values, heads, bias=0):
    """Of each head, in float64, and the logarithms of what their weights add up to."""
    q, keys, values = (_by_head(one.double(), heads) for one in (q, keys, values))
    scores = q @ keys.transpose(2, 3) * q.shape[-1] ** -0.5 + bias
    return (scores.softmax(-1) @ values).flatten(0, 1), scores.logsumexp(-1).flatten(0, 1)


@every_size
def test_queries_are_answered_as_attention_answers_them(size, dtype):
    """By spans of all keys, and by merged keys of which some are empty."""
    heads, width, tokens = size
    q, rows, made, plan = attention(heads, width, tokens, dtype)
    *pair, _ = plan.merge_pair(*made)
    bias, asked = plan.logits_in(dtype), q[:, rows[0]]
    strided = [torch.cat(made, -1)[..., side * heads * width :][..., : heads * width] for side in (0, 1)]
    found, again = (
        kernels.answer_few(asked, *both, *pair, bias, heads, width**-0.5) for both in (made, strided)
    )
    assert all(map(torch.equal, found, again))
    merged, _ = answers(asked, *pair, heads, bias[:, None, None])
    spans = [answers(asked, *span, heads) for span in zip(*(one.split(512, 1) for one in made), strict=True)]
    # weights are rounded to be multiplied, what they add up to is not
    for one, other, allowed in zip(found, (merged, *map(torch.stack, zip(*spans, strict=True))), (4, 4, 0.01),
                                   strict=True):  # fmt: skip
        assert (one - other).abs().max() <= allowed * torch.finfo(dtype).eps


@every_size
def test_a_correction_is_that_of_float64(size, dtype, used):
    """What it predicts, to a share of all that a prediction adds up: its matrix cannot be stored more exactly.

    The sums themselves are smaller: bfloat16's 8 bits leave a prediction of 128 terms a fifth off, whoever solves.
    """
    heads, width, tokens = size
    q, rows, made, plan = attention(heads, width, tokens, dtype)
    (correction, merged), scale = fit_correction(q[:, rows[0]], made, plan, heads, width**-0.5), width**-0.5
    assert {"first_order", "answer_few", "ridge"} <= set(used)
    assert all(map(torch.equal, merged, plan.merge_pair(*made))) and correction.matrix.dtype == dtype
    with kernels.without():
        exact, _ = fit_correction(q[:, rows[0]].double(), [one.double() for one in made], plan, heads, scale)
    bias = plan.logits_in(dtype)[:, None, None].double()
    asked = q[:, rows[0]].double()
    answers = _attend(_by_head(asked, heads), *(one.double() for one in merged), heads, scale, bias).transpose(1, 2)
    asked = asked.unflatten(2, (heads, -1))
    given, expected = (
        add_correction(answers, asked, Correction(*(part.double() for part in one[:2]))) - answers
        for one in (correction, exact)
    )  # weights alone may differ: answers are all but linear in queries
    summed = add_correction(answers.abs(), asked.abs(), Correction(*(one.abs() for one in exact[:2]))) - answers.abs()
    assert ((given - expected).abs() <= 2 * torch.finfo(dtype).eps * summed).all()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("count", [3, 32, 77])
def test_the_equations_are_solved_as_torch_solves_them(count, dtype):
    q, merged = (noise(2, 80, 3 * 20) + 4).to(dtype), noise(6, count, 20, seed=1) * 0.1
    full = noise(4, 6, count, 20, seed=2)
    first, logs = noise(4, 6, 20, 20, seed=3) * 0.02, noise(4, 6, count, seed=4) * 3
    first[:, 1] = 0
    rows = torch.arange(79, 79 - count, -1, device=DEVICE)
    found = kernels.ridge(q[:, rows], kernels.Answers(merged, full, logs), first)
    full = (logs.double().softmax(0)[..., None] * full).sum(0)
    first, merged, full = (one.double().unflatten(0, (2, 3)) for one in (first.sum(0), merged, full))
    asked = _by_head(q[:, rows].double(), 3)
    weights, constant = _ridge(asked, merged, full - merged - asked @ first)
    for one, other in zip(found, (weights + F.pad(first, (0, 0, 0, 20)), constant), strict=True):
        other = other.flatten(0, 1)
        other[1] = 0  # where nothing was lost, nothing is given
        assert (one - other).abs().max() <= 4 * torch.finfo(dtype).eps * other.abs().max()
        assert not one[1].any()


@every_size
def test_it_is_added_as_torch_adds_it(size, dtype, used):
    heads, width, tokens = size
    q, out = (noise(2, tokens, heads, width, seed=seed, dtype=dtype) for seed in (0, 1))
    matrix, constant = (noise(2 * heads, rows, width, seed=rows, dtype=dtype) * 0.2 for rows in (2 * width, 1))
    found = add_correction(out, q, Correction(matrix, constant))
    assert used == ["correct"] and found.is_contiguous()
    with kernels.without():
        plain = add_correction(out.double(), q.double(), Correction(matrix.double(), constant.double()))
    close(found, plain, dtype, 2.0)
    by_head = out.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(found, add_correction(by_head, q, Correction(matrix, constant)))
