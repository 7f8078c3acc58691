"""The times of pictures are kept, found again, and lost to nothing but their own file."""

import json
import logging

import pytest

from tome_core.reporting.gains import Gains

CASE, OTHER = ("where", "how", "", ""), ("where", "how", "rules", "0.50")


def kept_in(path):
    known = Gains()
    known.load(path)
    return known


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "gains.json"


@pytest.mark.parametrize("plain, text", [
    (1.31, "1.3x faster"), (1.1, "1.1x faster"), (1.05, "1.05x faster"),
    (1.022, "1.02x faster"), (1.018, "no faster"), (0.9, "no faster")])  # fmt: skip
def test_a_gain_is_told_in_a_digit_or_two_and_within_the_margin_as_none(plain, text):
    known = Gains()
    for _ in range(3):
        known.add_picture(CASE, plain)
        known.add_picture(OTHER, 1.0)
    assert known.of_pictures("where", "rules") == f"{text} in your pictures (3 with merging, 3 without)"


def test_other_processes_know_what_was_kept_and_the_latest_of_a_case_counts(path):
    known, other = kept_in(path), kept_in(path)
    assert not path.parent.exists(), "nothing is made before there is something to keep"
    for seconds in (1.0, 2.0):
        known.add_picture(CASE, seconds)
    other.add_picture(OTHER, 3.0)
    assert kept_in(path).pictures == {CASE: (1.0, 2.0), OTHER: (3.0,)}
    other.add_picture(CASE, 4.0)
    assert kept_in(path).pictures == {OTHER: (3.0,), CASE: (4.0,)}


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
WRONG = ([], {}, [KEY, []], [KEY, ["1"]], [KEY, [0.0]], [KEY, [float("nan")]], [KEY, 1.0], [KEY[:3], [1.0]],
         [[*KEY[:3], []], [1.0]], {"model": "UNet", "merged": 1.0})  # fmt: skip
BROKEN = ["{", "3", "\x00\xff", *map(json.dumps, WRONG)]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_line_is_told_once_and_costs_nothing_but_itself(tmp_path, text, caplog):
    path = tmp_path / "gains.json"
    path.write_text(text, encoding="latin-1")
    known = Gains()
    known.add_picture(OTHER, 2.0)
    with caplog.at_level(logging.WARNING):
        known.load(path)
        known.load(path)
    assert len(caplog.records) == 1 and str(path) in caplog.text
    assert known.pictures == {OTHER: (2.0,)}
    known.add_picture(CASE, 1.0)
    assert kept_in(path).pictures == {CASE: (1.0,)}


def test_where_nothing_can_be_written_the_process_knows_it_and_says_so_once(path, caplog):
    path.parent.write_text("no folder")
    known = Gains()
    with caplog.at_level(logging.WARNING):
        known.load(path)
        before = len(caplog.records)
        known.add_picture(CASE, 1.0)
        known.add_picture(OTHER, 1.0)
    assert "could not be kept" in caplog.text and len(caplog.records) - before <= 2
    assert known.pictures == {CASE: (1.0,), OTHER: (1.0,)}
