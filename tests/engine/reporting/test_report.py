"""The report: lines for people, the gain first; JSON for programs; one of several passes."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

import tome_core
from tests.small_models.families import MODELS
from tome_core import MergeConfig, Report
from tome_core.reporting.ledger import FEW_TOKENS, HARMLESS, LevelTally
from tome_core.reporting.report import percent

CASE = MODELS["ldm_sd1"]
KV = {"side": "kv", "ratio": 0.5, "correction": False}
OWN = "1.4x faster in your pictures (3 with merging, 3 without)"
EARLY = MergeConfig(early_ratio=0.9, early_until=600.0, max_downsample=8, **KV)


@cache
def model():
    return CASE.build()


@cache
def reported(config: MergeConfig, *timesteps: float) -> Report:
    with tome_core.patch(model(), config) as handle:
        for timestep in timesteps:
            CASE.call(model(), timestep=timestep)
    return handle.report()


def level(downsample: int = 1, left: int = 25, **counts) -> LevelTally:
    merged = Counter({("attn", 256, 256, 64): 3})
    return LevelTally(downsample, 3, merged, work_full=100, work_left=left, **counts)


def of_levels(*levels: LevelTally, **facts) -> Report:
    return Report(True, levels=levels, **facts)


def test_the_first_line_is_the_work_that_was_left_out_and_the_gain_then_levels():
    both = reported(EARLY, 900, 100)
    less = f"{percent(both.work_saved)} less work"
    assert str(both).splitlines()[0] == f"Token merging: 2 model calls, {less}"
    assert "faster" not in str(both) + both.headline, "of time it says nothing by itself"
    known = replace(Report.join([both]), own=OWN)
    first, second, *_ = str(known).splitlines()
    assert first == f"Token merging: 2 model calls, {less}, {OWN}" and known.headline == f"{less}, {OWN}"
    there = percent(both.levels[0].work_saved)
    assert second == f"  latent /1: 256 tokens in 26 or 128 groups, {there} less work in these blocks"
    assert of_levels(LevelTally(1, 3), own=OWN).headline.startswith("nothing merged")
    assert Report.join([known]).headline == less, "of several passes no gain is known"


def test_reasons_are_told_the_one_that_cost_most_attention_first_and_the_part_if_it_is_not_self_attention():
    skipped = Counter({"attn: many": 9, "attn: large": 1, "mlp: never": 99})
    lost = Counter({"attn: many": 9, "attn: large": 90})
    fine = LevelTally(1, 3, skipped=skipped, skipped_work=lost, work_full=100, work_left=100)
    coarse = LevelTally(2, 3, traced={"autocast"}, level=1)
    report = of_levels(fine, coarse)
    first, *rest = report.lines()
    assert first.endswith("nothing merged: large") and report.headline == "nothing merged: large"
    assert [line.strip() for line in rest] == ["not merged, 9 calls: many", "not merged, 99 calls: mlp: never",
                                               "compiled without merging, autocast"]  # fmt: skip
    assert report.as_data()["levels"][0]["skipped_work"] == {"attn: many": 0.09, "attn: large": 0.9}
    assert of_levels(coarse).headline == "nothing merged: autocast"


def test_what_hindered_merging_is_told_if_it_counts_and_nobody_asked_for_it():
    mask = "an attention mask is on"
    for why, lost, sentence in ((mask, 20, f"20% of the work could not merge: {mask}"), (mask, 2, ""),
                                *((harmless, 50, "") for harmless in HARMLESS)):  # fmt: skip
        of_why = {"skipped": Counter({f"attn: {why}": 1}), "skipped_work": Counter({f"attn: {why}": lost})}
        assert of_levels(level(left=60, **of_why)).hindered == sentence
    assert [percent(share) for share in (0.0, 0.614, 0.999, 1.0)] == ["0%", "61%", "99%", "100%"]


def test_what_cost_most_work_is_told_first_and_the_third_reason_not():
    why, mask = "a hook on ff may need every token; it merges without that", "an attention mask is on"
    merged = Counter({("block", 256, 64, 0): 6, ("attn", 256, 64, 64): 6})
    skipped = Counter({f"block: {why}": 18, f"block: {FEW_TOKENS}": 6, f"attn: {mask}": 1})
    lost = Counter({f"attn: {mask}": 20, f"block: {why}": 30, "attn: third": 9})
    report = of_levels(LevelTally(4, 3, merged, skipped, lost, work_full=100, work_left=50))
    assert report.hindered == f"30% of the work could not merge: {why}; 20% of the work could not merge: {mask}"
    assert [line for line in report.lines() if "not merged" in line] == [
        f"  not merged, 18 whole blocks: {why}", f"  not merged, 1 call: {mask}",
        f"  not merged, 6 whole blocks: {FEW_TOKENS}"]  # fmt: skip
    nothing = of_levels(LevelTally(4, 3, skipped=Counter({"attn: its rule merges other parts": 9, f"block: {why}": 1})))
    assert nothing.headline == f"nothing merged: {why}", "and not what is as asked"


def test_the_json_form_is_json_and_has_every_count():
    report = reported(EARLY, 900, 100)
    data = report.as_data()
    assert json.loads(json.dumps(data)) == data and data["format"] == 4
    assert data["work_saved"] == report.work_saved and data["calls"] == 2
    assert data["levels"][0]["merged"] == [{"part": "attn", "tokens": 256, "queries": 256, "keys": keys,
                                            "calls": report.levels[0].blocks} for keys in (26, 128)]  # fmt: skip


def test_the_share_is_of_all_work_levels_that_no_rule_reaches_layers_outside_blocks_and_corrections_included():
    fine, both, exact = (reported(MergeConfig(**KV | more), 900) for more in (
        {"max_downsample": 1}, {"max_downsample": 8}, {"max_downsample": 8, "correction": True}))  # fmt: skip
    assert not fine.reasons and fine.levels[1].work_saved == 0 and fine.work[0] == both.work[0]
    assert fine.levels[0].work_saved == both.levels[0].work_saved > fine.work_saved
    assert exact.levels[0].work_saved < both.levels[0].work_saved
    assert of_levels(level(1, left=0), level(2, left=100)).work_saved == 0.5 and Report(True).work_saved is None
    assert of_levels(level(1, left=0), rest=100).work_saved == 0.5 and of_levels(level(left=120)).work_saved == 0


def test_a_level_counts_the_work_of_early_and_late_steps_and_of_those_left_whole():
    early, late, both = (reported(EARLY, *times).levels[0] for times in ((900,), (100,), (900, 100)))
    assert early.work_saved > late.work_saved > 0 and early.work_full == late.work_full
    assert both.work_saved == pytest.approx((early.work_saved + late.work_saved) / 2)
    assert both.calls_merged == 2 * both.blocks and both.tokens == ((256, 256, 128), (256, 256, 26))
    whole = reported(MergeConfig(start_percent=0.3, **KV), 900, 100).levels[0]
    assert whole.work_full == 2 * late.work_full and whole.work_saved == pytest.approx(late.work_saved / 2)


def test_the_mlps_tokens_are_said():
    report = reported(MergeConfig(ratio=0.25, merge_attn=False, merge_mlp=True), 900)
    assert report.levels[0].mlp_tokens == ((256, 192),) and report.levels[1].mlp_tokens == ()
    assert str(report).count("MLP on 192 of 256 tokens") == 1


@pytest.mark.parametrize("kinds, text", [
    ([(4096, 640), (4096, 64)], "4,096 tokens in 64 or 640 groups"),
    ([(256, 1)], "256 tokens in 1 group"),
    ([(9216, 144), (4096, 64)], "9,216 tokens in 144 groups; 4,096 tokens in 64 groups"),
    ([(1000 * number, 10 * number) for number in range(1, 6)], "1,000 to 5,000 tokens in 10 to 50 groups")])
def test_many_sizes_are_told_as_a_range(kinds, text):
    merged = Counter({("attn", tokens, tokens, left): 1 for tokens, left in kinds})
    assert f"latent /1: {text}, 75% less work" in str(of_levels(replace(level(), merged=merged)))


def test_merged_parts_without_keys_are_told_by_their_calls():
    parts = LevelTally(1, 1, Counter({("crossattn", 256, 64, 77): 2}), work_full=100, work_left=100)
    assert "latent /1: 2 calls merged" in str(of_levels(parts))


def test_reports_of_passes_are_one_with_levels_by_their_down_sampling():
    """The passes are those of a hires fix, or of a refiner with another finest level."""
    first, second, other = (of_levels(level(*facts), calls=1) for facts in ((1, 25), (1, 75), (2, 50)))
    both = Report.join([first, second, other])
    assert both.calls == 3 and both.work_saved == pytest.approx(1 - (25 + 75 + 50) / 300)
    assert [(merged.level, merged.downsample, merged.calls_merged) for merged in both.levels] == [(0, 1, 6), (1, 2, 3)]
    assert Report.join([]) == Report(False) and Report.join([first]).as_data() == first.as_data()


def test_hints_are_the_notes_that_the_headline_does_not_tell():
    notes = ("ratio 0.9 is more than its cells allow", "nothing will merge: no rule reaches a level")
    report = Report(True, notes=notes)
    assert report.hints == notes[:1] and report.headline == "nothing merged: no rule reaches a level"
