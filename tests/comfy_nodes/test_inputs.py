"""Strength in ComfyUI and the settings beside it: what the inputs of ApplyToMe and ToMeSettings come to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import tome_core
from comfy_nodes import host
from comfy_nodes.inputs import SETTINGS, STRENGTH, config_of, settings_types
from comfy_nodes.nodes import ApplyToMe, ToMeSettings
from tests.comfy_doubles import BaseModel, Guider, ModelPatcher, apply, checkpoint, least_checkpoint, queued
from tests.models import ldm_of_one_level, ldm_sdxl
from tome_core import MergeConfig, describe_settings, form
from tome_core.hosting import MARKS

BIG = (32, 32)  # as few tokens as merging pays for on a CPU


def apply_strength(patcher: ModelPatcher, **values) -> ModelPatcher:
    return ApplyToMe().apply(patcher, unique_id="5", **values)[0]


# --- ApplyToMe -------------------------------------------------------------------------------------------------------


def test_the_node_has_four_inputs_beside_the_model_three_of_them_widgets():
    types = ApplyToMe.INPUT_TYPES()
    assert [*types["required"]] == ["model"]
    assert [*types["optional"]] == ["strength", "start", "end", "settings"]
    kinds = [kind for kind, _ in types["optional"].values()]
    assert kinds == ["FLOAT"] * 3 + [*ToMeSettings.RETURN_TYPES]
    json.dumps(types)


def test_a_prompt_needs_no_input_but_the_model():
    inputs, problems = queued(ApplyToMe, {"model": "a model"})
    assert not problems and "strength" not in inputs
    alone = apply_strength(least_checkpoint())
    named = {name: facts["default"] for name, (_, facts) in ApplyToMe.INPUT_TYPES()["optional"].items()
             if "default" in facts}  # fmt: skip
    assert host.find_attached(alone).config == host.find_attached(apply_strength(least_checkpoint(), **named)).config
    assert host.find_attached(alone).config == tome_core.strength(STRENGTH)
    assert queued(ApplyToMe, {})[1] == ["model"]


@pytest.mark.parametrize("strength", [0.1, 0.333, *MARKS.values()])
def test_strength_is_the_engines_between_start_and_end(strength):
    assert config_of(strength, 0.0, 1.0) == tome_core.strength(strength)
    limited = replace(tome_core.strength(strength), start_percent=0.2, end_percent=0.7)
    assert config_of(strength, 0.2, 0.7) == limited


@pytest.mark.parametrize("layout, model", [("sd", ldm_of_one_level), ("sdxl", ldm_sdxl)])
def test_strength_is_that_of_the_models_layout(layout, model):
    merged = apply_strength(ModelPatcher(BaseModel(model().model.diffusion_model)), strength=0.25)
    assert host.find_attached(merged).config == tome_core.preset("quality", layout)


def test_the_dials_tooltips_are_short_and_say_what_happens():
    facts = [facts for _, facts in (*ApplyToMe.INPUT_TYPES()["optional"].values(),)]
    assert facts[0]["tooltip"] == "Higher is faster and changes the picture more. 0 is off."
    assert all(one["tooltip"].count(". ") <= 1 and one["display_name"].islower() for one in facts)


def test_strength_0_leaves_the_branch_alone_and_replaces_an_earlier_node(server):
    plain = checkpoint()
    off = apply_strength(apply(plain), strength=0.0)
    assert host.find_attached(off) is None and torch.equal(Guider(off).sample(), Guider(plain).sample())
    assert "off" in server.texts[-1][1]


def test_a_strength_merges_and_start_and_end_limit_it():
    plain = least_checkpoint()
    pictures = [Guider(branch).sample(size=BIG, steps=3) for branch in (
        plain, apply_strength(plain), apply_strength(plain, start=0.5), apply_strength(plain, start=1.0))]  # fmt: skip
    assert not torch.equal(pictures[0], pictures[1]) and not torch.equal(pictures[1], pictures[2])
    assert torch.equal(pictures[0], pictures[3])


def test_settings_take_the_strengths_place_and_the_report_says_so(server):
    plain = checkpoint()
    (settings,) = ToMeSettings().settings(ratio=0.25)
    one, other = (apply_strength(plain, strength=strength, settings=settings) for strength in (0.0, 1.0))
    assert host.find_attached(one).config == host.find_attached(other).config == MergeConfig(ratio=0.25)
    limited = apply_strength(plain, settings=settings, start=0.5)
    assert host.find_attached(limited).config == MergeConfig(ratio=0.25, start_percent=0.5)
    Guider(one).sample(steps=1)
    assert server.texts[-1][1].startswith("ToMe: own settings, 1 step, ")


# --- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("node", "values"), [
    (ApplyToMe, {"model": "a model", "strength": 1.5}),
    (ApplyToMe, {"model": "a model", "start": -0.1, "strength": 0.2}),
    (ToMeSettings, {"level": "up to /3", "ratio": 0.3, "sx": 4}),
    (ToMeSettings, {"ratio": 1.5, "method": "cluster"}),
    (ToMeSettings, {"sx": "four"}),
])  # fmt: skip
def test_one_wrong_value_marks_one_input(node, values):
    """ComfyUI marks every input that a VALIDATE_INPUTS names, and leaves to it what ranges and choices tell alone."""
    assert len(queued(node, values)[1]) == 1
    assert not hasattr(node, "VALIDATE_INPUTS")


@pytest.mark.parametrize("values", [
    {"strength": 1.5}, {"strength": "much"}, {"strength": float("nan")}, {"start": 0.8, "end": 0.2}, {"end": 7.0},
    {"settings": {"ratio": 0.5}},
])  # fmt: skip
def test_what_a_link_may_bring_stops_no_queue_and_is_named_in_one_line(server, values, caplog):
    plain = checkpoint()
    with caplog.at_level("INFO"):
        passed = apply_strength(plain, **values)
    (line,) = [record.getMessage() for record in caplog.records]
    assert any(name in line for name in values) and ";" in line and "\n" not in line
    assert server.texts == [("5", line.replace(" #5", ""))] and not any(passed.wrappers.values())


@pytest.mark.parametrize(("values", "left", "words"), [
    ({"proportional": False, "refine": 2}, "refine", "refine=2 may leave groups without tokens"),
    ({"sx": 3, "ratio": 1.5}, "ratio", "ratio=1.5 is out of range"),
    ({"sx": 3, "level": ["7", 0]}, "level", "use one of automatic"),
    ({"sx": 3, "early_ratio": -0.5}, "early_ratio", "early_ratio=-0.5 is out of range"),
])  # fmt: skip
def test_what_does_not_go_together_is_left_out_and_said_once(server, caplog, values, left, words):
    with caplog.at_level("INFO"):
        (config,) = ToMeSettings().settings(unique_id="6", **values)
    (rest,) = ToMeSettings().settings(**{name: value for name, value in values.items() if name != left})
    assert config == rest != MergeConfig()
    ((node, text),) = server.texts
    assert node == "6" and words in text and len(caplog.records) == 1


def test_inputs_of_another_version_are_named_and_do_no_harm(server):
    prompt = {"12:5": {"inputs": {"model": ["1", 0], "preset": "fast", "strength": 0.5}},
              "6": {"inputs": {"ratio": 0.3, "of_tomorrow": 1}}}  # fmt: skip
    applied = ApplyToMe().apply(checkpoint(), unique_id="12:5", prompt=prompt, preset="linked")[0]
    Guider(applied).sample(steps=1)
    said = [text for node, text in server.texts if node == "12:5"][-1]
    assert "unknown to this version of the node: preset" in said and "strength," not in said
    assert ToMeSettings().settings(ratio=0.3, unique_id="6", prompt=prompt) == (MergeConfig(ratio=0.3),)
    assert server.texts[-1] == ("6", "ToMe Settings, not used: unknown to this version of the node: of_tomorrow")


# --- ToMeSettings ----------------------------------------------------------------------------------------------------


def test_settings_are_in_their_documented_order_and_none_is_called_seed():
    """Widgets are saved by position: a new one in their midst would give each one behind it its neighbour's value."""
    names = [*ToMeSettings.INPUT_TYPES()["optional"]]
    assert tuple(names) == SETTINGS and "seed" not in names
    elsewhere = {"start", "end"}  # of ApplyToMe
    not_here = {"merge_crossattn", "merge_mlp"}  # what does not come through the slot
    assert names == [name for name in form.NAMES if name not in elsewhere | not_here]


