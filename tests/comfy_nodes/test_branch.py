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
from comfy_nodes.slot import SLOT
from tests.comfy_doubles import FlowGuider, Guider, apply, latest, least_checkpoint, transformer
from tests.models import inputs
from tests.threads import at_once
from tests.traces import traces
from tome_core.engine.state import State

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


def test_one_sampling_may_run_copies_of_its_model_in_threads():
    """ComfyUI's multi-GPU node: each prompt goes to a copy of the model of its own, in a thread of its own."""

    class OnTwo(Guider):
        def _call(self, pair, now):
            def call(number):
                x, text = pair.chunk(2)[number], self.text.chunk(2)[number]
                options = {**self.options, "cond_or_uncond": [1 - number], "uuids": [self.options["uuids"][number]]}
                with torch.no_grad():
                    return copies[number].apply_model(x, now.expand(len(x)), text, options)

            return torch.cat(at_once(*(partial(call, number) for number in range(2))))

    applied = apply(least_checkpoint(), ratio=0.5, use_rand=False)  # matches that are kept are each copy's own
    expected, copies = sample(applied), [least_checkpoint().model for _ in range(2)]
    torch.testing.assert_close(OnTwo(applied).sample(steps=3, size=(8, 8)), expected)
    report = latest(applied).report
    assert report.calls == 6 and report.calls_merged == 6 * report.levels[0].blocks


def test_a_call_outside_of_any_sampling_merges():
    applied = apply(least_checkpoint(), **HALF)
    (x, text), outs = inputs(4, 2, 8, 8), []
    with torch.no_grad():
        for wrappers in (applied.wrappers["apply_model"], {}):
            options = {"wrappers": {"apply_model": wrappers}}
            outs.append(applied.model.apply_model(x, torch.full((2,), 3.0), text, options))
    assert not torch.equal(*outs) and host.find_attached(applied)._sampling is None


def test_a_call_is_begun_in_the_precision_in_which_the_model_computes(monkeypatch):
    """The host samples in another, and may compute in another than that of the weights."""
    seen, begin, patcher = [], State.begin, least_checkpoint()
    monkeypatch.setattr(State, "begin", lambda self, t, latent, *more: seen.append(latent.dtype) or begin(
        self, t, latent, *more))  # fmt: skip
    patcher.model.get_dtype = lambda: torch.float16
    for patcher.model.manual_cast_dtype in (None, torch.bfloat16):
        sample(apply(patcher, **HALF), steps=1)
    assert seen == [torch.float16, torch.bfloat16]
