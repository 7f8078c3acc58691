"""Early phases, deep MLPs and ramps are rules; presets are settings by name; few tokens are left alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import tome_core
from tests.models import BY_NAME, call_case
from tome_core import MergeConfig, MergeRule, preset, ramp, strength
from tome_core.engine.size_gate import pays, pays_in_mlp
from tome_core.patching.handle import handle_on
from tome_core.settings.phases import DEEP_UNTIL, plain_rules
from tome_core.settings.schedule import reaches

CASE = BY_NAME["sd15"]


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
    assert plain_rules(MergeConfig(rules=(early, late)), [1]) == (early, late)
    early, late = plain_rules(MergeConfig(early_ratio=0.75, merge_mlp=True, merge_crossattn=True), [1])
    assert (early.merge_attn, early.merge_mlp, early.merge_crossattn) == (True, False, False), "self-attention only"
    assert late.merge_mlp and late.merge_crossattn
    assert len(plain_rules(MergeConfig(early_ratio=0.75, max_timestep=400.0), [1])) == 1, "it ends before the phase"
    nothing = MergeConfig(ratio=0.5, early_ratio=0.0)
    assert not tokens_at(nothing, 900) and tokens_at(nothing, 100)


@pytest.mark.parametrize(("ratio", "side"), [(0.5, 2), (0.75, 2), (0.76, 4), (0.9375, 4), (0.95, 8), (1.0, 8)])
def test_early_cells_are_as_large_as_the_ratio_needs(ratio, side):
    early = plain_rules(MergeConfig(early_ratio=ratio), [1])[0]
    assert (early.sx, early.sy) == (side, side)
    assert early.effective_ratio == min(ratio, 1 - 1 / 64)


def test_a_deep_mlp_merges_where_the_latent_is_halved_after_the_early_phase():
    """And nowhere else: the finest level costs seventy times as much, and early steps decide what is drawn."""
    model = CASE.build()
    for max_downsample, merged in {None: [], 1: [], 2: [2], 8: [2, 4]}.items():
        for timestep, here in ((999, []), (500, []), (499, merged), (0, merged)):
            with tome_core.patch(model, ratio=0.0, deep_mlp=0.5, max_downsample=max_downsample) as handle:
                call_case(CASE, model, timestep=timestep, height=32, width=32)
            found = {level.downsample: level.calls_merged for level in handle.report().levels}
            assert [down for down, calls in found.items() if calls] == [d for d in here if d in found], found


def test_a_deep_mlp_keeps_the_limits_of_its_rule():
    for limits, ends in (({}, True), ({"max_timestep": 200.0}, 200.0), ({"min_timestep": 500.0}, None)):
        rules = plain_rules(MergeConfig(deep_mlp=0.5, **limits), [2])
        assert len(rules) == (1 if ends is None else 2)
        assert ends in (None, True) or rules[0].max_timestep == ends
    for until in (0.0, 125.0, 900.0):
        deep = plain_rules(MergeConfig(deep_mlp=0.5, early_ratio=0.75, early_until=until), [2])[0]
        assert deep.merge_mlp and DEEP_UNTIL - 1 < deep.max_timestep < DEEP_UNTIL, "whatever is early for attention"


def test_an_early_ratio_is_the_finest_levels_alone():
    """Below it early steps are where merging shows: .98 costs .25 % of the v-loss at 800 there, .09 at 50."""
    early, late = plain_rules(MergeConfig(early_ratio=0.9, max_downsample=8), [1, 2, 4])
    assert early.levels == (0,) and late.max_downsample == 8
    early, late = plain_rules(MergeConfig(early_ratio=0.9, levels=(1, 2)), [1, 2, 4])
    assert early.levels == (1,) and late.levels == (1, 2)
    assert len(plain_rules(MergeConfig(early_ratio=0.9, levels=(5,)), [1, 2, 4])) == 1


def test_the_report_says_which_levels_mlp_merged():
    model, config = CASE.build(), MergeConfig(ratio=0.5, deep_mlp=0.25, max_downsample=8)
    with tome_core.patch(model, config) as handle:
        call_case(CASE, model, height=32, width=32, timestep=499)
    fine, deep = handle.report().levels[:2]
    tokens = 32 * 32 // deep.downsample**2
    assert (fine.mlp_tokens, deep.mlp_tokens) == ((), ((tokens, tokens * 3 // 4),))
    assert str(handle.report()).count(f"MLP {tokens} tokens -> {tokens * 3 // 4}") == 1


def test_a_deep_mlp_leaves_the_rest_of_its_rule_as_it_is():
    config = MergeConfig(side="kv", ratio=0.9, sx=4, sy=4, refine=1, query_ratio=0.25, deep_mlp=0.5, early_ratio=0.95,
                         max_downsample=4)  # fmt: skip
    deep, *others = plain_rules(config, [1, 2, 4, 8])
    assert (deep.levels, deep.max_downsample, deep.ratio) == ((1, 2), None, 0.5)
    assert deep.merge_mlp and not deep.merge_attn
    assert others == list(plain_rules(replace(config, deep_mlp=0.0), [1, 2, 4, 8]))
    assert plain_rules(config, [1])[0].merge_attn, "nothing is deep there"


LEVELS = {"SD1.5, SD2": (1, 2, 4, 8), "SDXL": (2, 4)}


@pytest.mark.parametrize("family", LEVELS)
def test_the_page_on_settings_says_where_presets_merge(family):
    text = (Path(__file__).parents[3] / "docs" / "settings.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| {family} |")).split(" | ")[1:]
    rules = plain_rules(preset("balanced"), LEVELS[family])
    assert not any(rule.merge_mlp or rule.merge_crossattn for rule in rules), "self-attention alone"
    for pixels, cell in zip((512, 1024, 2048), row, strict=True):
        sides = {level: pixels // 8 // down for level, down in enumerate(LEVELS[family])}
        merges = [
            f"{side}x{side}" for level, side in sides.items()
            if reaches(rules[-1], level, LEVELS[family][level]) and pays(rules[-1], side * side, "cuda")
        ]  # fmt: skip
        assert re.findall(r"\d+x\d+", cell) == merges, (family, pixels)


def test_the_mlp_pays_by_its_work():
    deep = plain_rules(replace(preset("balanced"), deep_mlp=0.5, max_downsample=8), [1, 2])[0]
    sizes = ((1024, 1280), (4096, 640), (1024, 640), (4096, 320))
    assert [pays_in_mlp(deep, *size, "cuda") for size in sizes] == [True, True, False, False]
    assert pays_in_mlp(deep, 1024, 640, "cpu") and not pays_in_mlp(deep, 576, 1280, "cpu")
    assert pays_in_mlp(MergeRule(merge_mlp=True), 4, 4, "cuda") and not pays_in_mlp(None, 4096, 640, "cpu")


def test_a_ramp_goes_from_one_ratio_to_the_other():
    rules = ramp(MergeRule(ratio=0.25, side="kv"), 0.75, bands=3)
    assert [rule.ratio for rule in rules] == [0.75, 0.5, 0.25]
    for timestep, ratio in ((999, 0.75), (670, 0.75), (660, 0.5), (340, 0.5), (330, 0.25), (0, 0.25)):
        assert tokens_at(MergeConfig(rules=rules), timestep) == ((256, 256, 256 - int(256 * ratio)),), timestep


@pytest.mark.parametrize(("settings", "bands", "why"), [
    ({}, 1, "bands=1 is no ramp"), ({"min_timestep": 500}, 4, "limited in time already"),
    ({"method": "downsample"}, 4, "method='downsample' has no ratio to ramp"),
])  # fmt: skip
def test_what_is_no_ramp_is_refused(settings, bands, why):
    with pytest.raises(ValueError, match=why):
        ramp(MergeRule(**settings), 0.5, bands)


def test_an_early_ratio_beyond_the_largest_cells_is_clamped_and_told():
    with tome_core.patch(CASE.build(), MergeConfig(early_ratio=1.0)) as handle:
        assert "early_ratio 1 is over the cap 0.984375 and was clamped" in handle.report().notes


def test_every_rule_of_a_config_has_its_own_early_phase_and_deep_mlp():
    """So that the first rule that holds is the one it was, in an early step as well."""
    first, second = MergeRule(ratio=0.25, min_timestep=700), MergeRule(ratio=0.5, side="kv")
    config = MergeConfig(rules=(first, second), early_ratio=0.75, early_until=600.0, deep_mlp=0.5)
    rules = plain_rules(config, [2])
    assert [rule.ratio for rule in rules] == [0.75, 0.25, 0.5, 0.75, 0.5] and (rules[1], rules[4]) == (first, second)
    assert [rule.min_timestep for rule in rules] == [700, 700, None, 600, None]
    assert [rule.effective_side for rule in rules] == ["qkv", "qkv", "qkv", "kv", "kv"]


def test_flat_settings_make_a_config_or_change_the_one_that_is_asked_for():
    model = CASE.build()
    assert tome_core.patch(model, ratio=0.25, early_ratio=0.5).config == MergeConfig(ratio=0.25, early_ratio=0.5)
    assert tome_core.patch(model, strength=0.3, end_percent=0.5).config == replace(strength(0.3), end_percent=0.5)
    assert tome_core.patch(model, MergeConfig(ratio=0.25), sx=4).config == MergeConfig(ratio=0.25, sx=4)
    with pytest.raises(TypeError, match=r"unknown setting rato; there are: .*ratio.*deep_mlp"):
        tome_core.patch(model, rato=0.5)


def test_presets_leave_few_tokens_alone_and_merge_many():
    config = preset("balanced")
    assert not tokens_at(config, 100) and tokens_at(config, 100, size=32)
    assert [pays(preset("fast").rules[0], tokens, "cuda") for tokens in (1024, 4096)] == [False, True]
    assert pays(MergeRule(), 4, "cpu") and not pays(None, 4096, "cpu")
    with tome_core.patch(CASE.build(), config) as handle:
        call_case(CASE, handle.model)
    assert "would not pay" in str(handle.report())


def test_tomesds_way_in_is_tomesds_way():
    model = tome_core.apply_patch(CASE.build())
    config = handle_on(model).config
    found = [config.value(name) for name in ("metric", "keep", "early_ratio", "only_if_it_pays", "proportional")]
    assert found == ["input", 0.0, None, False, False]
