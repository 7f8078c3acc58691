"""The page's runs, and what each touch shows. No browser, no gradio."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tome_core
from demo import page_code, page_controls, sheet
from demo.page_code import Wanted
from demo.page_events import NAMES, Events, Seen, Wrong
from demo.page_run import DONE, MERGED, PLAIN, Studio
from demo.source import Embedded
from tests import tiny_scenes
from tome_core import MergeConfig, form, preset, strength
from tome_core.settings.presets import MARKS

PROMPT, ADDRESS = "night snow peaks right blue cone", "http://127.0.0.1:7860/"


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def source():
    """The embedded model's source, with a smaller model in it."""
    made = object.__new__(Embedded)
    made.name, made.device, made.model = "tiny", torch.device("cpu"), tiny_scenes.make()
    made.target = made.model.unet
    return made


BY_HAND = {"start": 0.2, "keep": 500.0}
BIPARTITE = MergeConfig(ratio=0.75)
WANTED = Wanted(PROMPT, 4, 3, 0.5, form.change(BIPARTITE, BY_HAND))


def test_a_run_gives_both_pictures_as_the_model_makes_them_and_says_how_far_it_is(source):
    shots = list(Studio(source).make(WANTED, threading.Event()))
    shares = [shot.share for shot in shots]
    assert shares == sorted(shares) and shares[-1] == 1 and shots[-1].doing == DONE
    assert [shot.step for shot in shots if shot.doing == PLAIN] == [1, 2, 3]
    plain = source.picture(PROMPT, 4, 3, lambda: None)
    (merged,) = shots[-1].merged
    assert np.array_equal(shots[-1].plain.picture, plain)
    assert np.array_equal(shots[-2].unfinished, merged.picture), "the last unfinished picture is the finished one"
    assert not np.array_equal(merged.picture, plain)
    ((title, drawn),) = merged.maps
    assert title == "Level 0: 256 tokens became 64" and drawn.ndim == 3
    assert merged.report.startswith("Token merging: 3 model calls, ") and "ratio=0.75" in merged.report


def test_several_ways_share_one_unmerged_picture_and_each_is_the_one_it_makes_alone(source):
    configs = tuple(form.change(strength(one), {"only_if_it_pays": False}) for one in (0, 1, 0.25))
    *shots, last = Studio(source).make(WANTED, threading.Event(), configs)
    shares = [shot.share for shot in shots]
    assert shares == sorted(shares) and last.share == 1 and len(last.merged) == 3
    same = [np.array_equal(made.picture, last.plain.picture) for made in last.merged]
    assert same == [True, False, False], "strength 0 alone is off"
    for config, made in zip(configs, last.merged, strict=True):
        *_, alone = Studio(source).make(replace(WANTED, config=config), threading.Event())
        assert np.array_equal(alone.merged[0].picture, made.picture)


def test_a_model_that_knows_no_time_is_told_it(source):
    """Without it a rule that is limited in time would merge nothing on the embedded model, and keep no match."""
    def made(**changes):
        *_, last = Studio(source).make(replace(WANTED, config=form.change(BIPARTITE, changes)), threading.Event())
        return last.plain, last.merged[0]

    plain, late = made(start=1.0)
    assert np.array_equal(plain.picture, late.picture) and "the same picture, bit for bit" in late.figures(plain)
    assert not np.array_equal(made(keep=1000.0)[1].picture, made(keep=0.0)[1].picture)


@pytest.mark.parametrize("doing", [PLAIN, MERGED])
@pytest.mark.parametrize("how", ["stop", "leave"])
def test_a_run_that_is_stopped_ends_within_a_step_and_leaves_the_model_unpatched(source, doing, how):
    studio, stop = Studio(source), threading.Event()
    before = {name: module.forward.__func__ for name, module in source.target.named_modules()}
    run = studio.make(replace(WANTED, steps=50), stop)
    next(shot for shot in run if shot.doing == doing and shot.step)
    if how == "stop":
        stop.set()
        assert all(shot.doing == doing and shot.step < 50 for shot in run)
    else:
        run.close()
    assert not tome_core.report(source.target).patched
    assert {name: module.forward.__func__ for name, module in source.target.named_modules()} == before
    assert list(studio.make(WANTED, threading.Event()))[-1].doing == DONE


