"""A branch merges in its own calls alone: nothing lies on the model that branches share, not even while one samples."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from functools import partial

import pytest
import torch

from comfy_nodes import host
from comfy_nodes.nodes import ApplyToMe, RemoveToMe
from comfy_nodes.slot_calls import SLOT
from tests.comfy_doubles import Executor, Guider, apply, checkpoint, latest, least_checkpoint, sample, transformer
from tests.models import inputs
from tests.threads import at_once
from tests.traces import traces

HALF = {"ratio": 0.5, "use_rand": False, "keep": 1000.0}
QUARTER = {**HALF, "ratio": 0.25}


@pytest.mark.parametrize("load", [least_checkpoint, transformer])
def test_only_the_branch_with_the_node_merges_and_nothing_lies_on_the_model(load):
    plain = load()
    applied, before, seen = apply(plain, **HALF), traces(plain.model), []

    def look(run, *args):
        seen.append(traces(plain.model) == before and SLOT not in applied.model_options["transformer_options"])
        return run(*args)

    applied.add_wrapper_with_key("apply_model", "inner", look)
    unmerged, merged = (sample(patcher) for patcher in (plain, applied))
    assert not torch.equal(merged, unmerged) and seen == [True] * 2
    for other in (plain, plain.clone(), RemoveToMe().remove(applied)[0], ApplyToMe().apply(applied, strength=0)[0]):
        assert torch.equal(sample(other), unmerged)
    assert torch.equal(sample(applied), merged) and traces(plain.model) == before


def test_a_second_apply_replaces_the_first_and_remove_leaves_every_other_patch(server):
    patcher = least_checkpoint()
    twice = apply(apply(patcher, **HALF), **QUARTER)
    assert torch.equal(sample(twice), sample(apply(patcher, **QUARTER)))
    patcher.add_wrapper_with_key("apply_model", "other", "a wrapper")
    patcher.model_options["transformer_options"]["patches"] = {"attn1_patch": ["a patch"]}
    removed = RemoveToMe().remove(apply(patcher))[0]
    assert removed.wrappers["apply_model"] == {"other": ["a wrapper"]} and not removed.wrappers["outer_sample"]
    assert removed.model_options == patcher.model_options
    RemoveToMe().remove(removed, unique_id="8")
    assert server.texts[-1] == ("8", "There was no Apply ToMe on this model.")


def test_each_model_of_a_sampling_merges_in_blocks_of_its_own_and_is_let_go_when_it_is_dropped():
    """DualModelGuider runs a second model with the first one's options; a copy on another GPU is such a model too."""

    class InTurn(Guider):
        def _call(self, pair, now):
            self.model, self.other = self.other, self.model
            return super()._call(pair, now)

    applied, large = apply(least_checkpoint(), level="up to /8"), checkpoint().model
    both, merged = InTurn(applied), []
    both.other = large
    for guider, steps in ((Guider(applied), 2), (Guider(applied, large), 2), (both, 4)):
        guider.sample(steps=steps)
        merged.append({level.downsample: level.calls_merged for level in latest(applied).report.levels})
    one, other, of_both = merged
    assert of_both == {1: one[1] + other[1], 2: other[2]} and other[2] > 0
    merging = host.find_attached(applied)
    assert copy.deepcopy(applied.wrappers)["apply_model"]["tome"][0].__self__ is merging, "it would copy a model"
    left = [weakref.ref(model.diffusion_model) for model in (applied.model, large)]
    del applied, large, guider, both
    gc.collect()
    assert merging.latest is not None and [model() for model in left] == [None, None]


@pytest.mark.parametrize("values", [None, QUARTER, HALF], ids=["plain", "another", "itself"])
def test_a_sampling_inside_of_a_branchs_sampling_is_what_it_is_alone(values):
    plain = least_checkpoint()
    outer, innermost = apply(plain, **HALF), []
    inner = plain if values is None else outer if values is HALF else apply(plain, **values)
    expected, alone = sample(outer), sample(inner)
    merged = sample(outer, stop=lambda step: innermost.append(sample(inner)))
    assert torch.equal(merged, expected) and all(torch.equal(picture, alone) for picture in innermost)
    assert torch.equal(alone, expected) == (inner is outer) and latest(outer).report.calls == 2


def test_two_branches_of_one_model_in_two_threads_merge_as_each_says():
    plain, barrier = least_checkpoint(), threading.Barrier(2, timeout=60)
    branches = [apply(plain, **HALF), apply(plain, **QUARTER)]
    alone = [sample(branch) for branch in branches]
    both = at_once(*(partial(sample, branch, stop=lambda step: barrier.wait()) for branch in branches))
    assert all(map(torch.equal, alone, both)) and not torch.equal(*alone)


def test_a_call_goes_on_with_all_that_it_was_given_and_merges_outside_of_any_sampling():
    """A ControlNet, an inpainting's mask, and what a later ComfyUI gives."""
    applied, seen, (x, text) = apply(least_checkpoint(), **HALF), [], inputs(4, 2, 8, 8)
    given = (x, torch.full((2,), 3.0), "concat", text, "a ControlNet")

    def original(*args, later):
        *front, options = args
        seen.append((*front, later))
        return applied.model._apply_model(x, given[1], None, text, None, options)

    with torch.no_grad():
        outs = [Executor(original, applied.model, wrappers)(*given, {}, later=1)
                for wrappers in (applied.wrappers["apply_model"]["tome"], [])]  # fmt: skip
    assert seen == [(*given, 1)] * 2 and not torch.equal(*outs)
    assert host.find_attached(applied)._sampling is None
