"""Others beside strength at equal time, and what the report says of it."""

from __future__ import annotations

import pytest

from benchmarks import quality_report
from benchmarks.quality_figures import Mean, Noised, Pictures, Point, Section, at_equal_time, front_at


def section(**times_and_psnr):
    """A model's figures: name -> (method, time, PSNR)."""
    variants, pictures, noised = {}, {}, {}
    for name, (method, time, psnr) in times_and_psnr.items():
        variants[name] = {"method": method, "setting": name, "role": "method", "code": "engine"}
        pictures[name] = Pictures(0.1, Mean(psnr, 1.0), Mean(psnr / 100, 0.0), time=time)
        noised[name] = Noised(0.1, Mean(0, 0), Mean(10 ** (-psnr / 20), 0), (), ())
    return Section("model", 1.0, {}, variants, noised, pictures)


OURS = {"quality": ("preset", 0.8, 50.0), "fast": ("preset", 0.6, 40.0)}


def test_between_two_strengths_a_line_is_drawn_over_time():
    (one,) = at_equal_time(section(**OURS, other=("downsample", 0.65, 41.0)))
    assert one.name == "other" and one.theirs == Point(0.65, 41.0, 0.41, pytest.approx(10**-2.05))
    assert one.ours.psnr == pytest.approx(42.5) and one.ours.ssim == pytest.approx(0.425)
    assert one.ours.dev == pytest.approx(10 ** (-42.5 / 20))


def test_a_slower_method_meets_the_slowest_strength_and_a_faster_one_meets_none():
    slow, quick = at_equal_time(section(**OURS, slow=("tiles", 0.95, 60.0), quick=("tiles", 0.5, 20.0)))
    assert slow.ours.psnr == 50.0 and slow.ours.time == 0.8
    assert quick.ours is None


def test_a_strength_that_another_beats_in_time_and_psnr_is_not_on_the_front():
    (one,) = at_equal_time(section(**OURS, bad=("strength", 0.7, 20.0), other=("tiles", 0.7, 1.0)))
    assert one.ours.psnr == pytest.approx(45.0)
    assert front_at([Point(0.5, 30.0, 0.9, None)], 0.5).psnr == 30.0


def test_controls_and_results_without_strengths_or_times_have_no_such_table():
    assert not list(at_equal_time(section(other=("tiles", 0.7, 1.0))))
    assert not list(at_equal_time(section(**OURS)))
    untimed = section(**OURS, other=("tiles", None, 1.0))
    assert not list(at_equal_time(untimed))


def test_the_report_shows_theirs_and_ours():
    (text,) = quality_report._at_equal_time(section(**OURS, other=("tiles", 0.7, 41.0), quick=("tiles", 0.5, 20.0)))
    assert "model: others beside strength at equal time" in text
    assert "| tiles | other | 0.70 | 41, 45 | 0.41, 0.45 |" in text
    assert "| tiles | quick | 0.50 | 20, n/a | 0.2, n/a |" in text
    assert not list(quality_report._at_equal_time(section(**OURS)))
