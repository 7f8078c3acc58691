"""Early phases are rules; presets are settings by name; few tokens are left alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import tome_core
from tests.models import BY_NAME, call_case
from tome_core import MergeConfig, MergeRule, preset, strength
from tome_core.engine.decision import decide
from tome_core.patching import handle_on
from tome_core.settings.config import plain_rules, reaches
from tome_core.settings.schedule import LevelRules

CASE = BY_NAME["sd15"]


def merges(tokens, device, **rules):
    """Does any part of a block?"""
    return not decide(LevelRules(**rules), "there is no rule", tokens, device)[1]


def tokens_at(config, timestep, size=16):
    model = CASE.build()
    with tome_core.patch(model, config) as handle:
        call_case(CASE, model, timestep=timestep, height=size, width=size)
    return handle.report().levels[0].tokens


def test_an_early_phase_is_what_two_rules_are():
    one = MergeConfig(side="kv", ratio=0.5, early_ratio=0.9, early_until=600.0)
    for timestep, keys in ((999, 26), (600, 26), (599, 128), (0, 128)):
        assert tokens_at(one, timestep) == ((256, 256, keys),), timestep
    early, late = plain_rules(one, [1])
    assert (early.sx, early.sy, early.min_timestep, late.min_timestep) == (4, 4, 600.0, None)
    assert (early.refine, late.refine) == (2, 0)
    assert [*plain_rules(MergeConfig(rules=(early, late)), [1])] == [early, late]
    early, late = plain_rules(MergeConfig(early_ratio=0.75, merge_mlp=True, merge_crossattn=True), [1])
    assert (early.merge_attn, early.merge_mlp, early.merge_crossattn) == (True, False, False), "self-attention only"
    assert late.merge_mlp and late.merge_crossattn
    nothing = MergeConfig(ratio=0.5, early_ratio=0.0)
    assert not tokens_at(nothing, 900) and tokens_at(nothing, 100)


@pytest.mark.parametrize(("ratio", "side"), [(0.5, 2), (0.75, 2), (0.76, 4), (0.9375, 4), (0.95, 8), (1.0, 8)])
def test_early_cells_are_as_large_as_the_ratio_needs(ratio, side):
    early, _ = plain_rules(MergeConfig(early_ratio=ratio), [1])
    assert (early.sx, early.sy) == (side, side)
    assert early.effective_ratio == min(ratio, 1 - 1 / 64)


def test_an_early_ratio_is_the_finest_levels_alone():
    """Below it early steps are where merging shows: .98 costs .25 % of the v-loss at 800 there, .09 at 50."""
    early, late = plain_rules(MergeConfig(early_ratio=0.9, max_downsample=8), [1, 2, 4])
    assert (early.max_downsample, late.max_downsample) == (None, 8)
    assert len(plain_rules(MergeConfig(early_ratio=0.9, max_downsample=1), [2, 4])) == 1, "it reaches nothing"


def test_the_report_says_which_levels_mlp_merged():
    model, mlp = CASE.build(), MergeRule(ratio=0.25, merge_attn=False, merge_mlp=True, max_downsample=8)
    finest = replace(mlp, ratio=0.0, max_downsample=None)
    with tome_core.patch(model, MergeConfig(rules=(finest, mlp, MergeRule(ratio=0.5)))) as handle:
        call_case(CASE, model, height=32, width=32, timestep=499)
    fine, deep = handle.report().levels[:2]
    tokens = 32 * 32 // deep.downsample**2
    assert (fine.mlp_tokens, deep.mlp_tokens) == ((), ((tokens, tokens * 3 // 4),))
    assert str(handle.report()).count(f"MLP {tokens} tokens -> {tokens * 3 // 4}") == 1


LEVELS = {"SD1.5, SD2": (1, 2, 4, 8), "SDXL": (2, 4)}


@pytest.mark.parametrize("family", LEVELS)
def test_the_page_on_settings_says_where_presets_merge(family):
    text = (Path(__file__).parents[3] / "docs" / "settings.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| {family} |")).split(" | ")[1:]
    rules = [*plain_rules(preset("balanced"), LEVELS[family])]
    assert not any(rule.merge_mlp or rule.merge_crossattn for rule in rules), "self-attention alone"
    for pixels, cell in zip((512, 1024, 2048), row, strict=True):
        sides = {level: pixels // 8 // down for level, down in enumerate(LEVELS[family])}
        found = [
            f"{side}x{side}" for level, side in sides.items()
            if reaches(rules[-1], level, LEVELS[family][level]) and merges(side * side, "cuda", attn=rules[-1])
        ]  # fmt: skip
        assert re.findall(r"\d+x\d+", cell) == found, (family, pixels)


def test_the_mlp_pays_as_attention_does():
    mlp = MergeRule(merge_mlp=True, only_if_it_pays=True)
    assert [merges(tokens, "cuda", mlp=mlp) for tokens in (1024, 4095, 4096)] == [False, False, True]
    assert merges(1024, "cpu", mlp=mlp) and not merges(576, "cpu", mlp=mlp)
    assert merges(4, "cuda", mlp=MergeRule(merge_mlp=True)) and not merges(4096, "cpu")


def test_an_early_ratio_beyond_the_largest_cells_is_clamped_and_told():
    with tome_core.patch(CASE.build(), MergeConfig(early_ratio=1.0)) as handle:
        assert "early_ratio 1 is over the cap 0.984375 and was clamped" in handle.report().notes


def test_every_rule_of_a_config_has_its_own_early_phase():
    """So that the first rule that holds is the one it was, in an early step as well."""
    first, second = MergeRule(ratio=0.25, min_timestep=700), MergeRule(ratio=0.5, side="kv")
    config = MergeConfig(rules=(first, second), early_ratio=0.75, early_until=600.0)
    rules = [*plain_rules(config, [2])]
    assert [rule.ratio for rule in rules] == [0.75, 0.25, 0.75, 0.5] and (rules[1], rules[3]) == (first, second)
    assert [rule.min_timestep for rule in rules] == [700, 700, 600, None]
    assert [rule.side for rule in rules] == ["qkv", "qkv", "kv", "kv"]


def test_flat_settings_make_a_config_or_change_the_one_that_is_asked_for():
    model = CASE.build()
    assert tome_core.patch(model, ratio=0.25, early_ratio=0.5).config == MergeConfig(ratio=0.25, early_ratio=0.5)
    assert tome_core.patch(model, strength=0.3, end_percent=0.5).config == replace(strength(0.3), end_percent=0.5)
    assert tome_core.patch(model, MergeConfig(ratio=0.25), sx=4).config == MergeConfig(ratio=0.25, sx=4)
    with pytest.raises(TypeError, match=r"unknown setting rato; there are: .*ratio.*early_until"):
        tome_core.patch(model, rato=0.5)


def test_presets_leave_few_tokens_alone_and_merge_many():
    config = preset("balanced")
    assert not tokens_at(config, 100) and tokens_at(config, 100, size=32)
    assert [merges(tokens, "cuda", attn=preset("fast").rules[0]) for tokens in (1024, 4096)] == [False, True]
    assert merges(4, "cpu", attn=MergeRule()) and not merges(4096, "cpu")
    with tome_core.patch(CASE.build(), config) as handle:
        call_case(CASE, handle.model)
    assert "would not pay" in str(handle.report())


def test_tomesds_way_in_is_tomesds_way():
    model = tome_core.apply_patch(CASE.build())
    config = handle_on(model).config
    found = [config.value(name) for name in ("metric", "keep", "early_ratio", "only_if_it_pays", "proportional")]
    assert found == ["input", 0.0, None, False, False]