@pytest.mark.parametrize("strength", [0.1, *MARKS.values()])
def test_the_settings_can_say_all_of_a_strength(strength):
    values = form.fill(strength)
    assert ToMeSettings().settings(**values) == (tome_core.strength(strength),)
    assert queued(ToMeSettings, values)[1] == []


def test_choices_ranges_defaults_steps_and_tooltips_are_the_engines_and_none_need_be_given():
    assert ToMeSettings().settings() == (MergeConfig(),) and queued(ToMeSettings, {})[1] == []
    json.dumps(settings_types())
    settings = {setting.get("known_as", setting["name"]): setting for setting in describe_settings()}
    for name, (kind, facts) in settings_types().items():
        setting = settings[name]
        if "shown" in setting:
            assert kind == [*setting["shown"]]
            assert facts["tooltip"] == setting["help"] and facts["default"] == setting["shown"][0]
            continue
        if name == "early_ratio":  # a number that can be left open: -1, which is below its range
            assert facts["default"] == facts["min"] == -1 and facts["tooltip"] == f"{setting['help']} -1 is the same."
            continue
        assert facts["default"] == setting["default"] and facts["tooltip"] == setting["help"]
        for ours, theirs in (("min", "minimum"), ("max", "maximum"), ("step", "step")):
            assert facts.get(ours) == setting.get(theirs)
