"""A gain is told of people's own pictures where there are enough of both kinds, of one kind of call, and alike."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests import step_clock
from tome_core.hosting import MergeConfig, Steps, gains, pictures
from tome_core.reporting.gains import Gains

CONFIG = MergeConfig(ratio=0.5)
LATENT = torch.zeros(2, 4, 8, 16)


def report(saved, merged_anything=True):
    return SimpleNamespace(work_saved=saved, merged_anything=merged_anything)


@pytest.fixture(autouse=True)
def forgotten():
    """What this process knows is as nobody's."""
    gains.KNOWN.forget()
    yield
    gains.KNOWN.forget()


@pytest.fixture
def clock(monkeypatch):
    """Time passes by `step` for each report."""
    return step_clock.put_on(monkeypatch)


@pytest.fixture
def draw(clock):
    """A sampling of some steps, each of which takes so long; what is told of it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def draw(seconds, config=None, saved=0.5, steps=8, latent=LATENT, model=model, more=(), beside=("euler",)):
        heard, clock.step = Steps(), seconds
        for step in range(steps):
            heard.call(latent, *more)
            heard.hear(step)
        return heard.remember(model, config, report(saved), *beside)

    draw.model = model
    return draw


def of_both(draw, unmerged=3, merged=3, seconds=2.0, **more):
    """What the last of some merged pictures is told, after some unmerged ones."""
    for _ in range(unmerged):
        assert draw(seconds, **more) == ""
    return ["", *(draw(seconds / 2, CONFIG, **more) for _ in range(merged))][-1]


def test_three_of_both_kinds_say_it_and_not_one_fewer(draw):
    assert [of_both(draw, 0, 9), of_both(draw, 2, 1)] == ["", ""], "one kind alone, and two"
    assert of_both(draw, 1, 1) == "about 2.0x faster, from your own pictures (11 with merging, 3 without)"


def test_what_is_slower_is_said_too_and_the_latest_twelve_count(draw):
    of_both(draw, 20, 0)
    assert [draw(3.0, CONFIG) for _ in range(3)][-1] == "no faster, from your own pictures (3 with merging, 12 without)"


@pytest.mark.parametrize("other", [
    {"latent": LATENT[:1]}, {"latent": LATENT.mT}, {"latent": LATENT.half()}, {"steps": 9}, {"more": ("a patch",)},
    {"beside": ("euler", "ControlNet 0")}, {"model": nn.Sequential(nn.Linear(2, 2), nn.SiLU())},
    {"model": nn.Sequential(nn.Linear(2, 3), nn.ReLU())},
], ids=["batch", "size", "precision", "calls", "patch", "neighbour", "activation", "width"])  # fmt: skip
def test_another_kind_of_call_sampling_or_model_is_another_case(draw, other):
    of_both(draw, 3, 0)
    assert of_both(draw, 0, 3, **other) == "", "there are no unmerged ones like these"
    assert of_both(draw, 3, 0, **other) == "" and draw(1.0, CONFIG, **other) != ""


def test_other_code_rules_share_or_start_of_the_process_is_another_case_and_another_seed_is_none(draw, monkeypatch):
    told = of_both(draw)
    for config, saved in ((MergeConfig(ratio=0.6), 0.5), (CONFIG, 0.7)):
        assert draw(1.0, config, saved) == ""
    assert draw(1.0, MergeConfig(ratio=0.5, seed=7)) == told.replace("3 with ", "4 with ")
    with monkeypatch.context() as context:
        context.setattr(draw.model[0], "forward", lambda x: x)
        assert draw(1.0, CONFIG) == ""
    monkeypatch.setattr("sys.argv", ["main.py", "--lowvram"])
    assert draw(1.0, CONFIG) == ""


def test_where_times_vary_by_more_than_a_part_of_the_gain_nothing_is_said(draw):
    for seconds in (2.0, 2.2, 2.4):
        draw(seconds)
    assert of_both(draw, 0, 3, seconds=2.0) != "", "0.2 of 1.2"
    for seconds in (1.4, 1.2, 0.8):
        told = draw(seconds, CONFIG)
    assert told == ""


def test_a_hiccup_or_two_hide_nothing_of_many(draw):
    of_both(draw, 5, 5)
    draw(90.0)
    assert draw(90.0, CONFIG) == "about 2.0x faster, from your own pictures (6 with merging, 6 without)"


def test_the_first_step_and_few_steps_count_for_nothing(draw, clock):
    of_both(draw, 3, 3)
    heard, clock.step = Steps(), 1.0
    for step in range(8):
        heard.call(LATENT)
        clock.now += 99.0 * (step == 0)  # loads and compiles
        heard.hear(step)
    assert heard.remember(draw.model, CONFIG, report(0.5), "euler") != ""
    assert of_both(draw, 3, 3, steps=6) == "" and of_both(draw, 3, 3, steps=7) != ""


def test_what_did_not_merge_reports_no_step_or_has_no_latent_says_nothing(draw):
    assert of_both(draw, latent=None) == "" and not gains.KNOWN.pictures
    for hears, found in ((True, None), (True, report(0.0, False)), (False, report(0.5))):
        heard = Steps()
        for step in range(9):
            heard.call(LATENT)
            if hears:
                heard.hear(step)
        assert heard.remember(draw.model, CONFIG, found) == "" and not gains.KNOWN.pictures


def test_a_panel_is_told_of_the_size_as_the_latest_was_drawn(draw):
    def told(height, width, config=CONFIG):
        return pictures.told(draw.model, config, height, width)

    assert told(64, 128) == ""
    latest = of_both(draw)
    assert not gains.KNOWN, "no patch goes by it"
    assert told(64, 128) == latest and told(128, 64) == told(64, 128, MergeConfig(ratio=0.6)) == ""
    of_both(draw, 0, 1, latent=LATENT[:1])
    assert told(64, 128) == "", "of its like there is no unmerged one"


# --- the file ---------------------------------------------------------------------------------------------------------


def kept_in(path):
    known = Gains()
    known.load(path)
    return known


def test_another_process_knows_it_and_the_file_does_not_grow_for_ever(tmp_path):
    path = tmp_path / "gains.json"
    known = kept_in(path)
    for number in range(1000):
        known.add_picture(("where", "how", "", ""), float(number + 1))
    assert kept_in(path).pictures == known.pictures == {("where", "how", "", ""): tuple(map(float, range(989, 1001)))}
    assert len(path.read_text().splitlines()) < 10
    for number in range(400):
        known.add_picture((str(number), "how", "", ""), 1.0)
    assert len(known.pictures) == 300 and ("399", "how", "", "") in known.pictures


def test_a_broken_line_costs_nothing_but_itself(tmp_path):
    path = tmp_path / "gains.json"
    kept_in(path).add_picture(("where", "how", "", ""), 1.0)
    key = ["a", "b", "c", "d"]
    for line in ([], [key, []], [key, ["1"]], [key, [0.0]], [key, [float("nan")]], [key, 1.0], [key[:3], [1.0]]):
        path.write_text(f"{path.read_text()}\n{json.dumps(line)}")
    assert kept_in(path).pictures == {("where", "how", "", ""): (1.0,)}
