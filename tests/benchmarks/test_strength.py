"""The curve of strength is what the committed results make of it, the best that was measured, and without a turn."""

from __future__ import annotations

import ast
from itertools import pairwise
from statistics import fmean

import pytest

from benchmarks import results, strength
from benchmarks.variants import FRONT
from tome_core.settings import presets
from tome_core.settings.presets import LAYOUTS, SD, SDXL, TRANSFORMER

SOURCES = {layout: [results.FOLDER / name for name in names] for layout, names in strength.SOURCES.items()}
TODAYS = results.FOLDER / "front-cpu-2026-11-25.json"  # of the models that came after the curve was chosen


@pytest.fixture(scope="module")
def record():
    return results.load(*SOURCES[SD])


@pytest.fixture(scope="module")
def todays():
    return results.load(TODAYS)


@pytest.fixture(scope="module")
def loss(record):
    return strength.front([record])


@pytest.fixture(scope="module")
def knots(loss):
    return strength.curve(loss)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shipped_curve_is_made_from_the_committed_results(capsys, layout):
    assert strength.main([*map(str, SOURCES[layout])]) == 0
    assert ast.literal_eval(capsys.readouterr().out.splitlines()[-1]) == presets.CURVES[layout]


@pytest.mark.parametrize("layout", [SDXL, TRANSFORMER])
def test_a_layouts_own_curve_errs_less_than_that_of_others(layout):
    """Both curves take the same time at each knot; the results are those that chose the layout's own."""
    loss = strength.front([results.load(path) for path in SOURCES[layout]])
    own = [knot.dev for knot in strength.curve(loss)[1:]]
    others = [strength.deviation(keys / presets.PARTS, until, loss) for keys, until in presets.CURVES[SD][1:]]
    assert len(own) == strength.KNOTS and all(dev <= 1.1 * other for dev, other in zip(own, others, strict=True))
    assert own[4] < 0.7 * others[4], "at the mark quality"


def test_as_many_keys_lie_in_the_cells_that_err_less(todays):
    """Else the curve, which is chosen from the better ones, would promise what no picture has."""
    several = {ratio: [cell for other, cell in FRONT if other == ratio] for ratio, _ in FRONT}
    chosen = {ratio: min(cells, key=lambda cell: fmean(strength.read_means([todays], ratio, cell)))
              for ratio, cells in several.items()}  # fmt: skip
    late = [presets.strength(number / strength.KNOTS) for number in range(1, strength.KNOTS + 1)]
    cells = [(step.value("ratio"), step.value("sx")) for step in late if step.value("ratio") in chosen]
    assert len(cells) >= 5 and all(chosen[ratio] == cell for ratio, cell in cells)


def test_a_row_that_one_result_has_not_counts_in_none_and_without_any_the_result_is_refused(
    record, todays, tmp_path, capsys
):
    """Else one share's mean would be of other models than the next one's."""
    rows = [row for row in todays["rows"] if row["variant"] != "merged-keys-0.5-cells-4"]
    both, one_lacks = (strength.front([record, other]).by_share for other in (todays, {**todays, "rows": rows}))
    assert 0.5 in both and one_lacks == {share: dev for share, dev in both.items() if share != 0.5}
    results.save({**record, "rows": []}, tmp_path / "empty.json")
    assert strength.main([str(tmp_path / "empty.json")]) == 2
    assert "merged keys" in capsys.readouterr().err


def time_of(knot):
    late, early = strength.step_time(knot.share), strength.step_time(strength.FEWEST)
    return (late * knot.until + early * (1000 - knot.until)) / 1000


def test_more_strength_asks_more_of_every_step_costs_more_and_leaves_the_time_that_it_promises(knots):
    for weaker, stronger in pairwise(knots):
        assert stronger.share <= weaker.share and stronger.until <= weaker.until
        assert stronger.work < weaker.work and stronger.dev > weaker.dev
    for knot in knots:
        assert time_of(knot) == pytest.approx(strength.time_at(knot.strength), abs=5e-4)
    for mark, work in strength.WORK.items():
        assert strength.time_at(mark) == pytest.approx(work + strength.MERGING)
