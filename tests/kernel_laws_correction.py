"""Laws of the Triton kernels that make a correction and add it: what torch's operators give, they give.

Every launch is compared as kernel_laws.py says. Run by test_kernels.py and test_on_cuda.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests import kernel_harness
from tests.kernel_harness import DEVICE, DTYPES, close, noise, together, whole_numbers
from tome_core import MergePlan
from tome_core.attention.correction import Correction, _attend, _by_head, _ridge, fit_correction
from tome_core.attention.merged import add_correction
from tome_core.merging import kernels

used = kernel_harness.used  # a fixture, around every test
HEADS = [(1, 3, 40), (2, 16, 70), (3, 40, 130), (1, 64, 1100)]  # heads, width, tokens: one span of them, and three
every_size = pytest.mark.parametrize("dtype, size", together(DTYPES[1:], HEADS), ids=str)


@every_size
def test_a_correction_is_that_of_float64(size, dtype, used):
    """What it predicts, to a share of all that a prediction adds up: its matrix cannot be stored more exactly.

    The sums themselves are smaller: bfloat16's 8 bits leave a prediction of 128 terms a fifth off, whoever solves.
    """
    heads, width, tokens = size
    q, k, v = (noise(2, tokens, heads * width, seed=seed) for seed in range(3))
    asked = q.to(dtype)[:, torch.arange(tokens - 1, -1, -2, device=DEVICE)]
    pair, scale = ((k + 3).to(dtype), (v - 2).to(dtype)), width**-0.5  # far from zero, as a trained model's are
    group = whole_numbers(9, 1, tokens, seed=4)  # group 9 is empty, group 10 has one token
    group[0, 0] = 10
    plan = MergePlan(group, 11)
    correction, merged = fit_correction(asked, pair, plan, heads, scale)
    assert used[-3:] == ["first_order", "answer_few", "ridge"]
    strided = torch.cat(pair, -1).chunk(2, -1)
    again, _ = fit_correction(asked, strided, plan, heads, scale)
    assert all(map(torch.equal, correction[:2], again[:2])), "equal bits, however keys and values lie in memory"
    assert all(map(torch.equal, merged, plan.merge_pair(*pair))) and correction.matrix.dtype == dtype
    with kernels.without():
        exact, _ = fit_correction(asked.double(), [one.double() for one in pair], plan, heads, scale)
    bias = plan.logits_in(dtype)[:, None, None].double()
    asked = asked.double()
    answers = _attend(_by_head(asked, heads), *(one.double() for one in merged), heads, scale, bias).transpose(1, 2)
    asked = asked.unflatten(2, (heads, -1))
    given, expected = (
        add_correction(answers, asked, Correction(*(part.double() for part in one[:2]))) - answers
        for one in (correction, exact)
    )  # weights alone may differ: answers are all but linear in queries
    summed = add_correction(answers.abs(), asked.abs(), Correction(*(one.abs() for one in exact[:2]))) - answers.abs()
    assert ((given - expected).abs() <= 2 * torch.finfo(dtype).eps * summed).all()


@pytest.mark.parametrize("count, dtype", together([3, 32, 77], DTYPES[1:]), ids=str)
def test_the_equations_are_solved_as_torch_solves_them(count, dtype):
    q, merged = (noise(2, 80, 3 * 20) + 4).to(dtype), noise(6, count, 20, seed=1) * 0.1
    full = noise(4, 6, count, 20, seed=2)
    first, logs = noise(4, 6, 20, 20, seed=3) * 0.02, noise(4, 6, count, seed=4) * 3
    first[:, 1] = 0
    asked = q[:, torch.arange(79, 79 - count, -1, device=DEVICE)]
    found = kernels.ridge(asked, kernels.Answers(merged, full, logs), first)
    full = (logs.double().softmax(0)[..., None] * full).sum(0)
    first, merged, full = (one.double().unflatten(0, (2, 3)) for one in (first.sum(0), merged, full))
    asked = _by_head(asked.double(), 3)
    weights, constant = _ridge(asked, merged, full - merged - asked @ first)
    for one, other in zip(found, (weights + F.pad(first, (0, 0, 0, 20)), constant), strict=True):
        other = other.flatten(0, 1)
        other[1] = 0  # a head that lost nothing is given nothing
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
