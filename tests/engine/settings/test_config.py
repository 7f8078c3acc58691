"""Settings: which are refused, with which words, which follow from others, and how an early phase becomes a rule."""

import dataclasses
import math

import pytest

from tome_core import MergeConfig, MergeRule
from tome_core.settings.rules import notes_on, plain_rules

HUGE = 10**400


@pytest.mark.parametrize("error, wrong", [
    (ValueError, {"ratio": (1.5, -0.1, math.nan, math.inf, HUGE), "sx": (0, 65, HUGE), "seed": (-1, 2**31),
                  "max_downsample": (3, True, "1"), "side": ("vq",), "early_ratio": (1.5,),
                  "min_timestep": (-5, math.inf, 1e300, HUGE)}),
    (TypeError, {"ratio": ("0.5", None, True), "sx": (2.5, math.inf), "refine": (1.0,), "merge_mlp": ("yes", 1)}),
])  # fmt: skip
def test_a_bad_value_is_named_with_its_range(error, wrong):
    for setting, values in wrong.items():
        for value in values:
            with pytest.raises(error) as caught:
                MergeConfig(**{setting: value})
            assert str(caught.value).startswith(f"{setting}={value!r} is ") and "; use " in str(caught.value)


def test_an_unknown_setting_is_named_with_those_that_there_are():
    for unknown, is_told in (("strength", True), ("stength", False)):
        with pytest.raises(TypeError, match=f"unknown setting {unknown}; there are: method, .*early_until") as caught:
            MergeConfig(**{unknown: 0.5})
        assert ("patch(pipe, strength=0.5)" in str(caught.value)) is is_told


def test_flat_settings_beside_rules_are_set_in_each_of_them():
    rules = (MergeRule(ratio=0.75, sx=4), MergeRule(ratio=0.25))
    config = MergeConfig(rules=rules, seed=5, end_percent=0.5)
    assert config.rules == tuple(dataclasses.replace(rule, seed=5) for rule in rules) and config.end_percent == 0.5
    assert dataclasses.replace(MergeConfig(rules=rules, end_percent=0.5), seed=5) == config
    for wrong in (({"ratio": 0.5},), [MergeRule(), 1], MergeRule(), iter([MergeRule()])):
        with pytest.raises(TypeError, match=r"rules .*MergeRule"):
            MergeConfig(rules=wrong)
    with pytest.raises(ValueError, match=r"rules=\(\) merges nothing; give one rule or more"):
        MergeConfig(rules=())


def test_a_config_is_off_where_nothing_can_merge():
    for settings in ({"ratio": 0.0}, {"merge_attn": False}, {"ratio": 0.0, "early_ratio": 0.0},
                     {"merge_attn": False, "early_ratio": 0.5}, {"rules": (MergeRule(ratio=0.0),) * 2}):  # fmt: skip
        assert MergeConfig(**settings).is_off
    for settings in ({}, {"ratio": 0.0, "early_ratio": 0.5}, {"rules": (MergeRule(ratio=0.0), MergeRule())}):
        assert not MergeConfig(**settings).is_off


def test_the_ratio_in_force_follows_from_method_and_cell():
    for settings, expected in (({"ratio": 0.9}, 0.75), ({"ratio": 0.9, "sx": 4, "sy": 4}, 0.9),
                               ({"sx": 1, "sy": 1}, 0.0), ({"ratio": 0.9, "method": "cluster"}, 0.9)):  # fmt: skip
        assert MergeRule(**settings).effective_ratio == pytest.approx(expected)


def test_what_is_clamped_and_that_nothing_will_merge_is_noted():
    for settings, ever_merges, note in (
        ({"ratio": 1.0}, True, "ratio 1 is more than its cells allow and became 0.75: 2x2 tokens"),
        ({"early_ratio": 1.0}, True, "early_ratio 1 is more than its cells allow and became 0.984375"),
        ({"max_downsample": 1}, False, "nothing will merge: no rule reaches a level of this model")):  # fmt: skip
        assert [text[: len(note)] for text in notes_on(MergeConfig(**settings), ever_merges, [2, 4])] == [note]
    assert notes_on(MergeConfig(ratio=0.75), True, [1]) == notes_on(MergeConfig(ratio=0.0), False, [1]) == ()


def test_an_early_phase_is_a_rule_of_self_attention_in_the_finest_level_before_the_late_one():
    """Below the finest level merging shows in early steps: a ratio of .98 costs 0.25% of the v-loss at 800 there."""
    more = {"merge_mlp": True, "merge_crossattn": True, "max_downsample": 8}
    config = MergeConfig(ratio=0.5, early_ratio=0.9, early_until=600.0, **more)
    late = MergeRule(ratio=0.5, **more)
    early = MergeRule(ratio=0.9, sx=4, sy=4, min_timestep=600.0, refine=2)
    assert plain_rules(config, [1, 2, 4]) == {early: late, late: None}
    assert len(plain_rules(MergeConfig(early_ratio=0.9, max_downsample=1), [2, 4])) == 1, "it reaches nothing"


def test_early_cells_are_as_large_as_the_ratio_needs():
    for ratio, side in ((0.5, 2), (0.75, 2), (0.76, 4), (0.9375, 4), (0.95, 8), (1.0, 8)):
        early, _ = plain_rules(MergeConfig(early_ratio=ratio), [1])
        assert (early.sx, early.sy, early.effective_ratio) == (side, side, min(ratio, 1 - 1 / 64))
