"""The page's curve is the benchmarks', all of its plot is inside of it, and its map shows groups."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import quality_figures
from demo import page_curve, page_map, page_plot
from demo.page_curve import Point
from tome_core.settings.presets import MARKS


def test_the_curve_is_the_benchmarks():
    """Its own figures, which its tables are made of, from the same file."""
    newest = max((json.loads(one.read_text()) for one in page_curve.RESULTS.glob("quality-*.json")),
                 key=lambda one: one["created"])  # fmt: skip
    section = quality_figures.sections(newest)[0]
    curve = {point.strength: point for point in page_curve.read_measured()}
    assert len(curve) > 5 and curve[0.0] == Point(0.0, 0.0, 0.0)
    for name, facts in section.variants.items():
        if facts["method"] in ("preset", "strength"):
            point, figures = curve.pop(MARKS.get(facts["setting"]) or float(facts["setting"])), section.pictures[name]
            assert 1 - point.saved == pytest.approx(figures.time)
            # a mean over pictures of decibels is above the decibels of a mean, and the worst picture's are below
            worst = max(max(row["squared_error"]) for row in newest["rows"] if row["measure"] == "pictures"
                        and (row["checkpoint"], row["variant"]) == (section.checkpoint, name))  # fmt: skip
            assert 10 * np.log10(255**2 / worst) < 20 * np.log10(255 / point.error) <= figures.psnr.value
    assert set(curve) == {0.0}


CURVE = (Point(0.0, 0.0, 0.0), Point(0.5, 0.4, 2.0), Point(1.0, 0.5, 5.0))


def test_the_plot_has_the_strength_on_the_curve_and_the_pictures_where_they_were_measured():
    assert page_curve.between(CURVE, 0.25) == Point(0.25, 0.2, 1.0)
    drawn = page_plot.plot(CURVE, 0.25, [Point(0.25, -0.1, 0.5), Point(None, 0.3, 9.0)])
    assert drawn.count('class="now" data-strength="0.25"') == 1 and drawn.count('class="run"') == 2
    assert "Ring: strength 0.25: 20 % of the time saved, error 1.0." in drawn
    assert "0.25: 10 % longer, error 0.5; by hand: 30 % of the time saved, error 9.0." in drawn
    assert 'class="now"' not in page_plot.plot(CURVE, None)


@pytest.mark.parametrize("runs", [(), (Point(0.5, -8.0, 0.0),), (Point(1.0, 0.99, 120.0),)])
@pytest.mark.parametrize("curve", [(), CURVE])
def test_all_of_the_plot_is_inside_of_it(curve, runs):
    frame = page_plot._Frame((*curve, *runs))
    for point in (*curve, *runs):
        x, y = frame.at(point)
        assert 0 < x < page_plot.WIDTH and 0 < y < page_plot.HEIGHT
    assert page_plot.plot(curve, 0.5, runs).startswith("<figure")


def test_a_map_gives_each_group_the_mean_of_its_own():
    picture = np.zeros((4, 4, 3), np.uint8)
    picture[:2, :2], picture[2:, 2:], picture[:2, 2:] = 200, 100, 7
    drawn = page_map.mosaic(picture, (2, 2), np.array([0, 1, 2, 0]))
    assert (drawn[:2, :2] == 150).all() and (drawn[2:, 2:] == 150).all()
    assert (drawn[:2, 2:] == 7).all() and (drawn[2:, :2] == 0).all()
