"""The panel: the values with which a page starts, its line on the next picture, and *Measure*."""

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
    """The values with which the page starts."""
    return [controls[name].get_config()["value"] for name in names]


def test_what_is_counted_is_documented(webui):
    """The page documents every argument and every setting."""
    text = (ROOT / "docs" / "webui.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE) == list(zip("012", panel(webui), strict=False))
    assert all(f"`{key}`" in text for key in webui.shared.opts.labels)


def test_a_nonsensical_saved_setting_breaks_no_page_and_the_api_is_told_of_no_value(webui):
    """A1111 1.10 does not start if a panel raises."""
    for saved in (None, "much", [], float("nan"), 10**400):
        webui.shared.opts.data |= {f"tome_{name}": saved for name in DIAL}
        assert shown(panel(webui)) == [False, 0.5, "everywhere"]
    webui.context.Context.block = webui.context.Context.root_block  # the API builds the controls in this way
    assert {control.value for control in webui.script.ui(False)} == {None}


def test_a_page_starts_with_the_settings_unless_the_user_saved_a_default_of_the_panel(webui):
    wish, controls = webui.part("job_settings"), panel(webui)
    fields = (wish.FILLED_FOR, *form.NAMES)
    webui.shared.opts.data |= {"tome_enabled": True, "tome_strength": 0.7}
    assert shown(controls) == [True, 0.7, "everywhere"]
    assert shown(controls, fields) == [0.7, *wish.base_of(0.7).values()]
    controls["sx"].value = 2
    for saved, strength in ((0.3, 0.3), ("much", 0.5), (None, 0.7)):  # the panel's own default, which may be wrong
        controls["strength"].value = saved
        assert shown(controls) == [True, strength, "everywhere"]
        assert shown(controls, fields) == [strength, *{**wish.base_of(strength), "sx": 2}.values()]


# --- the line, and *Measure* ------------------------------------------------------------------------------------------

TILED = "HyperTile is on, whose tiles need every token"
FEW = "nothing merges, so few tokens that merging would not pay"
THEIRS = {"width": 128, "height": 128, "hr-checkbox": False, "hr_scale": 1.5, "hr_resize_x": 0, "hr_resize_y": 0}


class Target(types.SimpleNamespace):
    """A double of StableDiffusionProcessingTxt2Img, which computes its hires size."""

    def calculate_target_resolution(self):
        self.hr_upscale_to_x = self.hr_resize_x or int(self.width * self.hr_scale)
        self.hr_upscale_to_y = self.hr_resize_y or int(self.height * self.hr_scale)


@pytest.fixture
def place(monkeypatch, tmp_path):
    """The webui's folder for files. A test requests it before the webui, which reads it at its start."""
    monkeypatch.setitem(sys.modules, "modules.paths_internal", types.SimpleNamespace(data_path=str(tmp_path)))
    return tmp_path


@pytest.fixture
def measured(place, webui, monkeypatch):
    """The measurements, in which a call takes 1 without merging and half with it."""
    plain = webui.engine("measuring.measure").time_calls
    double = mock.Mock(side_effect=lambda *args, **more: (1.0, 0.5, plain(*args[:3], steps=2, rounds=1)[2]))
    monkeypatch.setattr(webui.engine("measuring.measured"), "time_calls", double)
    return double.call_args_list


def make(webui, names, tab="txt2img"):
    """Make the webui's own controls."""
    controls = {name: Component(THEIRS.get(name)) for name in names}
    for name, control in controls.items():
        webui.call("after_component", control, f"{tab}_{name}")
    return controls


@pytest.fixture
def line(webui):
    """A function that gives the panel's line after a change, or after a click of *Measure*; values are by name."""
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
    assert line(own=True, ratio=0, early_ratio=-1).startswith("the changed settings merge nothing: ratio 0")
    assert line(where="hires pass") == "only the hires pass is to merge: turn on Hires. fix"
    assert "is no number from 0 to 1" in line(strength=2) and "sx=" in line(own=True, sx=99)
    assert line(width=None).startswith("0x128: ")
    webui.shared.opts.data["hypertile_enable_unet"] = True
    assert line(measure=True) == f"128x128: nothing merges, {TILED}"
    webui.shared.opts.data["hypertile_enable_unet"] = False
    webui.put("modules.call_queue", queue_lock=(lock := threading.Lock()))
    with lock:
        assert line(measure=True) == "128x128: a picture is being made; measure when it is done"
    webui.put("modules.sd_models", model_data=types.SimpleNamespace(sd_model=None))
    assert line(measure=True) == "no model is loaded yet" and not measured


def test_a_measurement_that_fails_is_told_and_the_card_is_free_again(webui, line, monkeypatch):
    webui.put("modules.call_queue", queue_lock=(lock := threading.Lock()))
    fail = mock.Mock(side_effect=RuntimeError("out of memory\nand more"))
    monkeypatch.setattr(webui.engine("measuring.measured"), "time_calls", fail)
    assert line(measure=True) == "128x128: out of memory" and not lock.locked()


def test_a_size_by_a_factor_is_not_told_as_the_other_tabs(webui):
    webui.script.ui(True)
    controls = make(webui, ("tab_resize_to", "tab_resize_by", "height", "width"), "img2img")
    by_size, by_factor = (controls[name].followed[0]["fn"]() for name in ("tab_resize_to", "tab_resize_by"))
    (event,) = controls["width"].followed
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
