"""A branch merges in its own calls alone: nothing lies on the model that branches share, not even while one samples."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from comfy_nodes import host
from comfy_nodes.nodes import ApplyToMe, RemoveToMe
from comfy_nodes.slot import SLOT
from tests.comfy_doubles import Guider, apply, least_checkpoint, with_compile
from tests.comfy_transformer import FlowGuider, transformer
from tests.models import inputs
from tests.threads import at_once
from tests.traces import traces
from tome_core.engine.state import State

HALF = {"ratio": 0.5, "use_rand": False, "keep": 1000.0}
QUARTER = {**HALF, "ratio": 0.25}


def branch(plain, **values):
    return apply(plain, **(values or HALF))


def sample(patcher, **options):
    return Guider(patcher).sample(**{"steps": 3, "size": (8, 8), **options})


def latest(patcher):
    return host.find_attached(patcher).latest


@pytest.mark.parametrize(("load", "guider"), [(least_checkpoint, Guider), (transformer, FlowGuider)])
def test_only_the_branch_with_the_node_merges_and_nothing_lies_on_the_model(load, guider):
    plain = load()
    applied, left, seen = branch(plain), traces(plain.model), []

    def look(run, *args):
        seen.append(traces(plain.model) == left and SLOT not in applied.model_options["transformer_options"])
        return run(*args)

    applied.add_wrapper_with_key("apply_model", "inner", look)
    before, merged = (guider(one).sample(steps=3) for one in (plain, applied))
    assert not torch.equal(merged, before) and seen == [True] * 3
    for other in (plain, plain.clone(), RemoveToMe().remove(applied)[0], ApplyToMe().apply(applied, strength=0)[0]):
        assert torch.equal(guider(other).sample(steps=3), before)
    assert torch.equal(guider(applied).sample(steps=3), merged) and traces(plain.model) == left


def test_a_second_apply_replaces_the_first():
    plain = least_checkpoint()
    assert torch.equal(sample(branch(branch(plain), **QUARTER)), sample(branch(plain, **QUARTER)))


def test_remove_leaves_every_other_patch(server):
    patcher = least_checkpoint()
    patcher.add_wrapper_with_key("apply_model", "other", "a wrapper")
    patcher.model_options["transformer_options"]["patches"] = {"attn1_patch": ["a patch"]}
    removed = RemoveToMe().remove(branch(patcher))[0]
    assert removed.wrappers["apply_model"] == {"other": ["a wrapper"]} and not removed.wrappers["outer_sample"]
    assert removed.model_options == patcher.model_options
    RemoveToMe().remove(removed, unique_id="8")
    assert server.texts[-1] == ("8", "There was no Apply ToMe on this model.")


def test_the_model_of_the_call_merges_and_not_the_one_of_the_node():
    """DualModelGuider runs a second model with the first one's options; a copy on another GPU is such a model too."""
    other = least_checkpoint()
    merged = Guider(branch(least_checkpoint()), other.model).sample(steps=3, size=(8, 8))
    assert torch.equal(merged, sample(branch(other))) and not torch.equal(merged, sample(other))


def test_a_dropped_model_is_let_go_and_copied_options_copy_no_model():
    own, other = branch(least_checkpoint()), least_checkpoint()
    for model in (own.model, other.model):
        Guider(own, model).sample(steps=1)
    merging = host.find_attached(own)
    assert copy.deepcopy(own.wrappers)["apply_model"]["tome"][0].__self__ is merging
    left = [weakref.ref(one.model.diffusion_model) for one in (own, other)]
    del own, other, model
    gc.collect()
    assert merging.latest is not None and [one() for one in left] == [None, None]


@pytest.mark.parametrize("values", [None, QUARTER, HALF], ids=["plain", "another", "itself"])
def test_a_sampling_inside_of_a_branchs_sampling_is_what_it_is_alone(values):
    plain = least_checkpoint()
    outer, innermost = branch(plain), []
    inner = plain if values is None else outer if values == HALF else branch(plain, **values)
    expected, alone = sample(outer), sample(inner)
    merged = sample(outer, stop=lambda step: innermost.append(sample(inner, steps=3)))
    assert torch.equal(merged, expected) and all(torch.equal(one, alone) for one in innermost)
    assert torch.equal(alone, expected) == (inner is outer) and latest(outer).report.calls == 3


