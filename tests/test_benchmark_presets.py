"""The presets are what the committed results make of them, and the best that was measured within their budgets."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import tome_core
from benchmarks import presets, results
from benchmarks.quality_rows import TIMES

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
FRONT = RESULTS / "front-cpu-2026-11-22.json"


@pytest.fixture(scope="module")
def points():
    return presets.front([results.load(FRONT)])


def test_the_shipped_table_is_made_from_the_committed_result(tmp_path):
    output = tmp_path / "table.py"
    assert presets.main([str(FRONT), "--output", str(output)]) == 0
    assert output.read_text(encoding="utf-8") == presets.TABLE.read_text(encoding="utf-8")


def test_every_checkpoint_counts(points):
    assert len(points) > 5 and len(results.load(FRONT)["settings"]["models"]) == 3
    with pytest.raises(ValueError, match="merged keys"):
        presets.front([])


@pytest.mark.parametrize("name", tome_core.PRESETS)
def test_no_pair_of_settings_within_the_budget_does_less_harm(points, name):
    budget = presets.BUDGETS[name]
    choice = presets.choose(points, budget)
    assert choice.work <= budget + 0.002
    for late, early, place in itertools.product(points, points, range(len(TIMES) + 1)):
        work = (place * late.work + (len(TIMES) - place) * early.work) / len(TIMES)
        if work <= budget:
            dev = sum((*late.dev[:place], *early.dev[place:])) / len(TIMES)
            assert choice.dev <= dev + 1e-9, (late.ratio, early.ratio, place)
    rule = tome_core.preset(name)
    assert all(getattr(rule, key) == value for key, value in choice.settings().items())


@pytest.mark.parametrize("name", tome_core.PRESETS)
def test_levels_below_the_finest_add_at_most_their_share(points, name):
    deeper, choice = presets.below([results.load(FRONT)]), presets.choose(points, presets.BUDGETS[name])
    rule = tome_core.preset(name)
    late = [place for place, time in enumerate(TIMES) if time < rule.early_until]
    allowed = presets.BELOW_SHARE * sum(choice.late.dev[place] for place in late)
    added = {ratio: sum(dev[place] for place in late) for ratio, dev in deeper.mlp.items()}
    assert (rule.max_downsample, rule.deep_mlp) == (8, deeper.settings(choice).get("deep_mlp", 0.0))
    assert rule.deep_mlp == 0 or added[rule.deep_mlp] <= allowed
    assert all(dev > allowed for ratio, dev in added.items() if ratio > rule.deep_mlp)
    assert sum(deeper.keys[0.9375]) / len(TIMES) <= presets.BELOW_SHARE * choice.dev


def test_a_preset_stays_at_the_finest_level_where_nothing_is_known_of_others_or_they_add_too_much(points):
    choice = presets.choose(points, presets.BUDGETS["balanced"])
    record = results.load(FRONT)
    finest = [one for one in record["settings"]["variants"] if "below" not in one["name"]]
    unknown = {**record, "settings": {**record["settings"], "variants": finest}}
    assert presets.below([unknown]).settings(choice) == {}
    none, own = (0.0,) * len(TIMES), choice.late.dev
    assert presets.Below({0.9375: own}, {0.5: none}).settings(choice) == {}
    assert presets.Below({0.6: none}, {0.5: none}).settings(choice) == {}, "it merges harder than that"
    assert presets.Below({0.9375: none}, {0.5: own}).settings(choice) == {"max_downsample": 8}
    early = tuple(0.0 if time < choice.until else 100.0 for time in TIMES)
    assert presets.Below({0.9375: none}, {0.5: early}).settings(choice)["deep_mlp"] == 0.5, "no early step has it"


def test_a_budget_below_everything_measured_is_refused(points):
    with pytest.raises(ValueError, match="no setting"):
        presets.choose(points, 0.001)


def test_results_without_the_rows_are_refused_in_a_sentence(tmp_path, capsys):
    record = {**results.load(FRONT), "rows": []}
    results.save(record, tmp_path / "empty.json")
    assert presets.main([str(tmp_path / "empty.json"), "--output", str(tmp_path / "x.py")]) == 2
    assert "merged keys" in capsys.readouterr().err and not (tmp_path / "x.py").exists()
