"""The panel and the settings: what a page starts with, what moves what, what the line says, and *Measure*."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import types
from unittest import mock

import pytest
import torch

from tests.webui_doubles import Component, merges
from tests.webui_modules import ROOT
from tome_core import form

DIAL = ("enabled", "strength", "where")


def panel(webui):
    """The controls by name."""
    return dict(zip(webui.part("job_settings").ARGUMENTS, webui.script.ui(False), strict=True))


def shown(controls, names=DIAL):
    """What the page starts with."""
    return [controls[name].get_config()["value"] for name in names]


# --- what there is, and what it starts with ---------------------------------------------------------------------------


def test_what_is_counted_is_documented(webui):
    """Settings, infotext keys, arguments."""
    labels = webui.shared.opts.labels
    assert len(labels) == 4 and {info.category_id for info in labels.values()} == {"sd"}, "beside Optimizations"
    assert tuple(panel(webui))[:3] == DIAL
    assert webui.script.paste_field_names == ["ToMe", "ToMe strength"]  # the latter is written by SD.Next alone
    text = (ROOT / "docs" / "webui.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE) == list(zip("012", DIAL, strict=True))
    assert all(f"`{key}`" in text for key in labels)


def test_a_nonsensical_saved_setting_breaks_no_page_and_the_api_is_told_of_no_value(webui):
    """A1111 1.10 does not start if a panel raises."""
    for saved in (None, "much", [], float("nan"), 10**400):
        webui.shared.opts.data |= {f"tome_{name}": saved for name in DIAL}
        assert shown(panel(webui)) == [False, 0.5, "everywhere"]
    webui.context.Context.block = webui.context.Context.root_block  # the API builds the controls so
    assert {control.value for control in webui.script.ui(False)} == {None}


def test_a_page_starts_with_the_settings_unless_the_user_saved_a_default_of_the_panel(webui):
    wish, controls = webui.part("job_settings"), panel(webui)
    fields = (wish.FILLED_FOR, *form.NAMES)
    webui.shared.opts.data |= {"tome_enabled": True, "tome_strength": 0.7}
    assert shown(controls) == [True, 0.7, "everywhere"]
    assert shown(controls, fields) == [0.7, *wish.base_of(0.7).values()]
    controls["sx"].value = 2
    # a saved strength that makes no sense is as none, and one that was never saved is the setting's
    for saved, strength in ((0.3, 0.3), (7, 0.5), ("much", 0.5), (None, 0.7)):
        controls["strength"].value = saved
        assert shown(controls) == [True, strength, "everywhere"]
        assert shown(controls, fields) == [strength, *{**wish.base_of(strength), "sx": 2}.values()]


# --- what moves what --------------------------------------------------------------------------------------------------


def test_a_setting_moves_the_panels_of_the_latest_page_alone(webui, monkeypatch):
    for _ in range(2):
        webui.script.ui(False)
        setting = Component(0.5)
        webui.call("after_component", setting, "setting_tome_strength")
        (link,) = setting.followed
        assert link["inputs"] == [setting] and len(link["outputs"]) == 1, "one panel of this tab"
        assert link["fn"](0.7) == 0.7, "gradio takes a list for the value of one output"
    webui.script.ui(True)
    webui.call("after_component", setting, "setting_tome_strength")
    assert setting.followed[-1]["fn"](0.7) == [0.7, 0.7]
    monkeypatch.setattr(webui.context.Context, "root_block", None)  # gradio 4 makes a control anew for an answer
    for elem_id in ("setting_tome_strength", "txt2img_width"):
        again = Component(0.5)
        webui.call("after_component", again, elem_id)
        assert not again.followed


def test_the_quicksettings_switch_brings_what_stands_beside_it(webui):
    controls, switch = panel(webui), Component(False)
    webui.call("after_component", switch, "setting_tome_enabled")
    (brings,) = [event for event in switch.followed if event["outputs"] == [controls["strength"], controls["where"]]]
    webui.shared.opts.data |= {"tome_strength": 0.7, "quicksettings_list": ["tome_enabled", "tome_strength"]}
    assert brings["fn"](True) == [{"value": 0.7}, {}] and brings["fn"](False) == [{}, {}]


# --- the line, and *Measure* ------------------------------------------------------------------------------------------

TILED = "HyperTile is on, whose tiles need every token"
FEW = "nothing merges, so few tokens that merging would not pay"
THEIRS = {"width": 128, "height": 128, "hr-checkbox": False, "hr_scale": 1.5, "hr_resize_x": 0, "hr_resize_y": 0}


class Target(types.SimpleNamespace):
    """StableDiffusionProcessingTxt2Img, which knows its own hires size."""

    def calculate_target_resolution(self):
        self.hr_upscale_to_x = self.hr_resize_x or int(self.width * self.hr_scale)
        self.hr_upscale_to_y = self.hr_resize_y or int(self.height * self.hr_scale)


@pytest.fixture
def place(monkeypatch, tmp_path):
    """The webui's folder for files. A test asks for it before the webui, which looks for it at its start."""
    monkeypatch.setitem(sys.modules, "modules.paths_internal", types.SimpleNamespace(data_path=str(tmp_path)))
    return tmp_path


@pytest.fixture
def measured(place, webui, monkeypatch):
    """The measurements: a call takes 1 without merging and half with it."""
    plain = webui.engine("measuring.measure").time_calls
    double = mock.Mock(side_effect=lambda *args, **more: (1.0, 0.5, plain(*args[:3], steps=2, rounds=1)[2]))
    monkeypatch.setattr(webui.engine("measuring.measured"), "time_calls", double)
    return double.call_args_list