def test_two_branches_of_one_model_in_two_threads_merge_as_each_says():
    plain, barrier = least_checkpoint(), threading.Barrier(2, timeout=60)
    branches = [branch(plain), branch(plain, **QUARTER)]
    alone = [sample(one) for one in branches]
    both = at_once(*(lambda one=one: sample(one, stop=lambda step: barrier.wait()) for one in branches))
    assert all(torch.equal(*pair) for pair in zip(alone, both, strict=True)) and not torch.equal(*alone)


class GuiderOfTwo(Guider):
    """ComfyUI's multi-GPU node: each prompt goes to a copy of the model of its own, in a thread of its own."""

    def _call(self, pair, now):
        def call(number, model):
            x, text = pair.chunk(2)[number], self.text.chunk(2)[number]
            options = {**self.options, "cond_or_uncond": [1 - number], "uuids": [self.options["uuids"][number]]}
            with torch.no_grad():
                return model.apply_model(x, now.expand(len(x)), text, options)

        return torch.cat(at_once(*(partial(call, number, model) for number, model in enumerate(self.copies))))


def test_one_sampling_may_run_copies_of_its_model_in_threads():
    applied = branch(least_checkpoint(), ratio=0.5, use_rand=False)  # matches that are kept are each copy's own
    copies = [least_checkpoint().model for _ in range(2)]
    before, expected = [traces(one) for one in copies], sample(applied)
    guider = GuiderOfTwo(applied)
    guider.copies = copies
    torch.testing.assert_close(guider.sample(steps=3, size=(8, 8)), expected)
    report = latest(applied).report
    assert report.calls == 6 and report.calls_merged == 6 * report.levels[0].blocks
    assert [traces(one) for one in copies] == before


def test_a_call_of_the_model_inside_its_own_call_merges_too():
    applied = branch(least_checkpoint())
    expected, depth = sample(applied), []

    def twice(run, *args):
        if not depth:
            depth.append(1)
            run.class_obj.apply_model(*args[:2], args[3], args[5])
            depth.clear()
        return run(*args)

    applied.add_wrapper_with_key("apply_model", "again", twice)
    assert torch.equal(sample(applied), expected) and not latest(applied).report.reasons
    assert latest(applied).report.calls == 6


def test_a_call_outside_of_any_sampling_merges_and_leaves_nothing():
    applied = branch(least_checkpoint())
    before, (x, text), outs = traces(applied.model), inputs(4, 2, 8, 8), []
    with torch.no_grad():
        for wrappers in (applied.wrappers["apply_model"], {}):
            options = {"wrappers": {"apply_model": wrappers}}
            outs.append(applied.model.apply_model(x, torch.full((2,), 3.0), text, options))
    assert not torch.equal(*outs) and traces(applied.model) == before
    assert host.find_attached(applied)._sampling is None


def test_a_compiled_transformer_gets_nothing_of_ours_in_any_order(server):
    """What ComfyUI compiled with our function in the options fails in every branch that has none."""
    plain = transformer()
    compiled, before = torch.compile(plain.model.diffusion_model, backend="eager"), FlowGuider(plain).sample(steps=2)
    for merged in (with_compile(branch(plain), compiled), branch(with_compile(plain, compiled))):
        assert torch.equal(FlowGuider(merged).sample(steps=2), before)
        assert server.texts[-1] == ("5", "ToMe: own settings, 2 steps, stepped aside: the model is compiled; take that "
                                         "node off to merge")  # fmt: skip
    assert not torch.equal(FlowGuider(branch(plain)).sample(steps=2), before)


def test_a_model_is_known_as_compiled_as_a_whole_and_by_a_block():
    model, block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    assert host.is_compiled_whole(model, {}) is None and host.is_compiled_whole(torch.compile(model), {}) is True
    block[0].compile()
    model[1] = torch.compile(model[1])  # as packs do that compile by block
    assert host.is_compiled_whole(model, {}) is False and host.is_compiled_whole(block, {}) is False
    assert host.is_compiled_whole(torch.compile(model), {}) is False, "and a part of it by itself"


def test_a_call_is_begun_in_the_precision_in_which_the_model_computes(monkeypatch):
    """The host samples in another, and may compute in another than that of the weights."""
    seen, begin, patcher = [], State.begin, least_checkpoint()
    monkeypatch.setattr(State, "begin", lambda self, t, latent, *more: seen.append(latent.dtype) or begin(
        self, t, latent, *more))  # fmt: skip
    patcher.model.get_dtype = lambda: torch.float16
    for patcher.model.manual_cast_dtype in (None, torch.bfloat16):
        sample(branch(patcher), steps=1)
    assert seen == [torch.float16, torch.bfloat16]
