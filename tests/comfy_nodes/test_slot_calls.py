"""ComfyUI's attention through the slot: merged keys give what repeated keys give, by whichever function is in force."""

from __future__ import annotations

import itertools

import pytest
import torch

from comfy_nodes import slot_function
from comfy_nodes.slot_calls import SLOT, HostCall, OtherNodesCall, other_names_in_slot
from tests import comfy_attention as comfy
from tests.comfy_doubles import apply, latest, least_checkpoint, sample
from tests.hosts.comfyui.ways import DTYPES, way_of
from tome_core.attention.merged import BIAS, OWN_BIAS

WAYS = {
    "attention_basic": BIAS, "attention_split": BIAS, "attention_pytorch": BIAS, "attention_sub_quad": OWN_BIAS,
    "attention_flash": OWN_BIAS,
}  # fmt: skip
KV = {"merge_what": "k+v", "ratio": 0.75, "use_rand": False}


class Noted:
    """In the slot: attention that adds a mask, drops it, refuses it, or does more; notes how many keys came.

    strict: refuses fewer keys than queries in long sequences, as block-sparse kernels do.
    """

    def __init__(self, drops: bool = False, more: float = 1.0, refuses: bool = False, strict: bool = False) -> None:
        self.drops, self.more, self.refuses, self.strict, self.keys = drops, more, refuses, strict, []

    def __call__(self, function, q, k, v, heads, mask=None, **kwargs):
        self.keys.append(k.shape[1])
        if (self.refuses and mask is not None) or (self.strict and (q.shape[1], k.shape[1]) == (64, 16)):
            raise RuntimeError("the kernel says no")
        return function(q, k, v, heads, mask=None if self.drops else mask, **kwargs) * self.more


def chosen(optimized_attention):
    """The override that ComfyUI's own set_model_optimized_attention makes of a function."""
    return lambda function, *args, **kwargs: optimized_attention(*args, **kwargs)


def with_slot(function):
    patcher = least_checkpoint()
    patcher.model_options["transformer_options"][SLOT] = function
    return patcher


def test_each_function_takes_sizes_its_own_way_by_itself_and_chosen_by_a_node():
    for (name, way), dtype, precision in itertools.product(WAYS.items(), DTYPES, (None, torch.float32)):
        function = getattr(comfy, name)
        through = OtherNodesCall(chosen(function), comfy.attention_pytorch)
        ways = [way_of(asked, dtype, attn_precision=precision) for asked in (function, through)]
        assert ways == [way] * 2, (name, dtype, precision)


def test_a_branch_merges_by_the_function_in_force_at_each_sampling(monkeypatch):
    branch = apply(least_checkpoint(), **KV)
    expected = sample(branch)
    for name, way in WAYS.items():
        monkeypatch.setattr(comfy, "optimized_attention", getattr(comfy, name))
        torch.testing.assert_close(sample(branch), expected, rtol=1e-4, atol=1e-4)
        assert {sized for level in latest(branch).report.levels for sized in level.sized_by} == {way}


@pytest.mark.parametrize(("what", "calls", "why"), [
    ({}, 2 * 4, ""), ({"drops": True}, 0, ""), ({"refuses": True}, 0, ""),
    ({"more": 1.5}, 0, "the function that it calls is no attention"),
    ({"strict": True}, 1, "it fails with merged keys (RuntimeError: the kernel says no)"),
])  # fmt: skip
def test_attention_in_the_slot_gets_merged_keys_or_gives_way_or_gets_every_call_unmerged(what, calls, why):
    """SageAttention's and FlashAttention's by a node give way; attention to the prompt is always the slot's.

    why: the reason that is told if it gets every call unmerged.
    """
    slot = Noted(**what)
    merged = apply(with_slot(slot), **KV)
    expected = with_slot(Noted(**what)) if why else apply(least_checkpoint(), **KV)
    torch.testing.assert_close(sample(merged), sample(expected), rtol=0, atol=0 if why else 1e-5)
    assert (slot.keys.count(16), slot.keys.count(7)) == (calls, 2 * 4), "four blocks, two steps"
    assert any(why in one for one in latest(merged).report.reasons) or not why


def test_what_is_in_the_slot_is_not_changed_and_ours_does_not_lie_on_ours():
    slot, x = Noted(), torch.randn(1, 5, 8)
    options, plain = {SLOT: slot, "other": 1}, comfy.attention_pytorch(x, x, x, 2)

    def run(told):
        assert told["other"] == 1 and told[SLOT] is not slot
        return comfy.attention_pytorch(x, x, x, 2, transformer_options=told)

    def again(told):
        return slot_function.call(run, told, lambda call, _: call.unmerged())

    assert torch.equal(slot_function.call(again, options, lambda call, _: call.unmerged() * 2), plain)
    assert options == {SLOT: slot, "other": 1} and slot.keys == [5]
    outside = comfy.attention_pytorch(x, x, x, 2, transformer_options={SLOT: slot_function._attention})
    assert torch.equal(outside, plain), "outside of our calls it is answered by its own function"


def test_values_whose_heads_are_apart_already_are_taken_as_others_are():
    """As SD3 hands them over."""
    q, k, v = (torch.randn(2, 5, 4 * 8) for _ in range(3))
    flat, apart = HostCall(torch.add, q, k, v, 4), HostCall(torch.add, q, k, v.unflatten(2, (4, 8)), 4)
    assert torch.equal(apart.v, flat.v) and flat.v.shape == (2, 5, 4, 8)


def test_every_attention_in_force_has_a_name_of_its_own():
    names = [other_names_in_slot({SLOT: chosen(getattr(comfy, name))}) for name in WAYS]
    names += [other_names_in_slot({SLOT: sample}), other_names_in_slot({})]
    assert len(set(names)) == len(names) and names[-1] == ""
