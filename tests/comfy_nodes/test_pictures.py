"""In ComfyUI samplings of a node that is on are compared with those of one that is off, and nobody has to ask."""

from __future__ import annotations

import pytest
import torch

from comfy_nodes import host
from comfy_nodes.nodes import OFF_BY_SETTINGS, OFF_TEXT, ApplyToMe, RemoveToMe, ToMePreview
from comfy_nodes.slot import SLOT
from tests import comfy_attention, step_clock
from tests.comfy_doubles import Guider, apply, least_checkpoint, sampler_of
from tests.comfy_transformer import FlowGuider, transformer
from tests.traces import traces
from tome_core.hosting import gains

TOLD = "about 2.0x faster, from your own pictures (3 with merging, 3 without)"


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Every step takes `step` seconds."""
    gains.KNOWN.forget()
    yield step_clock.put_on(monkeypatch)
    gains.KNOWN.forget()


@pytest.fixture
def drawn(clock, server):
    """Samplings by a node that is on or off, merged ones in half of the time; the node's last text."""
    patcher = least_checkpoint()

    def draw(is_on, times=1, patcher=patcher, guider=Guider, steps=7, **more):
        applied = apply(patcher, ratio=0.5 * is_on, only_if_it_pays=False)
        clock.step = 0.5 if is_on else 1.0
        for _ in range(times):
            guider(applied).sample(**{"steps": steps, **more})
        return server.texts[-1][1]

    draw.patcher = patcher
    return draw


def test_it_is_told_after_three_of_both_kinds(drawn):
    assert drawn(False, 3) == OFF_BY_SETTINGS
    assert "left out" in drawn(True, 2)
    assert drawn(True) == f"ToMe: own settings, 7 steps, {TOLD}"


def test_of_a_transformer_too(drawn):
    patcher = transformer()
    drawn(False, 3, patcher, FlowGuider)
    assert TOLD in drawn(True, 3, patcher, FlowGuider)


def test_one_kind_alone_says_nothing(drawn):
    assert "left out" in drawn(True, 9) and "own pictures" not in drawn(True)


def test_a_branch_that_is_off_is_called_as_one_without_a_node(drawn):
    patcher, (off,) = drawn.patcher, ApplyToMe().apply(drawn.patcher, strength=0)
    before, reports = traces(patcher.model), []
    pictures = [Guider(one).sample(callback=lambda *args: reports.append(args[0])) for one in (patcher, off)]
    assert torch.equal(*pictures) and traces(patcher.model) == before and reports == [0, 1, 2, 3] * 2
    assert host.find_attached(off) is None
    assert OFF_TEXT in ToMePreview().preview(off, latent={"samples": pictures[0]})["ui"]["text"]
    for clone in (RemoveToMe().remove(off)[0], apply(off)):
        assert sum(map(len, clone.wrappers.get("apply_model", {}).values())) == (host.find_attached(clone) is not None)


@pytest.mark.parametrize("other", [{"size": (16, 8)}, {"batch": 2}, {"steps": 8}, {"sampler": sampler_of()}])
def test_another_sampling_is_another_case(drawn, other):
    drawn(False, 3)
    assert "own pictures" not in drawn(True, 3, **other)
    drawn(False, 3, **other)
    assert TOLD.replace("3 with ", "4 with ") in drawn(True, **other)


@pytest.mark.parametrize("beside", ["attention", "slot", "wrapper", "patch"])
def test_what_stands_beside_is_another_case(drawn, monkeypatch, beside):
    drawn(False, 3)
    patcher = drawn.patcher
    options = patcher.model_options["transformer_options"]
    if beside == "attention":
        monkeypatch.setattr(comfy_attention, "optimized_attention", comfy_attention.attention_basic)
    elif beside == "slot":
        options[SLOT] = lambda function, *args, **kwargs: function(*args, **kwargs)
    elif beside == "wrapper":
        patcher.add_wrapper_with_key("apply_model", "another's", lambda run, *args: run(*args))
    else:
        options["patches"] = {"attn1_patch": [lambda q, k, v, extra: (q, k, v)]}
    assert "own pictures" not in drawn(True, 3)
    drawn(False, 3)
    assert (TOLD.replace("3 with ", "4 with ") in drawn(True)) == (beside != "patch"), "patches are of any kind"


def test_another_function_in_the_slot_is_another_case(drawn):
    def first(function, *args, **kwargs):
        return function(*args, **kwargs)

    def second(function, *args, **kwargs):
        return function(*args, **kwargs)

    options = drawn.patcher.model_options["transformer_options"]
    options[SLOT] = first
    drawn(False, 3)
    options[SLOT] = second
    assert "own pictures" not in drawn(True, 3)
    options[SLOT] = first
    assert TOLD in drawn(True, 3)


@pytest.mark.parametrize("is_on", [False, True])
def test_what_was_stopped_counts_for_nothing(drawn, is_on):
    def stop(step):
        if step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drawn(is_on, steps=9, stop=stop)
    assert not gains.KNOWN.pictures
    drawn(is_on)
    assert len(gains.KNOWN.pictures) == 1


def test_a_sampling_inside_of_another_counts_and_its_outer_one_does_not(drawn):
    (inner,) = ApplyToMe().apply(drawn.patcher, strength=0)
    (outer,) = ApplyToMe().apply(drawn.patcher, strength=0)
    for one in (inner, outer):
        Guider(one).sample(steps=7, stop=lambda step, one=one: Guider(one).sample(steps=8, size=(8, 8)))
    assert len(gains.KNOWN.pictures) == 1, "the inner ones are alike"
