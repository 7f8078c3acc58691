"""ComfyUI's attention through the slot: merged keys give what repeated keys give, by whichever function is in force."""

from __future__ import annotations

import functools

import pytest
import torch

from comfy_nodes import asking, host
from comfy_nodes.slot import SLOT, Through, name_in_force
from tests import comfy_attention as comfy
from tests.comfy_doubles import Guider, apply, least_checkpoint
from tests.comfy_ways import DTYPES, way_of
from tome_core.attention.merged import BIAS, OWN_BIAS

ADDING = ("attention_basic", "attention_split", "attention_pytorch")
UNBIASED = ("attention_sub_quad", "attention_flash")
KV = {"merge_what": "k+v", "ratio": 0.75, "use_rand": False}


class Noted:
    """In the slot: attention that adds a mask, drops it, refuses it, or does more; notes what keys came by."""

    def __init__(self, drops: bool = False, more: float = 1.0, refuses: bool = False) -> None:
        self.drops, self.more, self.refuses, self.keys = drops, more, refuses, []

    def __call__(self, function, q, k, v, heads, mask=None, **kwargs):
        self.keys.append(k.shape[1])
        if self.refuses and mask is not None:
            raise RuntimeError("Flash attention does not support attention masks")
        return function(q, k, v, heads, mask=None if self.drops else mask, **kwargs) * self.more


def sample(patcher, **options):
    return Guider(patcher).sample(**{"steps": 2, "size": (8, 8), **options})


def with_slot(function):
    patcher = least_checkpoint()
    patcher.model_options["transformer_options"][SLOT] = function
    return patcher


def report(patcher):
    return host.find_attached(patcher).latest.report


@pytest.fixture
def in_force(monkeypatch):
    def use(function):
        monkeypatch.setattr(comfy, "optimized_attention", function)
        monkeypatch.setattr(comfy, "optimized_attention_masked", function)

    return use


@pytest.mark.parametrize("precision", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*ADDING, *UNBIASED])
def test_each_function_takes_sizes_its_own_way(name, dtype, precision):
    way = BIAS if name in ADDING else OWN_BIAS
    function = getattr(comfy, name)
    assert way_of(function, dtype, attn_precision=precision) == way
    assert way_of(Through(comfy.chosen(function), comfy.attention_pytorch), dtype, attn_precision=precision) == way


@functools.wraps(comfy.attention_pytorch)
def dressed_up(*args, mask=None, **kwargs):
    """By its name it is ComfyUI's."""
    return comfy.attention_basic(*args, **kwargs)


@pytest.mark.parametrize(("function", "way"), [
    (dressed_up, OWN_BIAS), (functools.partial(comfy.attention_basic), BIAS),
    (Through(Noted(), comfy.attention_basic), BIAS), (Through(Noted(drops=True), comfy.attention_basic), OWN_BIAS),
    (Through(Noted(refuses=True), comfy.attention_basic), OWN_BIAS),
    (Through(Noted(more=1.5), comfy.attention_basic), None),
])  # fmt: skip
def test_what_a_function_does_is_tried_whatever_it_is_called(function, way):
    assert way_of(function) == way


def test_two_nodes_around_one_function_are_two_functions():
    for more, way in ((1.0, BIAS), (2.0, None), (1.0, BIAS)):
        assert way_of(Through(Noted(more=more), comfy.attention_basic)) == way


@pytest.mark.parametrize("name", [*ADDING, *UNBIASED])
def test_a_branch_merges_by_the_function_in_force_at_each_sampling(in_force, name):
    branch = apply(least_checkpoint(), **KV)
    expected = sample(branch)
    in_force(getattr(comfy, name))
    before = getattr(getattr(comfy, name), "masks", 0)
    torch.testing.assert_close(sample(branch), expected, rtol=1e-4, atol=1e-4)
    assert {way for level in report(branch).levels for way in level.sized_by} == {BIAS if name in ADDING else OWN_BIAS}
    assert name in ADDING or getattr(comfy, name).masks == before, "it was given masks"


def test_attention_in_the_slot_that_adds_masks_is_called_with_merged_keys():
    slot = Noted()
    merged = apply(with_slot(slot), **KV)
    torch.testing.assert_close(sample(merged), sample(apply(least_checkpoint(), **KV)))
    assert slot.keys.count(16) == 2 * 4 and slot.keys.count(64) == 2  # of four blocks at two steps; tried twice


@pytest.mark.parametrize("what", ["drops", "refuses"])
def test_attention_in_the_slot_that_adds_no_masks_gives_way_where_keys_merge(what):
    """As SageAttention's does by a node, and FlashAttention's."""
    slot = Noted(**{what: True})
    merged = apply(with_slot(slot), **KV)
    torch.testing.assert_close(sample(merged), sample(apply(least_checkpoint(), **KV)))
    assert 16 not in slot.keys and slot.keys.count(7) == 2 * 4, "attention to the prompt is the slot's"


def test_what_does_more_than_attention_in_the_slot_keeps_every_call():
    plain = with_slot(Noted(more=1.5))
    merged = apply(plain, **KV)
    assert torch.equal(sample(merged), sample(plain))
    assert any("the function that it calls is no attention" in one for one in report(merged).reasons)


class Strict(Noted):
    """Wants as many keys as queries in long sequences, as block-sparse kernels do. error: what it raises then."""

    error = RuntimeError("strict kernel: q and k differ")

    def __call__(self, function, q, k, v, heads, mask=None, **kwargs):
        out = super().__call__(function, q, k, v, heads, mask, **kwargs)
        if q.shape[1] == 64 and k.shape[1] == 16:
            raise self.error
        return out


def test_attention_that_refuses_merged_keys_is_asked_once_more_unmerged_and_left_alone_from_then_on():
    slot = Strict()
    plain = sample(with_slot(Noted()))
    merged = apply(with_slot(slot), **KV)
    assert torch.equal(sample(merged), plain)
    assert slot.keys.count(16) == 1 and slot.keys.count(64) == 2 * 4 + 2, "once; it was tried twice"
    assert list(report(merged).reasons) == [
        "attn: it fails with merged keys (RuntimeError: strict kernel: q and k differ)"]  # fmt: skip


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError(), RuntimeError("MPS backend out of memory"),
                                   MemoryError(), Exception("interrupted")], ids=repr)  # fmt: skip
def test_a_full_memory_and_an_interrupt_are_no_refusal(error):
    slot = Strict()
    slot.error = error
    with pytest.raises(type(error)):
        sample(apply(with_slot(slot), **KV))


def test_what_is_in_the_slot_is_not_changed_and_ours_does_not_lie_on_ours():
    slot = Noted()
    options = {SLOT: slot, "other": 1}
    asked = []

    def again(told):
        asking.call(lambda inner: run(inner), told, lambda one, _: one.unmerged())

    def run(told):
        assert told["other"] == 1 and told[SLOT] is not slot
        asked.append(comfy.attention_pytorch(x, x, x, 2, transformer_options=told))

    x = torch.randn(1, 5, 8)
    asking.call(again, options, lambda one, _: one.unmerged() * 2)
    assert options == {SLOT: slot, "other": 1}
    assert slot.keys == [5] and torch.equal(asked[0], comfy.attention_pytorch(x, x, x, 2))


def test_every_attention_in_force_has_a_name_of_its_own():
    names = [name_in_force({SLOT: comfy.chosen(getattr(comfy, name))}) for name in (*ADDING, *UNBIASED)]
    names += [name_in_force({SLOT: sample}), name_in_force({})]
    assert len(set(names)) == len(names) and names[-1] == ""