def test_what_goes_wrong_in_a_run_is_raised_where_it_is_waited_for(source):
    def failing(*given):
        raise RuntimeError("no memory left")

    source.model.forward = failing
    with pytest.raises(RuntimeError, match="no memory left"):
        list(Studio(source).make(WANTED, threading.Event()))


# --- what a touch shows -----------------------------------------------------------------------------------------------


@pytest.fixture
def events(source):
    return Events(Studio(source), Wanted.of_strength(PROMPT, 0, 20, 0.5))


@pytest.fixture
def values(events):
    shown = events.opened({}, ADDRESS)
    return {name: shown[name]["value"] for name in NAMES if name != "strengths"} | {"strengths": "0, .5 1"}


def test_it_opens_with_the_start(events, values):
    shown = events.opened({}, ADDRESS)
    assert shown["says"] == "" and shown["by"]["visible"] is False and 'data-strength="0.5"' in shown["plot"]
    assert events.read(values, False) == events.read(values, True) == events.start


@pytest.mark.parametrize("mark", [0, 0.05, *MARKS.values()])
def test_a_strength_fills_the_controls_and_a_touch_says_what_was_changed(events, values, mark):
    assert events.read({**values, "strength": mark}, False).config == strength(mark), "before they are filled in"
    shown = events.moved({**values, "strength": mark, "end": 0.9}, Seen(by_hand=True), ADDRESS)
    filled = {**values, "strength": mark, "end": 0.9, **{one: shown[one]["value"] for one in form.fill(mark)}}
    assert shown["seen"] == Seen(by_hand=False) and "end" not in form.fill(mark)
    assert page_controls.config_of(filled, True) == form.change(strength(mark), {"end": 0.9})
    touched = events.set_by_hand({**filled, "ratio": 0.123}, shown["seen"], ADDRESS)
    assert touched["seen"].by_hand and touched["by"]["value"].startswith("Changed by hand: ratio, end.")
    assert "ratio=0.123" in touched["script"] and "ratio=0.123" in touched["link"]
    assert 'class="now"' not in touched["plot"]


WRONG = {"prompt": "day banana", "picture_seed": -1, "steps": 2.5, "sx": 0, "strength": float("nan"), "method": []}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_told_beside_its_control_until_it_is_right(events, values, name):
    by_hand = Seen(by_hand=True)
    shown = events.touched({**values, name: WRONG[name]}, by_hand, ADDRESS)
    with pytest.raises(Wrong) as refused:
        events.read({**values, name: WRONG[name]}, True)
    assert shown[name]["info"] == str(refused.value)
    assert shown["seen"].wrong == (name,) and shown[name]["elem_classes"] == ["wrong"] and "value" not in shown[name]
    assert shown["script"] == shown["link"] == shown["payload"] == shown["node"] == ""
    wrong = {**values, name: WRONG[name]}
    assert [one["seen"].wrong for one in events.made(wrong, by_hand, "s")] == [(name,)], "a run was begun"
    healed = events.touched(values, shown["seen"], ADDRESS)
    assert healed["seen"] == by_hand and healed["says"] == "" and healed["script"]
    assert healed[name]["elem_classes"] == [] and healed[name]["info"] == events.help(name)


@pytest.mark.parametrize("layout", ["sd", "sdxl"])
def test_the_settings_show_what_strength_stands_for_on_the_models_layout(source, layout):
    events = Events(Studio(source), Wanted.of_strength(PROMPT, 0, 20, 0.5, layout))
    shown = events.opened({"strength": "0.25"}, ADDRESS)
    values = {name: shown[name]["value"] for name in NAMES if name != "strengths"}
    wanted = preset("quality", layout)
    assert {name: values[name] for name in form.NAMES} == form.values_of(wanted)
    assert events.read(values, False) == events.read(values, True) == Wanted(PROMPT, 0, 20, 0.25, wanted, layout)
    assert not events.read(values, True).changes and "strength=0.25" in shown["script"]
    moved = events.moved({**values, "strength": 0.5}, Seen(), ADDRESS)
    assert moved["ratio"]["value"] == form.values_of(preset("balanced", layout))["ratio"]


