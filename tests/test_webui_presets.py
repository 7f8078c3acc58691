"""Presets in the webui: what they stand for in a job, what the page starts with and does, what a picture remembers."""

from __future__ import annotations

import types
from dataclasses import asdict, replace

import pytest
import torch

import tome_core
from tests.test_webui_infotext import AxisOption, pasted
from tests.webui_doubles import Component, Processing, Webui
from tome_core.presets import DEFAULT

NAMES = tome_core.PRESETS


@pytest.fixture
def webui(monkeypatch):
    made = Webui(monkeypatch).start()
    yield made
    made.call("script_unloaded")


@pytest.fixture
def settings(webui):
    return webui.part("settings")


@pytest.fixture(autouse=True)
def small_pictures_pay(webui, monkeypatch):
    """Presets leave pictures as small as these alone, because merging would take longer than it saves."""
    monkeypatch.setattr(webui.part("settings"), "_config", _always(webui.part("settings")._config))


def _always(config):
    return lambda values, *more: config({**values, "only_if_it_pays": False}, *more)


def as_custom(settings, name, **own):
    """The list of values that says what a preset stands for."""
    given = {**settings.DEFAULTS, **settings.preset_values(name), "enabled": True, "preset": "custom", **own}
    return [given[one] for one in settings.NAMES]


