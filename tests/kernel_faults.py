"""Laws of a kernel's proof of itself: kernels with planted errors are caught at their first launch, right ones never.

Run by test_kernels.py and test_on_cuda.py.
"""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests import kernel_harness
from tests.kernel_harness import DEVICE, DTYPES, NAMES, close, noise
from tests.models import inputs, small
from tome_core import MergePlan
from tome_core.attention.correction import fit_correction
from tome_core.attention.merged import Correction, add_correction
from tome_core.merging import kernels
from tome_core.merging.kernels import proof
from tome_core.merging.methods import bipartite
from tome_core.merging.methods.base import best_keys

used = kernel_harness.used  # a fixture, around every test


def _plan():
    """Two samples of 130 tokens in 40 groups, some of them empty."""
    return MergePlan(torch.randint(38, (2, 130), generator=torch.Generator().manual_seed(1)).to(DEVICE), 40)


def _best():
    keys, bias = noise(2, 70, 40, seed=1), noise(2, 70, seed=2)
    bias[:, ::3] = float("-inf")
    return best_keys(noise(2, 90, 40, dtype=torch.float16), None, keys.half().float(), bias)


def _means():
    return _plan().merge_pair(*noise(2, 130, 80, dtype=torch.float16).chunk(2, -1), exact=True)


def _segments():
    plan = _plan()
    return (*plan._sort(), plan.sizes, plan.logits_in(torch.float32))


def _placed():
    index = torch.randint(20, (2, 60), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(4)).to(DEVICE)[None]
    return (bipartite._plan(noise(2, 60), index, order[:, :60], order[:, 60:], 25).group,)


def _fit():
    heads, width, plan = 2, 16, MergePlan(torch.arange(700, device=DEVICE)[None] // 3, 240)
    keys, values, q = (noise(2, 700, heads * width, seed=seed, dtype=torch.float16) for seed in range(3))
    return fit_correction(q[:, ::9], (keys, values + 1), plan, heads, 0.25)[0][:2]


def _corrected():
    q, out = (noise(2, 130, 2, 16, seed=seed, dtype=torch.float16) for seed in (0, 1))
    parts = (noise(4, rows, 16, seed=rows, dtype=torch.float16) * 0.2 for rows in (32, 1))
    return (add_correction(out, q, Correction(*parts)),)


WORK = {"best_keys": _best, "mean_rows": _means, "segments": _segments, "place_tokens": _placed, "first_order": _fit,
        "answer_few": _fit, "ridge": _fit, "correct": _corrected}  # fmt: skip


def _given(place, change):
    """The kernel gets another argument."""
    return lambda launch, *given: launch(*given[:place], change(given[place]), *given[place + 1 :])


def _gives(place, change):
    """What the kernel has written is changed."""

    def run(launch, *given):
        launch(*given)
        if given[place] is not None:
            given[place].copy_(change(given[place]))

    return run


def _stale(x):
    """A tile still holds what was there before it."""
    x = x.clone()
    x.flatten()[-16:] = x.flatten()[:16].clone()
    return x


PLANTED = {
    "best_keys: hidden keys are not": ("best_keys", _given(3, lambda bias: None)),
    "best_keys: the next key": ("best_keys", _gives(5, lambda index: (index + 1) % 70)),
    "best_keys: a number that no key has": ("best_keys", _gives(5, lambda index: index + 70)),
    "best_keys: the last tile of keys is left out": ("best_keys", _given(2, lambda keys: keys[:, :64])),
    "mean_rows: groups start one token late": ("mean_rows", _given(3, lambda starts: (starts + 1).clamp(max=260))),
    "mean_rows: a stale tile": ("mean_rows", _gives(5, _stale)),
    "mean_rows: values for exact values": ("mean_rows", _gives(7, lambda x: x * (1 + 2e-3))),
    "segments: one group further": ("segments", _given(0, lambda group: (group + 1) % 40)),
    "segments: a stale tile": ("segments", _gives(1, _stale)),
    "place_tokens: one token more merges": ("place_tokens", _given(4, lambda removed: removed + 1)),
    "first_order: groups of the tokens beside them": ("first_order", _given(2, lambda group: group.roll(1, 1))),
    "first_order: a span is added twice": ("first_order", _gives(6, lambda x: x * 2)),
    "answer_few: sizes are forgotten": ("answer_few", _given(5, torch.zeros_like)),
    "answer_few: one head's answers for another's": ("answer_few", _gives(8, lambda x: x.roll(1, 0))),
    "answer_few: no number": ("answer_few", _gives(10, lambda x: x * float("nan"))),
    "ridge: what is known is not taken off": ("ridge", _given(4, torch.zeros_like)),
    "ridge: the constant is lost": ("ridge", _gives(6, torch.zeros_like)),
    "correct: of the token beside": ("correct", _given(1, lambda q: q.roll(1, 1))),
    "correct: a stale tile": ("correct", _gives(4, _stale)),
}  # fmt: skip


@pytest.fixture
def really_give_up(monkeypatch):
    """A fault is met as in a user's process, not as in tests of other laws."""
    off = {}
    monkeypatch.setattr(kernels, "_off", off)
    monkeypatch.setattr(kernels, "_give_up", off.__setitem__)
    return off


@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_kernel_is_caught_at_its_first_launch_and_torchs_operators_serve(planted, really_give_up, monkeypatch):
    (name, wrong), module = PLANTED[planted], kernels._module()
    launch = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: wrong(launch, *given))
    found = WORK[name]()
    assert really_give_up.keys() == {name}
    with tome_core.merging.kernels.without():
        expected = WORK[name]()
    for one, other in zip(found, expected, strict=True):
        close(one, other, torch.float16, 4.0)
    (told,) = kernels.notes()
    assert name in told and "where torch's operators have" in told and DEVICE in told


