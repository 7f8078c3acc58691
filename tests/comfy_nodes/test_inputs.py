"""Strength in ComfyUI and the settings beside it: what the inputs of ApplyToMe and ToMeSettings come to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from torch import nn

import tome_core
from comfy_nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, host
from comfy_nodes.inputs import SETTINGS, STRENGTH, config_of, settings_types
from comfy_nodes.nodes import ApplyToMe, ToMeSettings
from tests.comfy_doubles import BaseModel, Guider, ModelPatcher, apply, least_checkpoint, transformer
from tests.models import ldm_of_one_level, ldm_sdxl
from tests.nodedefs import inputs_of
from tome_core import MergeConfig, describe_settings, form
from tome_core.hosting import MARKS


def applied(patcher: ModelPatcher, **values) -> ModelPatcher:
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


def test_apply_needs_the_model_alone_and_has_a_strength_a_start_an_end_and_settings():
    types = ApplyToMe.INPUT_TYPES()
    ranges = {name: (kind, facts.get("min"), facts.get("max"), facts.get("step"))
              for name, (kind, facts) in types["optional"].items()}  # fmt: skip
    assert [*types["required"]] == ["model"] and [*ranges] == ["strength", "start", "end", "settings"]
    assert [*ranges.values()] == [
        ("FLOAT", 0, 1, 0.05), ("FLOAT", 0, 1, 0.01), ("FLOAT", 0, 1, 0.01), (*ToMeSettings.RETURN_TYPES, *[None] * 3)
    ]  # fmt: skip
    named = {name: facts["default"] for name, (_, facts) in types["optional"].items() if "default" in facts}
    for values in ({}, named):
        assert config(applied(least_checkpoint(), **values)) == tome_core.strength(STRENGTH)


def test_strength_is_the_engines_between_start_and_end_for_the_models_layout():
    for strength in (0.1, 0.333, *MARKS.values()):
        limited = replace(tome_core.strength(strength), start_percent=0.2, end_percent=0.7)
        assert config_of(strength, 0.2, 0.7) == limited
    for layout, model in (("sd", ldm_of_one_level), ("sdxl", ldm_sdxl)):
        merged = applied(ModelPatcher(BaseModel(model().model.diffusion_model)), strength=0.25)
        assert config(merged) == tome_core.preset("quality", layout)
    merged = applied(transformer(), strength=0.5)
    assert config(merged) == form.change(tome_core.strength(0.5, layout="transformer"), {"start": 0.0, "end": 1.0})


def test_settings_take_the_strengths_place():
    (settings,) = ToMeSettings().settings(ratio=0.25)
    for strength in (0.0, 1.0):
        merged = applied(least_checkpoint(), strength=strength, settings=settings, start=0.5)
        assert config(merged) == MergeConfig(ratio=0.25, start_percent=0.5)


class Old:
    """A ModelPatcher without wrappers that have keys."""

    def clone(self):
        return Old()


def test_a_model_or_a_comfyui_that_cannot_merge_passes_through_and_the_node_says_so(server):
    other, unplaced = ModelPatcher(BaseModel(nn.Sequential(nn.Linear(2, 2)))), transformer()
    unplaced.model.diffusion_model.patch_size = None
    for model, said in ((other, "stepped aside, the model is unchanged: "), (unplaced, "no attention function"),
                        (Old(), "older than September 2025")):  # fmt: skip
        passed = apply(model)
        assert type(passed) is type(model) and passed is not model and not any(getattr(passed, "wrappers", {}).values())
        assert said in server.texts[-1][1]


# --- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [
    {"strength": 1.5}, {"strength": "much"}, {"start": 0.8, "end": 0.2}, {"settings": {"ratio": 0.5}},
])  # fmt: skip
def test_what_a_link_may_bring_stops_no_queue_and_is_named_in_one_line(server, values, caplog):
    with caplog.at_level("INFO"):
        passed = applied(least_checkpoint(), **values)
    (line,) = [record.getMessage() for record in caplog.records]
    assert any(name in line for name in values) and "\n" not in line
    assert server.texts == [("5", line.replace(" #5", ""))] and not any(passed.wrappers.values())


@pytest.mark.parametrize(("values", "left", "words"), [
    ({"proportional": False, "refine": 2}, "refine", "refine=2 may leave groups without tokens"),
    ({"sx": 3, "level": ["7", 0]}, "level", "use one of automatic"),
])  # fmt: skip
def test_what_does_not_go_together_is_left_out_and_said_once(server, values, left, words):
    (settings,) = ToMeSettings().settings(unique_id="6", **values)
    (rest,) = ToMeSettings().settings(**{name: value for name, value in values.items() if name != left})
    assert settings == rest != MergeConfig()
    ((node, text),) = server.texts
    assert node == "6" and words in text


def test_inputs_of_another_version_are_named_and_do_no_harm(server, caplog):
    prompt = {"12:5": {"inputs": {"model": ["1", 0], "preset": "fast", "strength": 0.5}, "_meta": {"title": "second"}},
              "6": {"inputs": {"ratio": 0.3, "of_tomorrow": 1}}}  # fmt: skip
    merged = ApplyToMe().apply(least_checkpoint(), unique_id="12:5", prompt=prompt, preset="linked")[0]
    with caplog.at_level("INFO"):
        Guider(merged).sample(steps=1)
    line = caplog.records[-1].getMessage()
    assert line.startswith("ToMe #12:5 second: strength 0.5, 1 step, ")
    assert line.endswith("; unknown to this version of the node: preset")
    assert ToMeSettings().settings(ratio=0.3, unique_id="6", prompt=prompt) == (MergeConfig(ratio=0.3),)
    assert server.texts[-1] == ("6", "ToMe Settings, not used: unknown to this version of the node: of_tomorrow")


# --- ToMeSettings ----------------------------------------------------------------------------------------------------


def test_settings_are_in_the_forms_order_and_none_is_called_seed():
    """Widgets are saved by position: a new one in their midst would give each one behind it its neighbour's value."""
    elsewhere = {"start", "end"}  # of ApplyToMe
    not_here = {"merge_crossattn", "merge_mlp"}  # what does not come through the slot
    assert [*SETTINGS] == [name for name in form.NAMES if name not in elsewhere | not_here]
    assert [*ToMeSettings.INPUT_TYPES()["optional"]] == [*SETTINGS] and "seed" not in SETTINGS


def test_choices_ranges_defaults_steps_and_tooltips_are_the_engines_and_none_need_be_given():
    assert ToMeSettings().settings() == (MergeConfig(),) and not ToMeSettings.INPUT_TYPES()["required"]
    settings = {setting.get("known_as", setting["name"]): setting for setting in describe_settings()}
    for name, (kind, facts) in settings_types().items():
        setting = settings[name]
        wanted = [setting["help"], *(setting.get(fact) for fact in ("default", "minimum", "maximum", "step"))]
        if "shown" in setting:
            assert kind == [*setting["shown"]]
            wanted[1] = setting["shown"][0]
        elif name == "early_ratio":  # a number that can be left open: -1, which is below its range
            wanted[:3] = [f"{setting['help']} -1 is the same.", -1, -1]
        assert [facts.get(fact) for fact in ("tooltip", "default", "min", "max", "step")] == wanted
