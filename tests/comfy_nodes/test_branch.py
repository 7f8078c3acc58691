"""A branch merges only in its own calls: nothing lies on the model that branches share, even while a branch samples."""

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
from tests.host_doubles.comfy import Executor, apply, least_checkpoint, sample, transformer
from tests.small_models.unets import inputs
from tests.watching.threads import at_once
from tests.watching.traces import traces

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


def test_a_dropped_model_is_let_go_though_its_branch_is_kept():
    applied = apply(least_checkpoint(), **HALF)
    sample(applied)
    merging, model = host.find_attached(applied), weakref.ref(applied.model.diffusion_model)
    assert copy.deepcopy(applied.wrappers)["apply_model"]["tome"][0].__self__ is merging, "it would copy a model"
    del applied
    gc.collect()
    assert merging.latest is not None and model() is None


def test_two_branches_of_one_model_in_two_threads_merge_as_each_says():
    plain, barrier = least_checkpoint(), threading.Barrier(2, timeout=60)
    branches = [apply(plain, **HALF), apply(plain, **QUARTER)]
    alone = [sample(branch) for branch in branches]
    both = at_once(*(partial(sample, branch, stop=lambda step: barrier.wait()) for branch in branches))
    assert all(map(torch.equal, alone, both)) and not torch.equal(*alone)


def test_a_call_goes_on_with_all_that_it_was_given_and_merges_outside_of_any_sampling():
    """The arguments are a ControlNet's, an inpainting mask, and one that a later ComfyUI may add."""
    applied, seen, (x, text) = apply(least_checkpoint(), **HALF), [], inputs(4, 2, 8, 8)
    given, shared = (x, torch.full((2,), 3.0), "concat", text, "a ControlNet"), {"other": 1}

    def original(*args, later):
        *front, options = args
        seen.append((*front, later))
        return applied.model._apply_model(x, given[1], None, text, None, options)

    with torch.no_grad():
        outs = [Executor(original, applied.model, wrappers)(*given, shared, later=1)
                for wrappers in (applied.wrappers["apply_model"]["tome"], [])]  # fmt: skip
    assert seen == [(*given, 1)] * 2 and not torch.equal(*outs) and shared == {"other": 1}
    assert host.find_attached(applied)._sampling is None
