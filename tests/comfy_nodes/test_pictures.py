"""In ComfyUI samplings of a node that is on are compared with those of a node that is off, without being asked to."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from comfy_nodes import host
from comfy_nodes.nodes import OFF_BY_SETTINGS, OFF_TEXT, ApplyToMe, RemoveToMe, ToMePreview
from comfy_nodes.slot_calls import SLOT
from tests import comfy_attention, step_clock
from tests.comfy_doubles import apply, least_checkpoint, sample, sampler_of
from tome_core.hosting import gains

TOLD = "about 2.0x faster, from your own pictures (3 with merging, 3 without)"


@pytest.fixture
def drawn(monkeypatch, server):
    """Samplings by a node that is on or off, merged ones in half of the time; the node's last text."""
    clock, patcher = step_clock.put_on(monkeypatch), least_checkpoint()

    def draw(is_on, times=1, **more):
        applied = apply(patcher, ratio=0.5 * is_on, only_if_it_pays=False)
        clock.step = 0.5 if is_on else 1.0
        for _ in range(times):
            sample(applied, **{"steps": 7, **more})
        return server.texts[-1][1]

    draw.patcher, draw.options = patcher, patcher.model_options["transformer_options"]
    gains.KNOWN.forget()
    yield draw
    gains.KNOWN.forget()


def test_it_is_told_after_three_of_both_kinds(drawn):
    assert drawn(False, 3) == OFF_BY_SETTINGS
    assert "left out" in drawn(True, 2)
    assert drawn(True) == f"ToMe: own settings, 7 steps, {TOLD}"


def test_a_branch_that_is_off_is_called_as_one_without_a_node(drawn):
    patcher, (off,), reports = drawn.patcher, ApplyToMe().apply(drawn.patcher, strength=0), []
    pictures = [sample(one, callback=lambda *args: reports.append(args[0])) for one in (patcher, off)]
    assert torch.equal(*pictures) and reports == [0, 1] * 2
    assert OFF_TEXT in ToMePreview().preview(off, latent={"samples": pictures[0]})["ui"]["text"]
    for clone in (RemoveToMe().remove(off)[0], apply(off)):
        assert sum(map(len, clone.wrappers.get("apply_model", {}).values())) == (host.find_attached(clone) is not None)


def passes_on(function, *args, **kwargs):
    return function(*args, **kwargs)


def controlled(run, x, t, concat, context, control, options):
    return run(x, t, concat, context, "a ControlNet", options)


@pytest.mark.parametrize("other", [
    {"size": (16, 8)}, {"batch": 2}, {"sampler": sampler_of()}, "attention", "slot", "wrapper",
])  # fmt: skip
def test_another_sampling_or_another_node_beside_it_is_another_case(drawn, monkeypatch, other):
    drawn(False, 3)
    if other == "attention":
        monkeypatch.setattr(comfy_attention, "optimized_attention", comfy_attention.attention_basic)
    elif other == "slot":
        drawn.options[SLOT] = passes_on
    elif other == "wrapper":
        drawn.patcher.add_wrapper_with_key("apply_model", "another's", passes_on)
    changes = other if isinstance(other, dict) else {}
    assert "own pictures" not in drawn(True, 3, **changes)
    drawn(False, 3, **changes)
    assert TOLD.replace("3 with ", "4 with ") in drawn(True, **changes)


@pytest.mark.parametrize("is_on", [False, True])
def test_what_was_stopped_or_ran_beside_patches_or_a_controlnet_counts_for_nothing(drawn, is_on):
    def stop(step):
        if step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drawn(is_on, steps=9, stop=stop)
    drawn.options["patches"] = {"attn1_patch": [lambda q, k, v, extra: (q, k, v)]}
    drawn(is_on)
    del drawn.options["patches"]
    drawn.patcher.add_wrapper_with_key("apply_model", "control", controlled)
    drawn(is_on)
    assert not gains.KNOWN.pictures
    drawn.patcher.remove_wrappers_with_key("apply_model", "control")
    drawn(is_on)
    assert len(gains.KNOWN.pictures) == 1


def test_a_sampling_inside_of_another_counts_and_its_outer_one_does_not(drawn):
    (off,) = ApplyToMe().apply(drawn.patcher, strength=0)

    def sample_inside(step):
        return step or sample(off, steps=8)

    sample(off, steps=7, stop=sample_inside)
    assert len(gains.KNOWN.pictures) == 1


def test_times_are_kept_in_comfyuis_folder_and_outside_of_it_in_no_file(monkeypatch):
    monkeypatch.delitem(sys.modules, "folder_paths", raising=False)
    assert host.gains_file() is None
    monkeypatch.setitem(sys.modules, "folder_paths", SimpleNamespace(get_user_directory=lambda: "user"))
    assert host.gains_file() == os.path.join("user", "tome_core_gains.json")
