"""Settings: what is refused and how, what follows from what, and the text every setting carries."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest

import tome_core
from tome_core import MergeConfig, MergeRule, describe_settings


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        ("ratio", 1.5, ValueError), ("ratio", -0.1, ValueError), ("ratio", math.nan, ValueError),
        ("ratio", math.inf, ValueError), ("ratio", "0.5", TypeError), ("ratio", None, TypeError),
        ("ratio", True, TypeError),
        ("sx", 0, ValueError), ("sx", 2.5, TypeError), ("sy", -1, ValueError), ("sy", "2", TypeError),
        ("sx", 100000, ValueError), ("sx", 10**400, ValueError), ("sy", 65, ValueError), ("sx", math.inf, TypeError),
        ("max_downsample", 3, ValueError), ("max_downsample", 0, ValueError), ("max_downsample", True, ValueError),
        ("max_downsample", "1", ValueError), ("method", "kmeans", ValueError), ("side", "vq", ValueError),
        ("seed", -1, ValueError), ("seed", 2**31, ValueError), ("seed", 1.0, TypeError), ("use_rand", 1, TypeError),
        ("merge_mlp", "yes", TypeError),
        ("start_percent", 2, ValueError), ("min_timestep", -5, ValueError), ("max_beta", 1.1, ValueError),
        ("proportional", 1, TypeError), ("refine", 4, ValueError),
        ("refine", 1.0, TypeError), ("min_timestep", math.inf, ValueError), ("min_timestep", 1e300, ValueError),
        ("early_ratio", 1.5, ValueError), ("early_until", -1.0, ValueError),
        ("keep", 2000.0, ValueError), ("metric", "cosine", ValueError), ("ratio", 10**400, ValueError),
        ("seed", -(10**400), ValueError), ("min_timestep", 10**400, ValueError),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_its_range(setting, value, error):
    with pytest.raises(error) as caught:
        MergeConfig(**{setting: value})
    text = str(caught.value)
    assert setting in text and repr(value) in text
    assert "use" in text


def test_a_strength_that_is_given_for_a_setting_is_told_where_it_goes():
    for unknown, told in (("strength", True), ("stength", False)):
        with pytest.raises(TypeError, match=f"unknown setting {unknown}; there are: method, ") as caught:
            MergeConfig(**{unknown: 0.5})
        assert ("patch(pipe, strength=0.5)" in str(caught.value)) is told


def test_a_limit_itself_is_taken_and_is_further_than_a_user_interface_goes():
    limited = {one["name"]: one for one in describe_settings() if one.get("limit") not in (None, one.get("maximum"))}
    assert set(limited) == {"sx", "sy"}
    for name, setting in limited.items():
        assert setting["maximum"] < setting["limit"]
        assert getattr(MergeRule(**{name: setting["limit"]}), name) == setting["limit"]


def test_a_threshold_has_no_upper_limit():
    assert MergeRule(min_timestep=1e9).min_timestep == 1e9


@pytest.mark.parametrize("settings", [
    {"refine": 1, "proportional": False},
    {"start_percent": 0.8, "end_percent": 0.2},
])  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(settings):
    with pytest.raises(ValueError, match="|".join(settings)):
        MergeConfig(**settings)


def test_flat_settings_beside_rules_are_set_in_each_of_them():
    rules = (MergeRule(ratio=0.75, sx=4), MergeRule(ratio=0.25))
    made = MergeConfig(rules=rules, seed=5, end_percent=0.5)
    assert made.rules == tuple(dataclasses.replace(rule, seed=5) for rule in rules) and made.end_percent == 0.5
    assert dataclasses.replace(MergeConfig(rules=rules, end_percent=0.5), seed=5) == made
    for wrong in (({"ratio": 0.5},), (MergeConfig(),), [MergeRule(), 1], MergeRule(), 5, iter([MergeRule()])):
        with pytest.raises(TypeError, match=r"rules .*MergeRule"):
            MergeConfig(rules=wrong)
    with pytest.raises(ValueError, match=r"rules=\(\) merges nothing; give one rule or more"):
        MergeConfig(rules=())


def test_a_settings_value_is_the_configs_or_its_first_rules():
    config = MergeConfig(rules=(MergeRule(ratio=0.75), MergeRule()), early_ratio=0.9)
    assert (config.value("ratio"), config.value("early_ratio")) == (0.75, 0.9)
    with pytest.raises(AttributeError):
        config.value("rato")


@pytest.mark.parametrize(("settings", "off"), [
    ({"ratio": 0.0}, True), ({"merge_attn": False}, True), ({}, False),
    ({"ratio": 0.0, "early_ratio": 0.5}, False), ({"ratio": 0.0, "early_ratio": 0.0}, True),
    ({"merge_attn": False, "early_ratio": 0.5}, True),
    ({"rules": (MergeRule(ratio=0.0), MergeRule(ratio=0.5))}, False), ({"rules": (MergeRule(ratio=0.0),) * 2}, True),
])  # fmt: skip
def test_a_config_is_off_where_nothing_can_merge(settings, off):
    assert MergeConfig(**settings).is_off is off


def test_what_can_be_set_beside_tomesds_is_sixteen_fields_at_most():
    """Who adds one takes one out. What two settings say, or rules, is no third one."""
    tomesds = set(inspect.signature(tome_core.apply_patch).parameters) - {"model"}
    names = [field.name for kind in (MergeRule, MergeConfig) for field in dataclasses.fields(kind)]
    assert len(tomesds) == 9 and tomesds <= set(names) and len(set(names)) == len(names)
    assert len(set(names) - tomesds) <= 16


def test_limits_of_a_rule_are_on_one_scale_of_time():
    assert {field.name for field in dataclasses.fields(MergeConfig)} == {
        "rules", "start_percent", "end_percent", "max_beta", "early_ratio", "early_until",
    }  # fmt: skip
    with pytest.raises(TypeError, match="end_percent"):
        MergeRule(end_percent=0.5)


def test_settings_are_frozen_and_compare_by_value():
    config = MergeConfig(ratio=0.25)
    assert config == MergeConfig(rules=(MergeRule(ratio=0.25),)) and hash(config) == hash(MergeConfig(ratio=0.25))
    for frozen in (config, config.rules[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            frozen.ratio = 0.9


@pytest.mark.parametrize(("settings", "expected"), [
    ({"ratio": 0.9}, 0.75), ({"ratio": 0.9, "sx": 4, "sy": 4}, 0.9), ({"ratio": 1.0, "sx": 1, "sy": 1}, 0.0),
    ({"ratio": 0.9, "method": "cluster"}, 0.9),
])  # fmt: skip
def test_the_ratio_in_force_follows_from_method_and_cell(settings, expected):
    assert MergeRule(**settings).effective_ratio == pytest.approx(expected)


def test_every_setting_says_what_it_does():
    described = {setting["name"]: setting for setting in describe_settings()}
    of_a_config = [field.name for field in dataclasses.fields(MergeConfig)]
    assert list(described) == [field.name for field in dataclasses.fields(MergeRule)] + of_a_config[1:]
    for setting in described.values():
        assert setting["label"] and len(setting["help"]) > 20
        if type(setting["default"]) in (int, float):
            assert setting["minimum"] <= setting["default"] <= setting["maximum"] and setting["step"] > 0
        if "choices" in setting:
            assert setting["default"] in setting["choices"]
