"""Strength and the other settings in ComfyUI: the configuration that the inputs of ApplyToMe and ToMeSettings give."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import tome_core
from comfy_nodes import host
from comfy_nodes.inputs import STRENGTH
from comfy_nodes.nodes import ApplyToMe, ToMeSettings
from tests.host_doubles.comfy import BaseModel, ModelPatcher, apply, least_checkpoint, sample, transformer
from tests.small_models.unets import ldm_sdxl
from tome_core import MergeConfig, form
from tome_core.hosting import MARKS


def applied(patcher: ModelPatcher, **values) -> ModelPatcher:
    return ApplyToMe().apply(patcher, unique_id="5", **values)[0]


def config(patcher: ModelPatcher, **values) -> MergeConfig:
    return host.find_attached(applied(patcher, **values)).config


def test_apply_needs_the_model_alone_and_has_a_strength_a_start_an_end_and_settings():
    types = ApplyToMe.INPUT_TYPES()
    shown = [(name, kind, *(facts.get(fact) for fact in ("default", "min", "max", "step")))
             for name, (kind, facts) in types["optional"].items()]  # fmt: skip
    assert [*types["required"]] == ["model"] and shown == [
        ("strength", "FLOAT", STRENGTH, 0, 1, 0.05), ("start", "FLOAT", 0, 0, 1, 0.01), ("end", "FLOAT", 1, 0, 1, 0.01),
        ("settings", *ToMeSettings.RETURN_TYPES, *[None] * 4)]  # fmt: skip
    assert config(least_checkpoint()) == tome_core.strength(STRENGTH)


def test_strength_is_the_engines_between_start_and_end_for_the_models_curve_and_settings_take_its_place():
    for strength in (0.1, 0.333, *MARKS.values()):
        limited = replace(tome_core.strength(strength), start_percent=0.2, end_percent=0.7)
        assert config(least_checkpoint(), strength=strength, start=0.2, end=0.7) == limited
    sdxl = ModelPatcher(BaseModel(ldm_sdxl().model.diffusion_model))
    assert config(sdxl, strength=0.25) == tome_core.preset("quality", "sdxl") != tome_core.preset("quality")
    flux = form.change(tome_core.strength(0.5, curve="transformer"), {"start": 0.0, "end": 1.0})
    assert config(transformer(), strength=0.5) == flux
    (settings,) = ToMeSettings().settings(ratio=0.25)
    for strength in (0.0, 1.0):
        merged = config(least_checkpoint(), strength=strength, settings=settings, start=0.5)
        assert merged == MergeConfig(ratio=0.25, start_percent=0.5)


def test_settings_are_the_forms_in_its_order_and_none_need_be_given():
    """Widgets are saved by position: a new one between them would give each later one its neighbour's value."""
    elsewhere = {"start", "end"}  # inputs of ApplyToMe
    not_here = {"merge_crossattn", "merge_mlp"}  # the slot does not get these parts
    types = ToMeSettings.INPUT_TYPES()
    assert ToMeSettings().settings() == (MergeConfig(),) and not types["required"]
    assert [*types["optional"]] == [name for name in form.NAMES if name not in elsewhere | not_here]
    assert "seed" not in types["optional"], "ComfyUI would change it after each queue"
    for name, (kind, facts) in types["optional"].items():
        field = form.field(name)
        assert [facts.get(fact) for fact in ("tooltip", "default", "min", "max", "step")] == [
            field.help, field.default, field.minimum, field.maximum, field.step]  # fmt: skip
        assert kind == [*field.choices] or not field.choices


def test_a_model_that_cannot_merge_passes_through_and_the_node_says_so(server):
    other, unplaced = ModelPatcher(BaseModel(nn.Sequential(nn.Linear(2, 2)))), transformer()
    unplaced.model.diffusion_model.patch_size = None
    for model, said in ((other, "stepped aside, the model is unchanged: "), (unplaced, "no attention function")):
        passed = apply(model)
        assert passed is not model and not any(passed.wrappers.values())
        assert said in server.texts[-1][1]


@pytest.mark.parametrize("values", [{"strength": 1.5}, {"strength": "much"}, {"start": 0.8, "end": 0.2},
                                    {"settings": {"ratio": 0.5}}])  # fmt: skip
def test_what_a_link_may_bring_stops_no_queue_and_is_named_in_one_line(server, values, caplog):
    with caplog.at_level("INFO"):
        passed = applied(least_checkpoint(), **values)
    (line,) = [record.getMessage() for record in caplog.records]
    assert any(name in line for name in values) and "\n" not in line
    assert server.texts == [("5", line.replace(" #5", ""))] and not any(passed.wrappers.values())


def test_settings_that_do_not_go_together_are_left_out_and_said_once(server):
    (settings,) = ToMeSettings().settings(unique_id="6", proportional=False, refine=2, level=["7", 0])
    ((node, text),) = server.texts
    assert settings == MergeConfig(proportional=False) and node == "6"
    assert "refine=2 may leave groups without tokens" in text and "use one of automatic" in text


def test_inputs_of_another_version_are_named_and_do_no_harm(server, caplog):
    prompt = {"12:5": {"inputs": {"model": ["1", 0], "preset": "fast", "strength": 0.5}, "_meta": {"title": "second"}},
              "6": {"inputs": {"ratio": 0.3, "of_tomorrow": 1}}}  # fmt: skip
    merged = ApplyToMe().apply(least_checkpoint(), unique_id="12:5", prompt=prompt, preset="linked")[0]
    with caplog.at_level("INFO"):
        sample(merged, steps=1)
    line = caplog.records[-1].getMessage()
    assert line.startswith("ToMe #12:5 second: strength 0.5, 1 step, ")
    assert line.endswith("; this version of the node does not know: preset")
    assert ToMeSettings().settings(ratio=0.3, unique_id="6", prompt=prompt) == (MergeConfig(ratio=0.3),)
    assert server.texts[-1] == ("6", "ToMe Settings, not used: this version of the node does not know: of_tomorrow")
