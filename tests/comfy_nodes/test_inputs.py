"""Strength in ComfyUI and the settings beside it: what the inputs of ApplyToMe and ToMeSettings come to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import tome_core
from comfy_nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, host
from comfy_nodes.inputs import SETTINGS, STRENGTH, config_of, settings_types
from comfy_nodes.nodes import ApplyToMe, ToMeSettings
from tests.comfy_doubles import BaseModel, Guider, ModelPatcher, apply, least_checkpoint, queued
from tests.comfy_transformer import FlowGuider, transformer
from tests.models import ldm_of_one_level, ldm_sdxl
from tests.nodedefs import inputs_of
from tome_core import MergeConfig, describe_settings, form
from tome_core.hosting import MARKS


def apply_strength(patcher: ModelPatcher, **values) -> ModelPatcher:
    return ApplyToMe().apply(patcher, unique_id="5", **values)[0]


def config(patcher: ModelPatcher) -> MergeConfig:
    return host.find_attached(patcher).config


def test_what_comfyui_shows_of_every_node_is_there():
    assert set(NODE_CLASS_MAPPINGS) == set(NODE_DISPLAY_NAME_MAPPINGS) == {
        "ApplyToMe", "ToMeSettings", "RemoveToMe", "ToMePreview"}  # fmt: skip
    for node in NODE_CLASS_MAPPINGS.values():
        assert node.DESCRIPTION and node.CATEGORY and {"token merging", "tomesd"} <= set(node.SEARCH_ALIASES)
        assert len(node.OUTPUT_TOOLTIPS) == len(node.RETURN_TYPES) and hasattr(node, node.FUNCTION)
        assert all(facts["tooltip"] for _, facts in inputs_of(node).values())
        # ComfyUI marks every input that a VALIDATE_INPUTS names, and leaves to it what ranges and choices tell alone
        assert not hasattr(node, "IS_CHANGED") and not hasattr(node, "VALIDATE_INPUTS")
        json.dumps(node.INPUT_TYPES())


# --- ApplyToMe -------------------------------------------------------------------------------------------------------


def test_apply_has_four_short_inputs_beside_the_model_and_a_prompt_needs_none_of_them():
    types = ApplyToMe.INPUT_TYPES()
    assert [*types["required"]] == ["model"] and [*types["optional"]] == ["strength", "start", "end", "settings"]
    assert [kind for kind, _ in types["optional"].values()] == ["FLOAT"] * 3 + [*ToMeSettings.RETURN_TYPES]
    facts = [facts for _, facts in types["optional"].values()]
    assert all(one["tooltip"].count(". ") <= 1 and one["display_name"].islower() for one in facts)
    assert [one.get("step") for one in facts] == [0.05, 0.01, 0.01, None]
    inputs, problems = queued(ApplyToMe, {"model": "a model"})
    assert not problems and "strength" not in inputs and queued(ApplyToMe, {})[1] == ["model"]
    named = {name: facts["default"] for name, (_, facts) in types["optional"].items() if "default" in facts}
    alone, full = (apply_strength(least_checkpoint(), **values) for values in ({}, named))
    assert config(alone) == config(full) == tome_core.strength(STRENGTH)


def test_strength_is_the_engines_between_start_and_end_for_the_models_layout():
    for strength in (0.1, 0.333, *MARKS.values()):
        assert config_of(strength, 0.0, 1.0) == tome_core.strength(strength)
        limited = replace(tome_core.strength(strength), start_percent=0.2, end_percent=0.7)
        assert config_of(strength, 0.2, 0.7) == limited
    for layout, model in (("sd", ldm_of_one_level), ("sdxl", ldm_sdxl)):
        merged = apply_strength(ModelPatcher(BaseModel(model().model.diffusion_model)), strength=0.25)
        assert config(merged) == tome_core.preset("quality", layout)
    merged = apply_strength(transformer(), strength=0.5)
    assert config(merged) == form.change(tome_core.strength(0.5, layout="transformer"), {"start": 0.0, "end": 1.0})


def test_a_strength_merges_where_it_pays_and_start_and_end_limit_it(server):
    plain = least_checkpoint()
    pictures = [Guider(branch).sample(size=(32, 32), steps=3) for branch in (
        plain, apply_strength(plain), apply_strength(plain, start=0.5), apply_strength(plain, start=1.0))]  # fmt: skip
    assert not torch.equal(pictures[0], pictures[1]) and not torch.equal(pictures[1], pictures[2])
    assert torch.equal(pictures[0], pictures[3])
    merged = apply_strength(transformer(), strength=0.5)
    for size, said in (((24, 32), "so few tokens"), ((64, 64), "left out")):
        FlowGuider(merged).sample(size=size, steps=2)
        assert said in server.texts[-1][1]


def test_settings_take_the_strengths_place_and_the_report_says_so(server):
    plain = least_checkpoint()
    (settings,) = ToMeSettings().settings(ratio=0.25)
    one, other = (apply_strength(plain, strength=strength, settings=settings) for strength in (0.0, 1.0))
    assert config(one) == config(other) == MergeConfig(ratio=0.25)
    assert config(apply_strength(plain, settings=settings, start=0.5)) == MergeConfig(ratio=0.25, start_percent=0.5)
    Guider(one).sample(steps=1)
    assert server.texts[-1][1].startswith("ToMe: own settings, 1 step, ")


def test_a_model_that_cannot_merge_passes_through_and_the_node_says_so(server):
    other, unplaced = ModelPatcher(BaseModel(nn.Sequential(nn.Linear(2, 2)))), transformer()
    unplaced.model.diffusion_model.patch_size = None
    for model in (other, unplaced):
        passed = apply(model)
        assert passed is not model and not any(passed.wrappers.values())
        assert "stepped aside, the model is unchanged" in server.texts[-1][1]
        assert "is not known: no attention function" in server.texts[-1][1]


def test_an_old_comfyui_passes_through_and_the_node_says_so(server):
    class Old:
        def clone(self):
            return Old()

    assert isinstance(apply(Old()), Old) and "older than September 2025" in server.texts[-1][1]


# --- what is wrong ---------------------------------------------------------------------------------------------------


def test_one_wrong_value_marks_one_input():
    for node, values, wrong in (
        (ApplyToMe, {"model": "a model", "start": -0.1, "strength": 0.2}, "start"),
        (ToMeSettings, {"level": "up to /3", "ratio": 0.3, "sx": 4}, "level"), (ToMeSettings, {"sx": "four"}, "sx"),
    ):  # fmt: skip
        assert queued(node, values)[1] == [wrong]


@pytest.mark.parametrize("values", [
    {"strength": 1.5}, {"strength": "much"}, {"start": 0.8, "end": 0.2}, {"settings": {"ratio": 0.5}},
])  # fmt: skip
def test_what_a_link_may_bring_stops_no_queue_and_is_named_in_one_line(server, values, caplog):
    with caplog.at_level("INFO"):
        passed = apply_strength(least_checkpoint(), **values)
    (line,) = [record.getMessage() for record in caplog.records]
    assert any(name in line for name in values) and ";" in line and "\n" not in line
    assert server.texts == [("5", line.replace(" #5", ""))] and not any(passed.wrappers.values())


@pytest.mark.parametrize(("values", "left", "words"), [
    ({"proportional": False, "refine": 2}, "refine", "refine=2 may leave groups without tokens"),
    ({"sx": 3, "level": ["7", 0]}, "level", "use one of automatic"),
])  # fmt: skip
def test_what_does_not_go_together_is_left_out_and_said_once(server, caplog, values, left, words):
    with caplog.at_level("INFO"):
        (settings,) = ToMeSettings().settings(unique_id="6", **values)
    (rest,) = ToMeSettings().settings(**{name: value for name, value in values.items() if name != left})
    assert settings == rest != MergeConfig()
    ((node, text),) = server.texts
    assert node == "6" and words in text and len(caplog.records) == 1


def test_inputs_of_another_version_are_named_and_do_no_harm(server, caplog):
    prompt = {"12:5": {"inputs": {"model": ["1", 0], "preset": "fast", "strength": 0.5}, "_meta": {"title": "second"}},
              "6": {"inputs": {"ratio": 0.3, "of_tomorrow": 1}}}  # fmt: skip
    applied = ApplyToMe().apply(least_checkpoint(), unique_id="12:5", prompt=prompt, preset="linked")[0]
    with caplog.at_level("INFO"):
        Guider(applied).sample(steps=1)
    said = [text for node, text in server.texts if node == "12:5"][-1]
    assert "unknown to this version of the node: preset" in said and "strength," not in said
    line = caplog.records[-1].getMessage()
    assert line.startswith("ToMe #12:5 second: strength 0.5, 1 step, ") and line.endswith("of the node: preset")
    assert ToMeSettings().settings(ratio=0.3, unique_id="6", prompt=prompt) == (MergeConfig(ratio=0.3),)
    assert server.texts[-1] == ("6", "ToMe Settings, not used: unknown to this version of the node: of_tomorrow")


# --- ToMeSettings ----------------------------------------------------------------------------------------------------


def test_settings_are_in_the_forms_order_and_none_is_called_seed():
    """Widgets are saved by position: a new one in their midst would give each one behind it its neighbour's value."""
    names = [*ToMeSettings.INPUT_TYPES()["optional"]]
    elsewhere = {"start", "end"}  # of ApplyToMe
    not_here = {"merge_crossattn", "merge_mlp"}  # what does not come through the slot
    assert names == [*SETTINGS] == [name for name in form.NAMES if name not in elsewhere | not_here]
    assert "seed" not in names


def test_the_settings_can_say_all_of_a_strength():
    for strength in (0.1, *MARKS.values()):
        values = form.fill(strength)
        assert ToMeSettings().settings(**values) == (tome_core.strength(strength),)
        assert queued(ToMeSettings, values)[1] == []


def test_choices_ranges_defaults_steps_and_tooltips_are_the_engines_and_none_need_be_given():
    assert ToMeSettings().settings() == (MergeConfig(),) and queued(ToMeSettings, {})[1] == []
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