def make(webui, names, tab="txt2img"):
    """The webui makes controls of its own."""
    made = {name: Component(THEIRS.get(name)) for name in names}
    for name, control in made.items():
        webui.call("after_component", control, f"{tab}_{name}")
    return made


@pytest.fixture
def line(webui):
    """It gives what the panel's line says after a change, or after a click of *Measure*; values are by name."""
    webui.put("modules.processing", StableDiffusionProcessingTxt2Img=Target)
    webui.script.ui(False)
    changed = make(webui, THEIRS)["width"].followed[0]
    (clicked,) = webui.part("ui")._panels["txt2img"].made["measure"].followed
    names = ("by factor", *webui.part("job_settings").ARGUMENTS, *THEIRS)
    values = dict(zip(names, (control.value for control in changed["inputs"]), strict=True))
    return lambda measure=False, **changes: (clicked if measure else changed)["fn"](*(values | changes).values())


@pytest.mark.parametrize("flavour", ["a1111", "forge"])
def test_the_line_answers_for_each_pass_and_measures_on_request_alone(webui, measured, line):
    hires, before = {"hr-checkbox": True}, webui.job().latents
    assert line() == f"128x128: {FEW}" and not measured
    assert line(measure=True) == line() == "128x128: about 2.0x faster" and len(measured) == 1
    assert line(**hires) == f"first pass 128x128: about 2.0x faster; hires pass 192x192: {FEW}"
    wide = {**hires, "hr_resize_x": 256, "hr_resize_y": 128, "where": "hires pass"}
    assert line(**wide) == f"hires pass 256x128: {FEW}"
    assert line(**hires, measure=True).count("about 2.0x faster") == 2 == len(measured), "each pass"
    assert line(strength=0.9) == f"128x128: {FEW}", "another strength is another question"
    assert not merges(webui.unet) and torch.equal(webui.job().latents, before)


def test_the_line_says_what_stands_in_the_way(webui, measured, line):
    assert line(strength=0) == "strength 0: off"
    assert line(where="hires pass") == "only the hires pass is to merge: turn on Hires. fix"
    assert "is no number from 0 to 1" in line(strength=2) and "sx=" in line(own=True, sx=99)
    assert line(width=None).startswith("0x128: ")
    webui.shared.opts.data["hypertile_enable_unet"] = True
    assert line(measure=True) == f"128x128: nothing merges, {TILED}"
    webui.shared.opts.data["hypertile_enable_unet"] = False
    params = vars(webui.unet)["__webui_hypertile_params"] = types.SimpleNamespace(enabled=True)  # of the last job
    assert line() == f"128x128: {FEW}"
    assert line(measure=True) == f"128x128: not measured, {TILED}"
    params.enabled = False
    webui.put("modules.call_queue", queue_lock=(lock := threading.Lock()))
    with lock:
        assert line(measure=True) == "128x128: a picture is being made; measure when it is done"
    webui.put("modules.sd_models", model_data=types.SimpleNamespace(sd_model=None))
    assert line(measure=True) == "no model is loaded yet" and not measured


@pytest.mark.parametrize("flavour", ["a1111", "forge"])
def test_what_fails_is_told_and_the_card_is_free_again(webui, line, monkeypatch):
    def swallowing(run):
        with contextlib.suppress(Exception):
            run()

    webui.put("modules.call_queue", queue_lock=(lock := threading.Lock()))
    if webui.flavour == "forge":
        webui.put("modules_forge.main_thread", run_and_wait_result=swallowing)
    fail = mock.Mock(side_effect=RuntimeError("out of memory\nand more"))
    monkeypatch.setattr(webui.engine("measuring.measured"), "time_calls", fail)
    assert line(measure=True) == "128x128: out of memory" and not lock.locked()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_panel_is_linked_before_or_after_theirs_and_a_size_by_a_factor_is_not_told_as_the_other_tabs(webui, is_first):
    if is_first:
        webui.script.ui(True)
    theirs = make(webui, ("tab_resize_to", "tab_resize_by", "height", "width"), "img2img")
    if not is_first:
        webui.script.ui(True)
    by_size, by_factor = (theirs[name].followed[0]["fn"]() for name in ("tab_resize_to", "tab_resize_by"))
    (event,) = theirs["width"].followed
    _, *values = (control.value for control in event["inputs"])
    assert event["fn"](by_size, *values).startswith("128x128: ")
    assert event["fn"](by_factor, *values) == "resized by a factor: the size is known only when the picture is drawn"


@pytest.mark.parametrize("flavour", ["a1111", "forge"])
def test_what_pays_merges_from_the_next_picture_on_and_after_a_restart(place, webui, measured, line):
    plain = webui.job().latents
    first = webui.job(True, 0.5)
    assert torch.equal(first.latents, plain) and "so few tokens" in first.comments
    assert not measured and not list(place.rglob("*.json")), "nothing is measured unasked"
    assert line(measure=True, width=64, height=64) == "64x64: about 2.0x faster"
    second = webui.job(True, 0.5)
    assert "about 2.0x faster (measured here)" in second.comments and not torch.equal(second.latents, plain)
    (file,) = place.rglob("*.json")
    assert file.parent.name == "cache"
    webui.reload()
    assert torch.equal(webui.job(True, 0.5).latents, second.latents)
