"""Settings: what is refused and how, what follows from what, and the text every setting carries."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tome_core import MergeConfig, MergeRule, describe_settings
from tome_core.settings.config import notes_on, plain_rules

HUGE = 10**400
WRONG_VALUES = {
    "ratio": (1.5, -0.1, math.nan, math.inf, HUGE), "sx": (0, 65, HUGE), "sy": (-1, 65), "seed": (-1, 2**31, -HUGE),
    "max_downsample": (3, 0, True, "1"), "method": ("kmeans",), "side": ("vq",), "metric": ("cosine",),
    "start_percent": (2,), "max_beta": (1.1,), "refine": (4,), "keep": (2000.0,), "early_ratio": (1.5,),
    "early_until": (-1.0,), "min_timestep": (-5, math.inf, 1e300, HUGE),
}  # fmt: skip
WRONG_TYPES = {"ratio": ("0.5", None, True), "sx": (2.5, math.inf), "sy": ("2",), "seed": (1.0,), "use_rand": (1,),
               "merge_mlp": ("yes",), "proportional": (1,), "refine": (1.0,)}  # fmt: skip


@pytest.mark.parametrize("error, wrong", [(ValueError, WRONG_VALUES), (TypeError, WRONG_TYPES)])
def test_a_bad_value_is_named_with_its_range(error, wrong):
    for setting, values in wrong.items():
        for value in values:
            with pytest.raises(error) as caught:
                MergeConfig(**{setting: value})
            assert str(caught.value).startswith(f"{setting}={value!r} is ") and "; use " in str(caught.value)


def test_an_unknown_setting_is_named_with_those_that_there_are():
    for unknown, is_told in (("strength", True), ("stength", False)):
        with pytest.raises(TypeError, match=f"unknown setting {unknown}; there are: method, ") as caught:
            MergeConfig(**{unknown: 0.5})
        assert ("patch(pipe, strength=0.5)" in str(caught.value)) is is_told


def test_a_limit_itself_is_taken_and_is_further_than_a_user_interface_goes():
    limited = {one["name"]: one for one in describe_settings() if one.get("limit") not in (None, one.get("maximum"))}
    assert set(limited) == {"sx", "sy"}
    for name, setting in limited.items():
        assert setting["maximum"] < setting["limit"]
        assert getattr(MergeRule(**{name: setting["limit"]}), name) == setting["limit"]
    assert MergeRule(min_timestep=1e9).min_timestep == 1e9, "a threshold has no upper limit"


def test_settings_that_contradict_each_other_are_refused():
    for settings in ({"refine": 1, "proportional": False}, {"start_percent": 0.8, "end_percent": 0.2}):
        with pytest.raises(ValueError, match="|".join(settings)):
            MergeConfig(**settings)


def test_flat_settings_beside_rules_are_set_in_each_of_them():
    rules = (MergeRule(ratio=0.75, sx=4), MergeRule(ratio=0.25))
    config = MergeConfig(rules=rules, seed=5, end_percent=0.5)
    assert config.rules == tuple(dataclasses.replace(rule, seed=5) for rule in rules) and config.end_percent == 0.5
    assert dataclasses.replace(MergeConfig(rules=rules, end_percent=0.5), seed=5) == config
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


def test_a_config_is_off_where_nothing_can_merge():
    off, on = MergeRule(ratio=0.0), MergeRule(ratio=0.5)
    for settings, expected in (
        ({"ratio": 0.0}, True), ({"merge_attn": False}, True), ({}, False), ({"ratio": 0.0, "early_ratio": 0.5}, False),
        ({"ratio": 0.0, "early_ratio": 0.0}, True), ({"merge_attn": False, "early_ratio": 0.5}, True),
        ({"rules": (off, on)}, False), ({"rules": (off, off)}, True),
    ):  # fmt: skip
        assert MergeConfig(**settings).is_off is expected, settings


def test_settings_are_frozen_and_compare_by_value():
    config = MergeConfig(ratio=0.25)
    assert config == MergeConfig(rules=(MergeRule(ratio=0.25),)) and hash(config) == hash(MergeConfig(ratio=0.25))
    for frozen in (config, config.rules[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            frozen.ratio = 0.9


def test_the_ratio_in_force_follows_from_method_and_cell():
    for settings, expected in (({"ratio": 0.9}, 0.75), ({"ratio": 0.9, "sx": 4, "sy": 4}, 0.9),
                               ({"ratio": 1.0, "sx": 1, "sy": 1}, 0.0),
                               ({"ratio": 0.9, "method": "cluster"}, 0.9)):  # fmt: skip
        assert MergeRule(**settings).effective_ratio == pytest.approx(expected)


def test_every_setting_says_what_it_does():
    described = {setting["name"]: setting for setting in describe_settings()}
    fields = [field.name for kind in (MergeRule, MergeConfig) for field in dataclasses.fields(kind)]
    assert list(described) == [name for name in fields if name != "rules"]
    for setting in described.values():
        assert setting["label"] and setting["help"]
        if type(setting["default"]) in (int, float):
            assert setting["minimum"] <= setting["default"] <= setting["maximum"] and setting["step"] > 0
        assert setting["default"] in setting.get("choices", [setting["default"]])


def test_what_is_clamped_and_that_nothing_will_merge_is_noted():
    for settings, ever_merges, start in (
        ({"ratio": 1.0}, True, "ratio 1 is over the cap 0.75 of cells 2x2 and was clamped"),
        ({"early_ratio": 1.0}, True, "early_ratio 1 is over the cap 0.984375 and was clamped"),
        ({"max_downsample": 1}, False, "nothing will merge: no rule reaches a level of this model, whose attention is "
                                       "at /2, /4"),
    ):  # fmt: skip
        (note,) = notes_on(MergeConfig(**settings), ever_merges, [2, 4])
        assert note.startswith(start)
    assert notes_on(MergeConfig(ratio=0.75), True, [1]) == notes_on(MergeConfig(ratio=0.0), False, [1]) == ()


# --- early phases are rules -------------------------------------------------------------------------------------------


def test_an_early_phase_is_a_rule_of_self_attention_before_the_late_one():
    config = MergeConfig(side="kv", ratio=0.5, early_ratio=0.9, early_until=600.0, merge_mlp=True, merge_crossattn=True)
    early, late = plain_rules(config, [1])
    assert (early.sx, early.sy, early.min_timestep, early.refine) == (4, 4, 600.0, 2)
    assert (late.sx, late.sy, late.min_timestep, late.refine) == (2, 2, None, 0)
    assert (early.merge_attn, early.merge_mlp, early.merge_crossattn) == (True, False, False)
    assert late.merge_mlp and late.merge_crossattn
    assert [*plain_rules(MergeConfig(rules=(early, late)), [1])] == [early, late]
    assert plain_rules(config, [1]) == {early: late, late: None}


def test_early_cells_are_as_large_as_the_ratio_needs():
    for ratio, side in ((0.5, 2), (0.75, 2), (0.76, 4), (0.9375, 4), (0.95, 8), (1.0, 8)):
        early, _ = plain_rules(MergeConfig(early_ratio=ratio), [1])
        assert (early.sx, early.sy) == (side, side)
        assert early.effective_ratio == min(ratio, 1 - 1 / 64)


def test_an_early_ratio_is_the_finest_levels_alone():
    """Below it early steps are where merging shows: .98 costs .25 % of the v-loss at 800 there, .09 at 50."""
    early, late = plain_rules(MergeConfig(early_ratio=0.9, max_downsample=8), [1, 2, 4])
    assert (early.max_downsample, late.max_downsample) == (None, 8)
    assert len(plain_rules(MergeConfig(early_ratio=0.9, max_downsample=1), [2, 4])) == 1, "it reaches nothing"


def test_every_rule_of_a_config_has_its_own_early_phase():
    """So that the first rule that holds is the one it was, in an early step as well."""
    first, second = MergeRule(ratio=0.25, min_timestep=700), MergeRule(ratio=0.5, side="kv")
    config = MergeConfig(rules=(first, second), early_ratio=0.75, early_until=600.0)
    rules = [*plain_rules(config, [2])]
    assert [rule.ratio for rule in rules] == [0.75, 0.25, 0.75, 0.5] and (rules[1], rules[3]) == (first, second)
    assert [rule.min_timestep for rule in rules] == [700, 700, 600, None]
    assert [rule.side for rule in rules] == ["qkv", "qkv", "kv", "kv"]
