"""What was measured is kept, found again, and lost to nothing but its own file."""

import json
import logging

import pytest

from tome_core.reporting.gains import MARGIN, Gain, Gains, nearest

ABOUT = ("UNet 1", "rules", "attention", "2.13", "0.1")
GAIN = Gain(*ABOUT, "card", "float16", 64, 96, 2, 1.31, 1.0)
CASE = ("where", "how", "", "")


def of_size(height, batch=2, merged=1.0):
    return GAIN._replace(height=height, batch=batch, merged=merged)


def kept_in(path):
    known = Gains()
    known.load(path)
    return known


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "gains.json"


def test_a_gain_says_itself_in_one_line_and_within_the_margin_is_none():
    slow = GAIN._replace(merged=1.31 * 1.07)
    assert GAIN.line == "768x512: about 1.3x faster" and GAIN._replace(merged=1.25).speed == "about 1.05x faster"
    assert str(GAIN) == "1.31 times as fast as unmerged (768x512, batch 2, float16, card)"
    assert slow.line == "768x512: no faster"
    assert slow.why_not == "measured: a merged call took 1.07 times as long as an unmerged call at 768x512"
    for share, pays in ((0.9, False), (1.1, True)):
        assert GAIN._replace(unmerged=1 + share * MARGIN).pays is pays


def test_a_gain_is_of_its_case_and_of_no_other_but_for_the_batch_whose_nearest_counts():
    known, of_one, of_four = Gains(), of_size(64, batch=1), of_size(64, batch=4)
    known.remember(GAIN)
    assert known.of(ABOUT) == (GAIN,)
    for place in range(len(ABOUT)):
        assert known.of((*ABOUT[:place], "another", *ABOUT[place + 1 :])) == ()
    for other in (("other", "float16", 64, 96), ("card", "float32", 64, 96), ("card", "float16", 96, 64)):
        assert nearest([GAIN], *other, 2) is None
    batches = [nearest([of_four, of_one], "card", "float16", 64, 96, batch).batch for batch in (1, 2, 3, 4, 9)]
    assert batches == [1, 1, 4, 4, 4]


def test_other_processes_know_what_was_measured_and_the_latest_of_a_case_counts(path):
    gains, other = kept_in(path), kept_in(path)
    assert not path.parent.exists(), "nothing is made before there is something to keep"
    for merged in (1.0, 2.0):
        gains.remember(of_size(64, merged=merged))
    assert [gain.merged for gain in gains.of(ABOUT)] == [2.0]
    other.remember(of_size(8))
    other.add_picture(CASE, 1.0)
    assert {(gain.height, gain.merged) for gain in kept_in(path).of(ABOUT)} == {(64, 2.0), (8, 1.0)}
    assert kept_in(path).pictures == {CASE: (1.0,)}


def test_of_pictures_the_latest_twelve_are_kept_of_three_hundred_cases_and_the_file_does_not_grow(path):
    known = kept_in(path)
    for number in range(1000):
        known.add_picture(CASE, float(number + 1))
    assert kept_in(path).pictures == known.pictures == {CASE: tuple(map(float, range(989, 1001)))}
    assert len(path.read_text().splitlines()) < 10
    for number in range(400):
        known.add_picture((str(number), *CASE[1:]), 1.0)
    assert len(known.pictures) == 300 and ("399", *CASE[1:]) in known.pictures


KEY = ["a", "b", "c", "d"]
WRONG = {"merged": 0.0}, {"merged": float("nan")}, {"unmerged": "1"}, {"model": []}, {"of_tomorrow": 1}
BROKEN = ["{", "3", "\x00\xff", *(json.dumps({**GAIN._asdict(), **wrong}) for wrong in WRONG),
          *map(json.dumps, ([], [KEY, []], [KEY, ["1"]], [KEY, [0.0]], [KEY, 1.0], [KEY[:3], [1.0]]))]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_line_is_told_once_and_costs_nothing_but_itself(tmp_path, text, caplog):
    path = tmp_path / "gains.json"
    path.write_text(text, encoding="latin-1")
    known = Gains()
    known.remember(of_size(1))
    with caplog.at_level(logging.WARNING):
        known.load(path)
        known.load(path)
    assert len(caplog.records) == 1 and str(path) in caplog.text
    assert [gain.height for gain in known.of(ABOUT)] == [1]
    known.remember(GAIN)
    known.add_picture(CASE, 1.0)
    assert (kept_in(path).of(ABOUT), kept_in(path).pictures) == ((GAIN,), {CASE: (1.0,)})


def test_where_nothing_can_be_written_the_process_knows_it_and_says_so_once(path, caplog):
    path.parent.write_text("no folder")
    known = Gains()
    with caplog.at_level(logging.WARNING):
        known.load(path)
        before = len(caplog.records)
        known.remember(GAIN)
        known.remember(of_size(1))
    assert "could not be kept" in caplog.text and len(caplog.records) - before <= 2
    assert len(known.of(ABOUT)) == 2