# --- a job -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_panel_can_say_all_of_a_preset(settings, name, monkeypatch):
    monkeypatch.undo()
    wanted = replace(tome_core.preset(name), seed=5)
    assert asdict(settings.read((True, name)).config(False, seed=5)) == asdict(wanted)
    assert asdict(settings.read(as_custom(settings, name)).config(False, seed=5)) == asdict(wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_outweighs_the_values_that_it_fills_in_and_no_others(webui, settings, name):
    beside = {one: value for one, value in {"ratio": 0.1, "method": "cluster", "keep": 7.0}.items()}
    plain = webui.job(False).latents
    done = webui.job(*as_custom(settings, name, preset=name, **beside))
    assert torch.equal(done.latents, webui.job(*as_custom(settings, name)).latents)
    assert not torch.equal(done.latents, plain) and not webui.errors
    small = webui.job(*as_custom(settings, name, preset=name, min_pixels=10**6))
    assert torch.equal(small.latents, plain) and "smaller than min_pixels" in small.comments


def test_no_preset_and_custom_are_the_values_as_they_are(webui):
    wanted = webui.job(True, "custom", 0.35).latents
    assert torch.equal(webui.job(True, None, 0.35).latents, wanted)
    assert not torch.equal(webui.job(True, DEFAULT, 0.35).latents, wanted)


def test_a_list_that_stops_before_the_preset_takes_the_one_that_all_begin_with(webui):
    assert torch.equal(webui.job(True).latents, webui.job(True, DEFAULT).latents)


def test_off_is_the_switch(webui):
    expected = webui.job(False, enable_hr=True)
    done = webui.job(True, "off", "nonsense", enable_hr=True)
    assert torch.equal(done.latents, expected.latents) and done.infotexts == [""] and done.comments == ""


@pytest.mark.parametrize("name", NAMES)
def test_the_hires_choices_hold_beside_a_preset(webui, name):
    def passes(*hires):
        p = Processing(webui, (True, name, 0.5, *hires), enable_hr=True)
        webui.process(p)
        records = webui.part("merging").job_of(p).records
        return tuple(any(one.merged_anything for one in getattr(records.get(hires), "reports", ()))
                     for hires in (False, True))  # fmt: skip

    assert [passes("same"), passes("off"), passes("only hires")] == [(True, True), (True, False), (False, True)]
    assert passes("own ratio", 0.25) == (True, True) and passes("own ratio", 0.0) == (True, False)


def test_a_short_list_means_with_custom_what_it_meant_before_there_were_presets(webui, settings):
    """The API fills it with the values of the controls, whatever the page shows."""
    controls = webui.script.ui(False)
    filled = [True, "custom", 0.35, *(one.value for one in controls[3:])]
    assert settings.read(filled).config(False) == settings.read([True, "custom", 0.35]).config(False)


# --- the page --------------------------------------------------------------------------------------------------------


def page(webui, is_img2img=False):
    """The controls by field name."""
    return dict(zip(webui.part("settings").ARGUMENTS, webui.script.ui(is_img2img), strict=True))


def starts(webui, is_img2img=False):
    """What the page starts with."""
    return {name: control.get_config()["value"] for name, control in page(webui, is_img2img).items()}


def test_the_preset_is_the_first_control_and_the_page_shows_what_it_stands_for(webui, settings):
    Component.made.clear()
    panel = page(webui)
    inside = [one for one in Component.made if "label" in one.arguments][1:]  # the first is the switch around all
    assert inside[0] is panel["preset"] and panel["preset"].arguments["choices"] == ["off", *NAMES, "custom"]
    assert starts(webui) == {**settings.DEFAULTS, **settings.preset_values(DEFAULT), "filled_with": DEFAULT}
    assert panel["preset"].value == DEFAULT


def test_each_tab_starts_with_its_own_preset(webui, settings):
    webui.shared.opts.saved |= {"tomecore_preset": "custom", "tomecore_ratio": 0.3, "tomecore_img2img_preset": NAMES[0],
                                "tomecore_img2img_ratio": 0.2}  # fmt: skip
    assert starts(webui) == {**settings.DEFAULTS, "preset": "custom", "ratio": 0.3, "filled_with": "custom"}
    wanted = {**settings.DEFAULTS, "preset": NAMES[0], **settings.preset_values(NAMES[0]), "filled_with": NAMES[0]}
    assert starts(webui, is_img2img=True) == wanted
    assert page(webui, is_img2img=True)["ratio"].value == 0.2


def after(panel, event, *inputs):
    """What an event's function gives for the values of its inputs: name of a control -> its new value."""
    names = {id(control): name for name, control in panel.items()}
    given = event["fn"](*inputs)
    given = given if isinstance(given, list) else [given]
    found = {names[id(one)]: fact for one, fact in zip(event["outputs"], given, strict=True)}
    return {name: fact["value"] for name, fact in found.items() if fact}


@pytest.mark.parametrize("name", NAMES)
def test_choosing_a_preset_fills_the_controls(webui, settings, name):
    panel = page(webui)
    assert panel["preset"].heard["inputs"] == [panel["preset"]]
    assert after(panel, panel["preset"].heard, name) == {**settings.preset_values(name), "filled_with": name}


@pytest.mark.parametrize("name", NAMES)
def test_what_was_chosen_before_the_last_choice_was_answered_is_filled_in(webui, settings, name):
    panel = page(webui)
    event = panel["preset"].behind
    assert event["inputs"] == [panel["preset"], panel["filled_with"]]
    for note in ("off", "custom", *NAMES):
        wanted = {} if note == name else {**settings.preset_values(name), "filled_with": name}
        assert after(panel, event, name, note) == wanted
    assert after(panel, event, "off", name) == {"enabled": False, "filled_with": "off"}


def test_choosing_custom_changes_nothing_and_off_switches_off(webui):
    panel = page(webui)
    assert after(panel, panel["preset"].heard, "custom") == {"filled_with": "custom"}
    assert after(panel, panel["preset"].heard, "off") == {"enabled": False, "filled_with": "off"}


def test_switching_on_an_off_panel_gives_the_preset_that_all_begin_with(webui, settings):
    panel = page(webui)
    event = panel["enabled"].followed
    assert event["inputs"] == [panel["enabled"], panel["preset"]]
    wanted = {"preset": DEFAULT, "filled_with": DEFAULT, **settings.preset_values(DEFAULT)}
    assert after(panel, event, True, "off") == wanted
    for is_on, preset in ((False, "off"), (True, "custom"), (True, NAMES[0]), (False, NAMES[0])):
        assert after(panel, event, is_on, preset) == {}


def test_touching_what_a_preset_fills_makes_it_custom_and_nothing_else_does(webui, settings):
    panel = page(webui)
    for name, control in panel.items():
        if name not in settings.FILLED:
            assert name in ("enabled", "preset", "hires", "hires_ratio", "min_pixels", "seed", "filled_with")
            continue
        for preset in NAMES:
            filled = settings.preset_values(preset)
            assert after(panel, control.heard, preset, preset, *filled.values()) == {}
            custom = {"preset": "custom", "filled_with": "custom"}
            assert after(panel, control.heard, preset, preset, *{**filled, name: None}.values()) == custom
            # not while the filling-in of another choice is under way
            assert after(panel, control.heard, preset, "custom", *{**filled, name: None}.values()) == {}
        assert after(panel, control.heard, "off", "off", *filled.values()) == {}
        assert control.behind == control.heard
    assert not any(hasattr(panel[name], "heard") for name in ("hires", "hires_ratio", "min_pixels", "seed"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("moved", [{"ratio": 0.3}, {"merge_what": "q+k+v", "query_ratio": 0.0}, {"early_ratio": 0.25}])
def test_a_control_moved_in_the_instant_before_generate_counts(settings, name, moved):
    """The page sends the preset that its controls were filled with, and has not heard yet that it is custom now."""
    values = as_custom(settings, name, preset=name, **moved)
    assert settings.read([*values, name]) == settings.read(as_custom(settings, name, **moved))
    assert settings.read([*values, name]).config(False) != settings.read([True, name]).config(False)


def test_the_picture_of_a_control_moved_just_now_names_no_preset(webui, settings):
    done = webui.job(*as_custom(settings, NAMES[0], preset=NAMES[0], ratio=0.3), NAMES[0])
    wanted = webui.job(*as_custom(settings, NAMES[0], ratio=0.3))
    assert torch.equal(done.latents, wanted.latents) and done.infotexts == wanted.infotexts
    assert "ToMe ratio: 0.3" in done.infotexts[0] and "ToMe preset" not in done.infotexts[0]


@pytest.mark.parametrize("before", ["custom", *NAMES[1:], "off"])
def test_a_preset_chosen_in_the_instant_before_generate_counts(settings, before):
    """The page sends the values that stood there before."""
    values = as_custom(settings, before, preset=NAMES[0])
    assert settings.read([*values, before]) == settings.read([True, NAMES[0]])


@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_sends_untouched_is_the_preset(settings, name):
    assert settings.read([*as_custom(settings, name, preset=name), name]) == settings.read([True, name])


def test_the_api_fills_a_short_list_with_nothing_that_makes_a_preset_custom(webui, settings):
    controls = webui.script.ui(False)
    filled = [True, NAMES[0], *(one.value for one in controls[2:])]
    assert settings.read(filled) == settings.read([True, NAMES[0]])


# --- what a picture remembers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_holds_the_values_and_the_name_and_is_pasted_as_custom(webui, settings, name, monkeypatch):
    done = webui.job(True, name, enable_hr=True)
    assert f"ToMe preset: {name}" in done.infotexts[0]
    values = pasted(webui, done.infotexts[0])
    assert values == [*as_custom(settings, name), "custom"]
    monkeypatch.setattr(settings, "preset_values", lambda name: {"ratio": 0.1})  # an update has changed them
    again = webui.job(*values, enable_hr=True)
    assert torch.equal(again.latents, done.latents) and "ToMe preset" not in again.infotexts[0]


def test_an_infotext_from_before_presets_is_custom(webui, settings):
    text = "Steps: 3, ToMe ratio: 0.35, ToMe method: bipartite, ToMe stride x: 3"
    wanted = {**settings.DEFAULTS, "enabled": True, "preset": "custom", "ratio": 0.35, "sx": 3}
    assert pasted(webui, text) == [*wanted.values(), "custom"]


# --- the X/Y/Z plot --------------------------------------------------------------------------------------------------


@pytest.fixture
def axes(webui):
    plot = types.SimpleNamespace(axis_options=[], AxisOption=AxisOption)
    webui.part("metadata").add_axes(plot)
    return {one.label: one for one in plot.axis_options}


def test_the_axis_of_presets(webui, settings, axes):
    axis = axes["[ToMe] Preset"]
    assert axis.type is str and axis.choices() == ["off", *NAMES, "custom"]
    for name in ("off", *NAMES):
        p = Processing(webui, [*as_custom(settings, NAMES[0], enabled=False, preset=NAMES[0], ratio=0.2), NAMES[0]])
        axis.apply(p, name, None)
        wanted = webui.job(True, name)
        done = webui.process(p)
        assert torch.equal(done.latents, wanted.latents) and done.infotexts == wanted.infotexts


def test_another_axis_starts_from_the_panels_preset_and_makes_it_custom(webui, settings, axes):
    p = Processing(webui, (True, NAMES[0]))
    axes["[ToMe] Early ratio"].apply(p, 0.75, None)
    done = webui.process(p)
    assert torch.equal(done.latents, webui.job(*as_custom(settings, NAMES[0], early_ratio=0.75)).latents)
    assert "ToMe preset" not in done.infotexts[0] and "ToMe early ratio: 0.75" in done.infotexts[0]
