"""Laws of a kernel's proof of itself: wrong kernels are caught at their first launch, right ones never."""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests import kernel_harness
from tests.kernel_harness import DEVICE, DTYPES, NAMES, close, noise, whole_numbers
from tests.sd_block import SpatialTransformer, UNet
from tome_core import MergePlan
from tome_core.attention.correction import fit_correction
from tome_core.attention.merged import Correction, add_correction
from tome_core.merging import kernels
from tome_core.merging.kernels import proof
from tome_core.merging.methods import bipartite
from tome_core.merging.methods.base import best_keys

used = kernel_harness.used  # a fixture, around every test
PROVES_ITSELF = kernels._proves_itself


def _best():
    keys, bias = noise(2, 70, 40, seed=1), noise(2, 70, seed=2)
    bias[:, ::3] = float("-inf")
    return best_keys(noise(2, 90, 40, dtype=torch.float16), None, keys.half().float(), bias)


def _merged():
    """Two samples of 130 tokens in 40 groups, some of them empty."""
    plan = MergePlan(whole_numbers(38, 2, 130, seed=1), 40)
    means = plan.merge_pair(*noise(2, 130, 80, dtype=torch.float16).chunk(2, -1), exact=True)
    return (*means, *plan._sort(), plan.sizes, plan.logits_in(torch.float32))


def _placed():
    index, order = whole_numbers(20, 2, 60, seed=3), torch.randperm(80, generator=torch.Generator().manual_seed(4))
    sources, destinations = order.to(DEVICE)[None].split([60, 20], 1)
    return (bipartite._plan(noise(2, 60), index, sources, destinations, 25).group,)


def _fit():
    heads, width, plan = 2, 16, MergePlan(torch.arange(130, device=DEVICE)[None] // 3, 50)
    keys, values, q = (noise(1, 130, heads * width, seed=seed, dtype=torch.float16) for seed in range(3))
    return fit_correction(q[:, ::9], (keys, values + 1), plan, heads, 0.25)[0][:2]


def _corrected():
    q, out = (noise(2, 130, 2, 16, seed=seed, dtype=torch.float16) for seed in (0, 1))
    parts = (noise(4, rows, 16, seed=rows, dtype=torch.float16) * 0.2 for rows in (32, 1))
    return (add_correction(out, q, Correction(*parts)),)


WORK = {"best_keys": _best, "mean_rows": _merged, "segments": _merged, "assign_groups": _placed, "first_order": _fit,
        "answer_few": _fit, "ridge": _fit, "correct": _corrected}  # fmt: skip


def _given(place, change):
    """The kernel gets another argument."""
    return lambda launch, *given: launch(*given[:place], change(given[place]), *given[place + 1 :])


def _gives(place, change):
    """The kernel's output is changed."""
    return lambda launch, *given: (launch(*given), given[place] is None or given[place].copy_(change(given[place])))


def _stale(x):
    """A tile still holds its last contents."""
    return torch.cat([x.flatten()[:-16], x.flatten()[:16]]).view_as(x)


PLANTED = {
    "best_keys: hidden keys are not": ("best_keys", _given(3, lambda bias: None)),
    "best_keys: a number that no key has": ("best_keys", _gives(5, lambda index: index + 70)),
    "mean_rows: a stale tile": ("mean_rows", _gives(5, _stale)),
    "segments: one group further": ("segments", _given(0, lambda group: (group + 1) % 40)),
    "assign_groups: one token more merges": ("assign_groups", _given(4, lambda removed: removed + 1)),
    "first_order: groups of the tokens beside them": ("first_order", _given(2, lambda group: group.roll(1, 1))),
    "answer_few: sizes are forgotten": ("answer_few", _given(5, torch.zeros_like)),
    "answer_few: one head's answers for another's": ("answer_few", _gives(8, lambda x: x.roll(1, 0))),
    "ridge: what is known is not taken off": ("ridge", _given(4, torch.zeros_like)),
    "ridge: the constant is lost": ("ridge", _gives(6, torch.zeros_like)),
    "correct: a stale tile": ("correct", _gives(4, _stale)),
}  # fmt: skip


@pytest.fixture
def off(monkeypatch):
    """The kernels that are off, and why. A fault is met as in a user's process, not as in tests of other laws."""
    found = {}
    monkeypatch.setattr(kernels, "_off", found)
    monkeypatch.setattr(kernels, "_give_up", found.__setitem__)
    monkeypatch.setattr(kernels, "_proves_itself", PROVES_ITSELF)
    return found


@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_kernel_is_caught_at_its_first_launch_and_torchs_operators_serve(planted, off, monkeypatch):
    (name, wrong), module = PLANTED[planted], kernels._module()
    launch = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: wrong(launch, *given))
    found = WORK[name]()
    assert off.keys() == {name}
    with kernels.without():
        expected = WORK[name]()
    for one, other in zip(found, expected, strict=True):
        close(one, other, torch.float16, 4.0)
    (note,) = kernels.notes()
    assert name in note and "where torch's operators have" in note and DEVICE in note


def test_a_right_kernel_proves_itself_once_and_waits_no_more(used, off, monkeypatch):
    proofs, find_fault = [], kernels.find_fault
    monkeypatch.setattr(kernels, "find_fault", lambda *given: (proofs.append(given[0]), find_fault(*given))[1])
    assert sorted(proof._LAWS) == sorted(NAMES) == sorted(WORK), "a law for each kernel"
    for work in dict.fromkeys(WORK.values()):
        first = work()
        seen = len(proofs)
        assert all(map(torch.equal, first, work())) and len(proofs) == seen
    assert set(proofs) == set(NAMES) and not off
    assert all(used.count(name) >= 2 for name in NAMES)


def test_inputs_that_are_not_finite_tell_nothing_of_a_kernel(off):
    keys, clean = noise(1, 9, 8), noise(1, 20, 8, seed=1)
    sick = clean.clone()
    sick[0, 0, 0] = float("nan")
    with kernels.without():
        expected = best_keys(sick, None, keys)
    assert torch.equal(best_keys(sick, None, keys)[1][:, 1:], expected[1][:, 1:])
    assert not kernels._verified
    for dtype in DTYPES:  # each proves itself
        best_keys(clean.to(dtype), None, keys.to(dtype))
    assert {key[-1] for key in kernels._verified} == set(DTYPES) and not off


@pytest.mark.parametrize("dtype", DTYPES[1:2] if kernel_harness.INTERPRETED else DTYPES, ids=str)
def test_with_kernels_and_without_a_models_pictures_differ_by_rounding_alone(dtype, used, off):
    """New, kept and late: each of three calls of a UNet in one sampling."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = UNet([[SpatialTransformer(16, 1, 8)]]).to(DEVICE, dtype).requires_grad_(False)
    x, text = noise(1, 16, 16, 16, dtype=dtype).repeat(2, 1, 1, 1), noise(2, 5, 8, dtype=dtype)

    def draw():
        with tome_core.patch(model, strength=0.5, only_if_it_pays=False, host_clock=True) as handle:
            pictures = []
            for time in (900.0, 880.0, 300.0):
                handle.set_time(timestep=time, sampling="a")
                pictures.append(model(x, None, text).float())
            return torch.stack(pictures)

    found = draw()
    wanted = set(NAMES) if dtype.itemsize == 2 else {"best_keys", "mean_rows", "segments", "assign_groups"}
    assert wanted <= set(used) and not off
    with kernels.without():
        plain = draw()
    of_rounding = (3 if dtype.itemsize == 2 else 10) * torch.finfo(dtype).eps
    assert (found - plain).norm() <= of_rounding * plain.norm()
