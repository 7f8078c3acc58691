"""The report: lines for people, the gain first; JSON for programs; one of several passes."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

import tome_core
from tests.models import BY_NAME, call_case
from tome_core import Gain, MergeConfig, MergeRule, Report
from tome_core.reporting.ledger import LevelTally
from tome_core.reporting.report import percent

CASE = BY_NAME["ldm_sd1"]
EARLY = MergeConfig(side="kv", ratio=0.5, early_ratio=0.9, early_until=600.0, max_downsample=8,
                    correction=False)


def reported(config: MergeConfig, *timesteps: float, side: int = 16) -> Report:
    model = CASE.build()
    with tome_core.patch(model, config) as handle:
        for timestep in timesteps:
            call_case(CASE, model, timestep=timestep, height=side, width=side)
    return handle.report()


def gain(ratio: float, side: int = 64, saved: float = 0.75) -> Gain:
    return Gain("model", "rules", "attention", "torch", "ours", "cpu", "float32", side, side, 2, ratio, 1.0, saved)


def level(downsample: int = 1, left: int = 25) -> LevelTally:
    return LevelTally(downsample, 3, Counter({("attn", 256, 256, 64): 3}), work_full=100, work_left=left)


@pytest.mark.slow
def test_the_first_line_is_the_gain_the_second_what_was_left_out_then_levels():
    measured = Report.join([reported(EARLY, 900, 100), Report(True, gains=(gain(1.42, saved=0.6),))])
    first, second, *rest = str(measured).splitlines()
    assert first == "Token merging: 2 model calls, about 1.4x faster (measured here)"
    assert second.startswith(f"  {percent(measured.work_saved)} of attention left out, at latent /1")
    (fine,) = [line for line in rest if line.startswith("  latent /1")]
    assert fine == "  latent /1: 256 tokens -> 128 keys or 26 keys, 70% left out"
    assert measured.headline == "about 1.4x faster (measured here)"


def test_unmeasured_it_begins_with_what_was_left_out_and_says_nothing_of_time():
    found = reported(EARLY, 900)
    first, *_ = str(found).splitlines()
    assert first == f"Token merging: 1 model call, {percent(found.work_saved)} of attention left out"
    assert "faster" not in str(found) + found.headline


def test_why_not_is_told_without_the_part_unless_it_is_not_self_attention():
    skipped = Counter({"attn: why": 3, "block: why not": 2, "mlp: never": 1})
    fine = LevelTally(1, 3, skipped=skipped, work_full=100, work_left=100, traced={"autocast"})
    coarse = LevelTally(2, 3, traced={"autocast"}, level=1)
    report = Report(True, levels=(fine, coarse))
    first, *rest = report.lines()
    assert first.endswith("nothing merged: why")
    assert [line.strip() for line in rest] == [
        "not merged, 2 calls: why not", "not merged, 1 call: mlp: never", "compiled without merging, autocast",
    ]  # fmt: skip
    assert Report(True, levels=(coarse,)).headline == "nothing merged: autocast"


def test_the_reason_is_the_one_that_cost_most_attention_and_not_the_one_of_most_calls():
    skipped = Counter({"attn: many": 9, "attn: large": 1, "mlp: rest": 99})
    lost = Counter({"attn: many": 9, "attn: large": 90})
    report = Report(True, levels=(LevelTally(1, 3, skipped=skipped, lost=lost, work_full=100, work_left=100),))
    assert report.headline == "nothing merged: large"
    assert list(report.reasons) == ["attn: large", "attn: many", "mlp: rest"]
    assert report.as_data()["levels"][0]["skipped_work"] == {"attn: many": 0.09, "attn: large": 0.9}


@pytest.mark.parametrize(("why", "lost", "told"), [
    ("an attention mask came along", 20, "20% of attention not merged: an attention mask came along"),
    ("an attention mask came along", 2, ""), ("outside the rules' time range", 50, ""),
])  # fmt: skip
def test_what_hindered_merging_is_told_where_it_counts_and_nobody_asked_for_it(why, lost, told):
    skipped, lost = Counter({f"attn: {why}": 1}), Counter({f"attn: {why}": lost})
    found = dataclasses.replace(level(left=60), skipped=skipped, lost=lost)
    assert Report(True, levels=(found,)).hindered == told


def test_a_gain_is_told_only_where_as_much_was_left_out_as_when_it_was_measured():
    """Of what else is on a model nobody knows, but that merging finds less to do there."""
    for left, is_told in ((25, True), (30, True), (93, False), (60, False), (0, False)):
        for one in (gain(2.0), gain(1.0)):
            report = Report(True, levels=(level(left=left),), gains=(one,))
            assert (one.speed in report.headline) == is_told, left
    assert "faster" not in Report(True, levels=(level(),), gains=(gain(2.0)._replace(saved=None),)).headline


def test_the_share_is_of_all_attention_levels_that_no_rule_reaches_and_exact_answers_included():
    fine = reported(MergeConfig(side="kv", ratio=0.5, max_downsample=1, correction=False), 900)
    both = reported(MergeConfig(side="kv", ratio=0.5, max_downsample=8, correction=False), 900)
    assert not fine.reasons and fine.levels[1].work_saved == 0
    assert fine.levels[0].work_saved == both.levels[0].work_saved > fine.work_saved
    assert fine.work[0] == both.work[0]
    exact = reported(MergeConfig(side="kv", ratio=0.5, max_downsample=8), 900)
    assert exact.levels[0].work_saved < both.levels[0].work_saved


def test_a_gain_is_no_headline_of_a_picture_that_did_not_merge():
    off = Report(True, levels=(LevelTally(1, 3),), gains=(gain(0.9),))
    assert "0.90x" not in str(off) and off.headline.startswith("nothing merged")


def test_a_level_counts_the_work_of_early_and_late_steps():
    early, late, both = (reported(EARLY, *times).levels[0] for times in ((900,), (100,), (900, 100)))
    assert (early.work_saved, late.work_saved) == (1 - 26 / 256, 0.5)
    assert both.work_saved == pytest.approx((early.work_saved + late.work_saved) / 2)
    assert both.calls_merged == early.calls_merged + late.calls_merged == 2 * both.blocks
    assert both.tokens == ((256, 256, 128), (256, 256, 26))


@pytest.mark.parametrize("limits", [{"start_percent": 0.3}, {"end_percent": 0.05}, {"max_beta": 0.005}])
def test_a_step_that_is_left_whole_counts_as_left_whole(limits):
    late, whole = (reported(EARLY, 100).levels[0], reported(dataclasses.replace(EARLY, **limits), 900, 100).levels[0])
    merges = "end_percent" not in limits
    assert whole.work_full == 2 * late.work_full and whole.work_saved == (late.work_saved / 2 if merges else 0)


def test_all_levels_are_weighed_by_their_work():
    both = Report(True, levels=(level(1, left=0), level(2, left=100)))
    assert both.work_saved == 0.5
    assert Report(True).work_saved is None


def test_reports_of_passes_are_one_with_levels_by_their_down_sampling():
    """The passes of a hires fix, or a refiner, whose finest level is another."""
    small, large, refiner = reported(EARLY, 900, 100), reported(EARLY, 900, side=32), Report(True, levels=(level(2),))
    both = Report.join([small, large])
    assert both.calls == 3 and len(both.levels) == len(small.levels)
    one, two = small.levels[0], large.levels[0]
    assert both.levels[0].tokens == tuple(sorted({*one.tokens, *two.tokens}, reverse=True))
    full, left = (one + other for one, other in zip(small.work, large.work, strict=True))
    assert both.work_saved == pytest.approx(1 - left / full)
    mixed = Report.join([Report(True, levels=(level(1),)), refiner])
    assert [(one.level, one.downsample) for one in mixed.levels] == [(0, 1), (1, 2)]
    assert Report.join([]) == Report(False) and Report.join([small]).as_data() == small.as_data()


def test_gains_of_several_sizes_are_told_each():
    report = Report.join([Report(True, levels=(level(),), gains=(gain(1.5), gain(1.0, 32)))])
    assert "about 1.5x faster at 512x512, no faster at 256x256 (measured here)" in str(report).splitlines()[0]


def test_a_hosts_own_facts_and_lines_come_first():
    lines = Report(True, levels=(level(),), notes=("note",)).lines("ToMe", ["20 steps"], ["own"])
    assert lines[0].startswith("ToMe: 20 steps, 75%") and lines[1] == "  own" and lines[-1] == "  note"
    assert not any("\n" in line for line in lines)


def test_nothing_left_out_is_not_rounded_up_to_everything():
    assert [percent(share) for share in (0.0, 0.614, 0.999, 1.0)] == ["0%", "61%", "99%", "100%"]


def test_the_json_form_is_json_and_has_every_count():
    found = Report.join([reported(EARLY, 900, 100), Report(True, gains=(gain(1.42),))])
    data = found.as_data()
    assert json.loads(json.dumps(data)) == data and data["format"] == 2
    assert data["work_saved"] == found.work_saved and data["gains"][0]["ratio"] == 1.42
    assert data["levels"][0]["merged"] == [
        {"part": "attn", "tokens": 256, "queries": 256, "keys": keys, "calls": found.levels[0].blocks}
        for keys in (26, 128)
    ]
    calls = sum(kind["calls"] for level in data["levels"] for kind in level["merged"])
    skipped = sum(sum(level["skipped"].values()) for level in data["levels"])
    assert (calls, skipped) == (found.calls_merged, sum(found.reasons.values()))


def test_a_gain_is_of_the_pictures_since_the_counts_began(monkeypatch):
    """A handle is kept over pictures of several sizes; a report must not tell of earlier ones."""
    monkeypatch.setattr(tome_core.gains, "KNOWN", tome_core.gains.Gains())
    monkeypatch.setattr("tome_core.measuring.measured.KNOWN", tome_core.gains.KNOWN)
    case = BY_NAME["sd15"]
    model = case.build()
    with tome_core.patch(model, MergeConfig(ratio=0.5)) as handle:
        gains = [handle.measure(side * 8, side * 8, rounds=1, steps=1) for side in (16, 24)]
        for one, side in ((gains[0], 16), (gains[1], 24), (gains[0], 16)):
            handle.reset_counts()
            call_case(case, model, height=side, width=side)
            assert handle.report().gains == (one,)


def test_counts_and_maps_begin_anew_and_count_on():
    model = CASE.build()
    with tome_core.patch(model, MergeConfig(ratio=0.5)) as handle:
        handle.keep_maps()
        call_case(CASE, model)
        first = handle.report()
        assert first.calls == 1 and first.merged_anything and handle.maps()
        handle.reset_counts()
        empty = handle.report()
        assert empty.calls == 0 and not empty.merged_anything and not handle.maps()
        assert empty.levels[0].work_saved is None
        call_case(CASE, model)
        assert handle.report() == first and handle.maps()


def test_attention_that_rests_while_the_mlp_merges_counts_as_work():
    early = MergeRule(ratio=0.75, min_timestep=500.0)
    saved = []
    for more in ((), (MergeRule(merge_attn=False, merge_mlp=True),)):
        model = CASE.build()
        with tome_core.patch(model, MergeConfig(rules=(early, *more))) as handle:
            for timestep in (900, 100):
                call_case(CASE, model, timestep=timestep)
        saved.append(handle.report().levels[0].work_saved)
    assert 0 < saved[0] == saved[1] < 0.5


def test_a_level_is_told_the_reason_that_is_its_own():
    model = CASE.build()
    never, coarse = MergeRule(ratio=0.0), MergeRule(max_downsample=8)
    with tome_core.patch(model, MergeConfig(rules=(never, coarse), min_timestep=800.0)) as handle:
        reasons = []
        for timestep in (900, 500):
            handle.reset_counts()
            call_case(CASE, model, timestep=timestep)
            reasons += handle.report().levels[0].reasons
    assert reasons == ["attn: a rule of ratio 0 leaves it alone", "attn: outside the rules' time range"]
