"""The panel: the values with which a page starts, and its line on the next picture."""

import re
import sys
import types

import pytest

from tests.host_doubles.webui_modules import ROOT
from tests.host_doubles.webuis import Component, merges
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


def test_the_folded_panel_says_if_merging_is_on_and_no_tooltip_of_ours_is_left_out(webui, monkeypatch):
    """A box that is on whenever it is unfolded would switch merging on for a look."""
    made, kind = [], sys.modules["gradio"].Accordion
    monkeypatch.setattr(sys.modules["gradio"], "Accordion", lambda **facts: made.append(kind(**facts)) or made[-1])
    controls = panel(webui)
    titles = {True: "Token Merging (ToMe): on", False: "Token Merging (ToMe)"}
    (change,) = (event for event in controls["enabled"].followed if event["outputs"] == [made[0]])
    for is_on, title in titles.items():
        webui.shared.opts.data["tome_enabled"] = is_on
        assert made[0].get_config()["label"] == title == change["fn"](is_on)["label"]
    hidden = {webui.part("job_settings").FILLED_FOR}
    assert {name for name, control in controls.items() if not control.webui_tooltip} == hidden
    strength = controls["strength"].webui_tooltip
    assert all(word in strength for word in ("time", "picture", "Begin with 0.5", "0 is off"))


TILED = "HyperTile is on, whose tiles need every token"
FEW = "nothing merges, the picture is so small that merging would not pay"
THEIRS = {"width": 128, "height": 128, "hr-checkbox": False, "hr_scale": 1.5, "hr_resize_x": 0, "hr_resize_y": 0}


class Target(types.SimpleNamespace):
    """A double of StableDiffusionProcessingTxt2Img, which computes its hires size."""

    def calculate_target_resolution(self):
        self.hr_upscale_to_x = self.hr_resize_x or int(self.width * self.hr_scale)
        self.hr_upscale_to_y = self.hr_resize_y or int(self.height * self.hr_scale)


def make(webui, names, tab="txt2img"):
    controls = {name: Component(THEIRS.get(name)) for name in names}
    for name, control in controls.items():
        webui.call("after_component", control, f"{tab}_{name}")
    return controls


@pytest.fixture
def line(webui):
    """A function that gives the panel's line after a change; values are by name."""
    webui.put("modules.processing", StableDiffusionProcessingTxt2Img=Target)
    webui.script.ui(False)
    changed = make(webui, THEIRS)["width"].followed[0]
    names = ("by factor", *webui.part("job_settings").ARGUMENTS, *THEIRS)
    values = dict(zip(names, (control.value for control in changed["inputs"]), strict=True)) | {"enabled": True}
    return lambda **changes: changed["fn"](*(values | changes).values())


@pytest.mark.parametrize("flavour", ["a1111", "forge"])
def test_the_line_answers_for_each_pass_without_a_call_of_the_model(webui, line):
    called, hires = [], {"hr-checkbox": True, "hr_scale": 2}
    to_expect = r"about \d+% less work expected in 20 steps, so up to \d\.\d+x faster"
    webui.unet.register_forward_hook(lambda *_: called.append(1))
    assert line() == f"128x128: {FEW}"
    assert re.fullmatch(rf"first pass 128x128: {FEW}; hires pass 256x256: {to_expect}", line(**hires))
    wide = {**hires, "hr_resize_x": 256, "hr_resize_y": 128, "where": "hires pass"}
    assert line(**wide) == f"hires pass 256x128: {FEW}"
    assert re.fullmatch(f"128x128: {to_expect}", line(own=True, only_if_it_pays=False))
    assert line(enabled=False) == f"off; if enabled, 128x128: {FEW}"
    webui.unet._forward_hooks.clear()
    assert not called and not merges(webui.unet)


def test_the_line_says_what_stands_in_the_way(webui, line):
    assert line(strength=0) == "strength 0: off"
    assert line(own=True, ratio=0, early_ratio=-1).startswith("the changed settings merge nothing: ratio 0")
    assert line(where="hires pass").startswith("only the hires pass is to merge: turn on Hires. fix")
    assert "is no number from 0 to 1" in line(strength=2) and "sx=" in line(own=True, sx=99)
    assert line(width=None).startswith("0x128: ") and line(width=-64).startswith("-64x128: ")
    webui.shared.opts.data["hypertile_enable_unet"] = True
    assert line() == f"128x128: nothing merges, {TILED}"
    webui.shared.opts.data["hypertile_enable_unet"] = False
    webui.put("modules.sd_models", model_data=types.SimpleNamespace(sd_model=None))
    assert line() == "no model is loaded yet"


def test_the_line_answers_as_the_page_starts_and_after_each_job_but_not_for_a_size_by_a_factor(webui):
    webui.script.ui(True)
    controls = make(webui, ("tab_resize_to", "tab_resize_by", "height", "width"), "img2img")
    by_size, by_factor = (controls[name].followed[0]["fn"]() for name in ("tab_resize_to", "tab_resize_by"))
    (event,) = controls["width"].followed
    (at_start,) = webui.context.Context.root_block.followed
    webui.call("after_component", result := Component(), "generation_info_img2img")
    (after_each_job,) = result.followed
    assert event == at_start == after_each_job
    _, *values = (control.value for control in event["inputs"])
    assert event["fn"](by_size, *values).startswith("off; if enabled, 128x128: ")
    assert event["fn"](by_factor, *values) == "resized by a factor: the size is known only when the picture is drawn"


def test_where_is_seen_with_hires_fix_and_as_long_as_it_is_not_everywhere(webui):
    """Otherwise nothing would merge for a value that cannot be seen."""
    webui.script.ui(False)
    switch = make(webui, THEIRS)["hr-checkbox"]
    where = webui.part("ui")._panels["txt2img"].made["where"]
    (event,) = (event for event in switch.followed if event["outputs"] == [where])
    assert event["inputs"] == [switch, where]
    choices = webui.part("job_settings").WHERE
    seen = {(on, chosen): event["fn"](on, chosen)["visible"] for on in (True, False) for chosen in choices}
    assert [key for key, is_seen in seen.items() if not is_seen] == [(False, "everywhere")]