@pytest.mark.parametrize("name", NAMES)
def test_a_right_kernel_proves_itself_once_and_waits_no_more(name, used, really_give_up, monkeypatch):
    proofs, find_fault = [], kernels.find_fault
    monkeypatch.setattr(kernels, "find_fault", lambda *given: (proofs.append(given[0]), find_fault(*given))[1])
    first = WORK[name]()
    assert name in proofs and not really_give_up
    seen = len(proofs)
    assert all(map(torch.equal, first, WORK[name]())) and len(proofs) == seen
    assert used.count(name) >= 2


def test_what_is_not_finite_tells_nothing_of_a_kernel(really_give_up):
    keys, clean = noise(1, 9, 8), noise(1, 20, 8, seed=1)
    sick = clean.clone()
    sick[0, 0, 0] = float("nan")
    with kernels.without():
        expected = best_keys(sick, None, keys)
    assert torch.equal(best_keys(sick, None, keys)[1][:, 1:], expected[1][:, 1:])
    assert not kernels._proven and not really_give_up
    best_keys(clean, None, keys)
    assert len(kernels._proven) == 1 and not really_give_up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_proves_itself(dtype):
    best_keys(noise(1, 20, 8, dtype=dtype), None, noise(1, 9, 8).to(dtype))
    assert [key[-1] for key in kernels._proven] == [dtype]


def test_a_law_is_there_for_each_kernel():
    best_keys(noise(1, 20, 8), None, noise(1, 9, 8))
    assert sorted(proof._LAWS) == sorted(NAMES) == sorted(WORK)


@pytest.mark.parametrize("dtype", DTYPES[1:2] if kernel_harness.INTERPRETED else DTYPES, ids=str)
def test_with_kernels_and_without_a_models_pictures_differ_by_rounding_alone(dtype, used):
    """New, kept and late: each of three calls of a whole UNet in one sampling."""
    model, (x, text) = small().to(DEVICE, dtype), inputs(4, 1, 16, 16)
    x, text = (torch.cat([one, one]).to(DEVICE, dtype) for one in (x, text))

    def draw():
        with torch.no_grad(), tome_core.patch(model, strength=0.5, only_if_it_pays=False) as handle, handle.sampling():
            return torch.stack([model(x, time, text).sample.float() for time in (900.0, 880.0, 300.0)])

    found = draw()
    wanted = set(NAMES) if dtype.itemsize == 2 else {"best_keys", "mean_rows", "segments", "place_tokens"}
    assert wanted <= set(used)
    with kernels.without():
        plain = draw()
    of_rounding = (3 if dtype.itemsize == 2 else 10) * torch.finfo(dtype).eps
    assert (found - plain).norm() <= of_rounding * plain.norm()

