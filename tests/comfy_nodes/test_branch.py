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
from tests.comfy_doubles import Executor, FlowGuider, Guider, apply, checkpoint, latest, least_checkpoint, transformer
from tests.models import inputs
from tests.threads import at_once
from tests.traces import traces

HALF = {"ratio": 0.5, "use_rand": False, "keep": 1000.0}
QUARTER = {**HALF, "ratio": 0.25}


def sample(patcher, **options):
    return Guider(patcher).sample(**{"steps": 3, "size": (8, 8), **options})


@pytest.mark.parametrize(("load", "guider"), [(least_checkpoint, Guider), (transformer, FlowGuider)])
def test_only_the_branch_with_the_node_merges_and_nothing_lies_on_the_model(load, guider):
    plain = load()
    applied, before, seen = apply(plain, **HALF), traces(plain.model), []

    def look(run, *args):
        seen.append(traces(plain.model) == before and SLOT not in applied.model_options["transformer_options"])
        return run(*args)

    applied.add_wrapper_with_key("apply_model", "inner", look)
    unmerged, merged = (guider(patcher).sample(steps=3) for patcher in (plain, applied))
    assert not torch.equal(merged, unmerged) and seen == [True] * 3
    for other in (plain, plain.clone(), RemoveToMe().remove(applied)[0], ApplyToMe().apply(applied, strength=0)[0]):
        assert torch.equal(guider(other).sample(steps=3), unmerged)
    assert torch.equal(guider(applied).sample(steps=3), merged) and traces(plain.model) == before


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


def test_the_model_of_the_call_merges_and_is_let_go_when_it_is_dropped():
    """DualModelGuider runs a second model with the first one's options; a copy on another GPU is such a model too."""
    own, other = apply(least_checkpoint(), **HALF), least_checkpoint()
    merged = Guider(own, other.model).sample(steps=3, size=(8, 8))
    assert torch.equal(merged, sample(apply(other, **HALF))) and not torch.equal(merged, sample(other))
    merging = host.find_attached(own)
    assert copy.deepcopy(own.wrappers)["apply_model"]["tome"][0].__self__ is merging, "it would copy a model"
    left = [weakref.ref(patcher.model.diffusion_model) for patcher in (own, other)]
    del own, other
    gc.collect()
    assert merging.latest is not None and [model() for model in left] == [None, None]


def test_two_models_of_one_sampling_merge_in_blocks_of_their_own():
    class InTurn(Guider):
        def _call(self, pair, now):
            models.reverse()
            self.model = models[0]
            return super()._call(pair, now)

    def merged(guider, steps):
        guider.sample(steps=steps, size=(8, 8))
        return {level.downsample: level.calls_merged for level in latest(applied).report.levels}

    applied, models = apply(least_checkpoint(), level="up to /8"), [least_checkpoint().model, checkpoint().model]
    small, large = (merged(Guider(applied, model), steps=2) for model in models)
    assert merged(InTurn(applied), steps=4) == {1: small[1] + large[1], 2: large[2]} and large[2] > 0


@pytest.mark.parametrize("values", [None, QUARTER, HALF], ids=["plain", "another", "itself"])
def test_a_sampling_inside_of_a_branchs_sampling_is_what_it_is_alone(values):
    plain = least_checkpoint()
    outer, innermost = apply(plain, **HALF), []
    inner = plain if values is None else outer if values is HALF else apply(plain, **values)
    expected, alone = sample(outer), sample(inner)
    merged = sample(outer, stop=lambda step: innermost.append(sample(inner)))
    assert torch.equal(merged, expected) and all(torch.equal(picture, alone) for picture in innermost)
    assert torch.equal(alone, expected) == (inner is outer) and latest(outer).report.calls == 3


def test_two_branches_of_one_model_in_two_threads_merge_as_each_says():
    plain, barrier = least_checkpoint(), threading.Barrier(2, timeout=60)
    branches = [apply(plain, **HALF), apply(plain, **QUARTER)]
    alone = [sample(branch) for branch in branches]
    both = at_once(*(partial(sample, branch, stop=lambda step: barrier.wait()) for branch in branches))
    assert all(torch.equal(*pair) for pair in zip(alone, both, strict=True)) and not torch.equal(*alone)


def test_a_call_goes_on_with_all_that_it_was_given():
    """A ControlNet, an inpainting's mask, and what a later ComfyUI gives."""
    patcher, seen = apply(least_checkpoint(), **HALF), []
    given = (torch.zeros(2, 4, 8, 8), torch.ones(2), "concat", "text", "a ControlNet")
    wrappers = patcher.wrappers["apply_model"]["tome"]
    Executor(lambda *args, **more: seen.append((args[:5], more)), patcher.model, wrappers).execute(*given, {}, later=1)
    assert seen == [(given, {"later": 1})]


def test_a_call_outside_of_any_sampling_merges():
    applied = apply(least_checkpoint(), **HALF)
    (x, text), outs = inputs(4, 2, 8, 8), []
    with torch.no_grad():
        for wrappers in (applied.wrappers["apply_model"], {}):
            options = {"wrappers": {"apply_model": wrappers}}
            outs.append(applied.model.apply_model(x, torch.full((2,), 3.0), text, options))
    assert not torch.equal(*outs) and host.find_attached(applied)._sampling is None