@pytest.mark.parametrize("text", ["", "0.1, 0.2, 0.3, 0.4, 0.5", "0.5, 1.1", "nan", "1e400", "half", None, "9" * 5000])
def test_a_list_that_is_no_strengths_is_refused_and_nothing_is_made(events, values, text):
    (shown,) = events.compared({**values, "strengths": text}, Seen(), "s")
    assert shown["seen"].wrong == ("strengths",) and shown["strengths"]["elem_classes"] == ["wrong"]
    assert "from 0 to 1" in shown["says"] or "give 1 to 4" in shown["says"]


def test_a_comparison_shows_each_strength_with_what_it_took_and_changed(events, values, monkeypatch):
    # the small model has too few tokens for merging to pay
    always = {"only_if_it_pays": False}
    monkeypatch.setattr(page_code, "config_of_strength", lambda one, layout: form.change(strength(one), always))
    *_, last = events.compared({**values, "steps": 2, "strengths": "0; .5 1, 0.25"}, Seen(), "s")
    grid = last["grid"]["value"]
    assert last["grid"]["visible"] and grid.count("<img") == 4
    places = [grid.index(f"<strong>Strength {one}</strong>") for one in ("0", "0.5", "1", "0.25")]
    assert places == sorted(places)
    assert grid.count(" s of processor time, ") == 4 and grid.count("dB, detail ") == 3
    assert "the same picture, bit for bit" in grid
    assert np.array_equal(last["difference"], sheet.difference(*last["slider"])) and last["difference"].any()
    assert [run.strength for run in last["seen"].runs] == [0, 0.5, 1, 0.25]
    assert last["plot"].count('class="run"') == 4
    moved = events.moved({**values, "strength": 0.9}, last["seen"], ADDRESS)
    assert moved["plot"].count('class="run"') == 4 and 'class="now" data-strength="0.9"' in moved["plot"]
    *_, last = events.made({**values, "steps": 2}, moved["seen"], "s")
    assert last["grid"]["visible"] is False and last["plot"].count('class="run"') == 1


@pytest.mark.parametrize("query", [
    {"ratio": "2"}, {"steps": "0"}, {"prompt": "<b>"}, {"nonsense": "1"}, {"strength": "nan"}, {"strength": "1e400"},
    {"seed": "inf"}, {"seed": "9" * 400}, {"steps": "9" * 5000}, {"sx": "1e400"}, {"keep": "-inf"},
], ids=lambda query: str(query)[:30])  # fmt: skip
def test_a_wrong_link_is_told_and_not_used(events, query):
    shown = events.opened(query, ADDRESS)
    assert "The link was not used" in shown["says"] and "<b>" not in shown["says"]
    assert shown["strength"]["value"] == 0.5 and shown["steps"]["value"] == 20


def test_a_run_lets_stop_be_pressed_while_it_lasts_and_stop_ends_that_of_its_own_tab(events, values):
    run = events.made({**values, "steps": 40}, Seen(), "mine")
    assert next(run)["stop"]["interactive"] is True
    next(run)
    events.stopped("another's")
    next(run)
    events.stopped("mine")
    *_, last = run
    assert "Stopped." in last["says"] and last["stop"]["interactive"] is False


def test_where_the_page_ends_every_run_ends_and_none_begins(events, values):
    run = events.made({**values, "steps": 40}, Seen(), "mine")
    next(run)
    next(run)
    events.end()
    for ended in (run, events.made({**values, "steps": 40}, Seen(), "another's")):
        *_, last = ended
        assert "Stopped." in last["says"]


def test_what_goes_wrong_in_a_run_is_told(events, values):
    events.studio = SimpleNamespace(make=lambda *given: (_ for _ in ()).throw(MemoryError("<none> left")))
    *_, last = events.made(values, Seen(), "s")
    assert "MemoryError: &lt;none&gt; left" in last["says"] and last["stop"]["interactive"] is False


def test_the_seed_of_the_picture_is_refused_as_a_sentence(events, values):
    with pytest.raises(Wrong, match=r"Seed of the picture: '-1' is no seed; allowed is a whole number from 0"):
        events.read({**values, "picture_seed": -1.0}, False)
