"""A branch merges in its own calls alone: nothing lies on the model that branches share, not even while one samples."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from comfy_nodes import host
from comfy_nodes.slot import SLOT
from tests.comfy_doubles import Guider, apply, least_checkpoint, noted, with_compile
from tests.comfy_transformer import FlowGuider, transformer
from tests.models import inputs
from tests.threads import at_once
from tests.traces import traces
from tome_core.engine.state import State

HALF = {"ratio": 0.5, "use_rand": False}
QUARTER = {**HALF, "ratio": 0.25}


def branch(plain, **values):
    return apply(plain, **(values or HALF))


def sample(patcher, **options):
    return Guider(patcher).sample(**{"steps": 3, "size": (8, 8), **options})


def test_nothing_lies_on_the_model_while_a_branch_samples():
    applied = branch(least_checkpoint())
    before, options = traces(applied.model), applied.model_options["transformer_options"]
    seen = noted(applied, lambda: traces(applied.model) == before and SLOT not in options)
    expected = sample(applied)
    assert seen == [True] * 3 and traces(applied.model) == before and SLOT not in options
    assert torch.equal(sample(applied), expected) and not torch.equal(sample(least_checkpoint()), expected)


def test_while_a_branch_samples_nobody_else_merges():
    plain = least_checkpoint()
    applied, inner = branch(plain), []
    expected, alone = sample(plain), sample(applied)
    merged = sample(applied, stop=lambda step: inner.append(sample(plain)))
    assert torch.equal(merged, alone) and all(torch.equal(one, expected) for one in inner)


def test_two_branches_of_one_model_inside_each_other_merge_as_each_says():
    plain = least_checkpoint()
    half, quarter, inner = branch(plain), branch(plain, **QUARTER), []
    alone = {"half": sample(branch(least_checkpoint())), "quarter": sample(branch(least_checkpoint(), **QUARTER))}
    merged = sample(half, stop=lambda step: inner.append(sample(quarter)))
    assert torch.equal(merged, alone["half"]) and all(torch.equal(one, alone["quarter"]) for one in inner)
    assert not torch.equal(*alone.values())


def test_two_branches_of_one_model_in_two_threads_merge_as_each_says():
    plain, barrier = least_checkpoint(), threading.Barrier(2, timeout=60)
    branches = [branch(plain), branch(plain, **QUARTER)]
    alone = [sample(one) for one in branches]
    both = at_once(*(lambda one=one: sample(one, stop=lambda step: barrier.wait()) for one in branches))
    assert all(torch.equal(*pair) for pair in zip(alone, both, strict=True))


def test_branches_of_two_models_sample_in_two_threads():
    """Servers with a queue for each GPU."""
    branches = [branch(least_checkpoint()), branch(least_checkpoint(), **QUARTER)]
    alone = [sample(one) for one in branches]
    both = at_once(*(lambda one=one: [sample(one) for _ in range(3)] for one in branches))
    assert all(torch.equal(one, expected) for expected, many in zip(alone, both, strict=True) for one in many)


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
    applied, copies = branch(least_checkpoint()), [least_checkpoint().model for _ in range(2)]
    before, expected = [traces(one) for one in copies], sample(applied)
    guider = GuiderOfTwo(applied)
    guider.copies = copies
    found = guider.sample(steps=3, size=(8, 8))
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found, sample(least_checkpoint())) and [traces(one) for one in copies] == before
    report = host.find_attached(applied).latest.report
    assert report.calls == 6 and report.calls_merged == 6 * report.levels[0].blocks


def test_a_branch_inside_itself_draws_what_it_draws_alone():
    applied, inner = branch(least_checkpoint()), []
    alone = sample(applied)
    assert torch.equal(sample(applied, stop=lambda step: inner.append(sample(applied))), alone)
    assert all(torch.equal(one, alone) for one in inner)
    latest = host.find_attached(applied).latest
    assert latest.lines[0].startswith("ToMe: own settings, 3 steps") and latest.report.calls == 3, "the outer one's"


def test_a_call_of_the_model_inside_its_own_call_merges_too():
    applied = branch(least_checkpoint())
    expected, depth = sample(applied), []

    def twice(run, *args):
        if not depth:
            depth.append(1)
            run.class_obj.apply_model(*args[:2], args[3], args[5])
            depth.clear()
        return run(*args)

    again = applied.clone()
    again.add_wrapper_with_key("apply_model", "again", twice)
    assert torch.equal(sample(again), expected)
    assert not host.find_attached(applied).latest.report.reasons


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_inner_sampling_that_breaks_off_leaves_the_outer_one_as_it_was(error):
    plain = least_checkpoint()
    half, quarter = branch(plain), branch(plain, **QUARTER)
    alone = sample(half)

    def fail(step):
        raise error

    def inner(step):
        with pytest.raises(error):
            sample(quarter, stop=fail)

    assert torch.equal(sample(half, stop=inner), alone)


def test_a_call_outside_of_any_sampling_merges_and_leaves_nothing():
    applied = branch(least_checkpoint(), **HALF, keep=1000.0)
    before = traces(applied.model)
    x, text = inputs(4, 2, 8, 8)
    outs = []
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
        seen = noted(merged, lambda options=merged.model_options: SLOT in options["transformer_options"])
        assert torch.equal(FlowGuider(merged).sample(steps=2), before) and seen == [False] * 2
        assert server.texts[-1] == ("5", "ToMe: own settings, 2 steps, stepped aside: the model is compiled; take that "
                                         "node off to merge")  # fmt: skip
    assert not torch.equal(FlowGuider(branch(plain)).sample(steps=2), before)


def test_a_model_is_known_as_compiled_as_a_whole_and_by_a_block():
    model, block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    assert host.is_compiled_whole(model, {}) is None and host.is_compiled_whole(torch.compile(model), {}) is True
    block[0].compile()
    model[1] = torch.compile(model[1])  # as packs do that compile by block
    assert host.is_compiled_whole(model, {}) is False and host.is_compiled_whole(block, {}) is False


@pytest.mark.parametrize(("weights", "casts"), [(torch.float16, None), (torch.uint8, torch.float16)])
def test_a_call_is_told_of_in_the_precision_in_which_the_model_computes(monkeypatch, weights, casts):
    """The host samples in another, and may compute in another than that of the weights."""
    seen, begin, patcher = [], State.begin, least_checkpoint()
    monkeypatch.setattr(State, "begin", lambda self, t, latent, *more: seen.append(latent.dtype) or begin(
        self, t, latent, *more))  # fmt: skip
    patcher.model.get_dtype, patcher.model.manual_cast_dtype = lambda: weights, casts
    sample(branch(patcher))
    assert seen == [torch.float16] * 3


def test_times_are_kept_in_comfyuis_folder_and_outside_of_it_in_no_file(monkeypatch):
    monkeypatch.delitem(sys.modules, "folder_paths", raising=False)
    assert host.gains_file() is None
    monkeypatch.setitem(sys.modules, "folder_paths", SimpleNamespace(get_user_directory=lambda: "user"))
    assert host.gains_file() == os.path.join("user", "tome_core_gains.json")
