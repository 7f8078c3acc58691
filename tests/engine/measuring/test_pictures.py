"""The gain on users' own pictures is shown if enough merged and unmerged ones have one kind of call and like times."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.watching import step_clock
from tome_core.hosting import MergeConfig, Steps, gains, pictures

CONFIG = MergeConfig(ratio=0.5)
LATENT = torch.zeros(2, 4, 8, 16)


@pytest.fixture
def draw(monkeypatch):
    """A function that samples in steps of these seconds, and returns the gain's sentence."""
    clock, model = step_clock.put_on(monkeypatch), nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def draw(seconds, config=None, saved=0.5, steps=8, latent=LATENT, model=model, more=(), beside=("euler",),
             first=0.0, hears=True):  # fmt: skip
        heard, clock.step = Steps(), seconds
        for step in range(steps):
            heard.call(latent, *more)
            clock.now += first * (step == 0)
            if hears:
                heard.count_step(step)
        report = SimpleNamespace(work_saved=saved, merged_anything=bool(saved))
        return pictures.remember(heard, model, config, report, *beside)

    draw.model = model
    return draw


def of_both(draw, unmerged=3, merged=3, seconds=2.0, **more):
    """The sentence for the last merged picture, after some unmerged ones."""
    for _ in range(unmerged):
        assert draw(seconds, **more) == ""
    return ["", *(draw(seconds / 2, CONFIG, **more) for _ in range(merged))][-1]


def test_three_of_both_kinds_say_it_and_not_one_fewer_and_the_latest_twelve_count(draw):
    assert [of_both(draw, 0, 9), of_both(draw, 2, 1)] == ["", ""], "one kind alone, and two"
    assert of_both(draw, 1, 1) == "2.0x faster in your pictures (11 with merging, 3 without)"
    assert of_both(draw, 20, 9, seconds=1.0).endswith("(12 with merging, 12 without)")


@pytest.mark.parametrize("other", [
    {"latent": LATENT[:1]}, {"latent": LATENT.mT}, {"latent": LATENT.half()}, {"steps": 9}, {"more": ("a patch",)},
    {"beside": ("euler", "ControlNet 0")}, {"model": nn.Sequential(nn.Linear(2, 2), nn.SiLU())},
    {"model": nn.Sequential(nn.Linear(2, 3), nn.ReLU())},
], ids=["batch", "size", "precision", "calls", "patch", "neighbour", "activation", "width"])  # fmt: skip
def test_another_kind_of_call_sampling_or_model_is_another_case(draw, other):
    of_both(draw, 3, 0)
    assert of_both(draw, 0, 3, **other) == "", "there are no unmerged ones like these"
    assert of_both(draw, 3, 0, **other) == "" and draw(1.0, CONFIG, **other) != ""


def test_other_code_rules_or_share_is_another_case_and_another_seed_is_none(draw, monkeypatch):
    sentence = of_both(draw)
    for config, saved in ((MergeConfig(ratio=0.6), 0.5), (CONFIG, 0.7)):
        assert draw(1.0, config, saved) == ""
    assert draw(1.0, MergeConfig(ratio=0.5, seed=7)) == sentence.replace("3 with ", "4 with ")
    monkeypatch.setattr(draw.model[0], "forward", lambda x: x)
    assert draw(1.0, CONFIG) == ""


@pytest.mark.parametrize("unmerged, merged, sentence", [
    ((2.0, 2.2, 2.4), (1.0, 1.0, 1.0), "2.2x faster"), ((2.0, 2.2, 2.4), (1.4, 1.2, 0.8), ""),
    ((2.0,) * 4 + (90.0,), (1.0, 90.0, 1.0, 1.0, 1.0), "2.0x faster"), ((2.0,) * 3, (3.0,) * 3, "no faster"),
], ids=["a little", "too much", "a hiccup", "slower"])  # fmt: skip
def test_where_times_vary_by_more_than_a_part_of_the_difference_nothing_is_said(draw, unmerged, merged, sentence):
    for seconds in unmerged:
        draw(seconds)
    assert [draw(seconds, CONFIG) for seconds in merged][-1].partition(" in your")[0] == sentence


def test_the_first_step_counts_for_nothing_and_neither_do_few_steps(draw):
    sentence = of_both(draw)
    assert draw(1.0, CONFIG, first=99.0) == sentence.replace("3 with ", "4 with "), "it loads and compiles"
    assert of_both(draw, steps=6) == "" and of_both(draw, steps=7) != ""


@pytest.mark.parametrize("how", [{"latent": None}, {"saved": 0.0}, {"hears": False}])
def test_what_did_not_merge_reports_no_step_or_has_no_latent_says_nothing(draw, how):
    assert draw(1.0, CONFIG, **how) == "" and not gains.KNOWN.pictures
