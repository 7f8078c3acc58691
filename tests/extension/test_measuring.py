"""Whether merging pays is measured where the user asks for it, and kept where the webui keeps such."""

from __future__ import annotations

import contextlib
import sys
import threading
import types

import pytest
import torch

import tome_core
from tests.webui_doubles import FLAVOURS, Component, Processing, merges


@pytest.fixture(params=FLAVOURS)
def flavour(request, monkeypatch, tmp_path):
    """Of a webui that has a place for files."""
    monkeypatch.setitem(sys.modules, "modules.paths_internal", types.SimpleNamespace(data_path=str(tmp_path)))
    return request.param


@pytest.fixture
def costs(webui, monkeypatch):
    """Says what a merged call takes, an unmerged one 1; counts the measurements."""
    measured, made = webui.engine("measuring.measured"), []

    def say(merged):
        plain = webui.engine("measuring.measure").time_calls

        def time_calls(*args, **more):
            saved = plain(*args[:3], steps=2, rounds=1)[2]
            made.append(args)
            return 1.0, merged, saved

        monkeypatch.setattr(measured, "time_calls", time_calls)
        return made

    return say


def test_nothing_is_measured_unasked(webui, costs, tmp_path):
    made = costs(0.5)
    webui.job(True, 0.5)
    assert not made and not list(tmp_path.rglob("*.json"))


def test_a_gain_belongs_to_the_engines_version_whatever_the_webui_calls_its_package(webui):
    place = types.SimpleNamespace(path="", halvings=0, block=None)
    config = webui.engine("settings.config").MergeConfig()
    assert webui.engine("measuring.pays").about(torch.nn.Module(), [place], config)[-1] == tome_core.__version__


def measured(webui, *sizes):
    """What the panel's button says at strength 0.5, of a pass or of both."""
    webui.script.ui(False)  # imports it
    wish = webui.part("wish").read((True, 0.5), webui.part("options").of_dial)
    return webui.part("measuring").answer(wish, dict(enumerate(sizes)), measure=True)


@pytest.mark.slow
def test_what_pays_merges_from_the_next_picture_on_and_after_a_restart(webui, costs, tmp_path):
    made, side = costs(0.5), Processing.size * 8
    plain = webui.job().latents
    first = webui.job(True, 0.5)
    assert torch.equal(first.latents, plain) and "so few tokens" in first.comments
    for _ in range(2):
        assert measured(webui, (side, side)) == f"{side}x{side}: about 2.0x faster"
    second, third = webui.job(True, 0.5), webui.job(True, 0.5)
    assert len(made) == 1, "once"
    assert not torch.equal(second.latents, plain) and torch.equal(second.latents, third.latents)
    assert "about 2.0x faster (measured here)" in second.comments
    (file,) = tmp_path.rglob("*.json")
    assert file.parent.name == "cache"
    webui.reload()
    assert torch.equal(webui.job(True, 0.5).latents, second.latents)


@pytest.mark.slow
def test_passes_are_measured_each_and_what_fails_is_told(webui, costs, monkeypatch):
    made = costs(0.5)
    assert measured(webui, (128, 128), (192, 192)).count("about 2.0x faster") == 2 == len(made)

    def fails(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(webui.engine("measuring.measured"), "time_calls", fails)
    assert measured(webui, (96, 96)) == "96x96: out of memory"


# --- the panel's line -------------------------------------------------------------------------------------------------


class Target(types.SimpleNamespace):
    """StableDiffusionProcessingTxt2Img, which knows its own hires size."""

    def calculate_target_resolution(self):
        self.hr_upscale_to_x = self.hr_resize_x or int(self.width * self.hr_scale)
        self.hr_upscale_to_y = self.hr_resize_y or int(self.height * self.hr_scale)


FEW = "will not merge, so few tokens that merging would not pay"
THEIRS = {"width": 128, "height": 128, "hr-checkbox": False, "hr_scale": 1.5, "hr_resize_x": 0, "hr_resize_y": 0}


@pytest.fixture(params=[False, True], ids=["theirs before ours", "theirs after ours"])
def line(request, webui):
    """Gives what the panel's line says: told on any change, or measured by its button; values by name."""
    webui.put("modules.processing", StableDiffusionProcessingTxt2Img=Target)
    theirs = {name: Component(value) for name, value in THEIRS.items()}
    Component.made.clear()
    steps = [lambda: [webui.call("after_component", one, f"txt2img_{name}") for name, one in reversed(theirs.items())],
             lambda: webui.script.ui(False)]  # fmt: skip
    for step in reversed(steps) if request.param else steps:
        step()
    button = next(one for one in Component.made if one.kind == "Button")
    (told,) = theirs["width"].followed
    assert told["inputs"] == button.clicked["inputs"] and told["inputs"][-6:] == [*theirs.values()]

    def ask(measure=False, **changes):
        _, *ours = (one.value for one in told["inputs"])
        values = dict(zip(webui.part("wish").ARGUMENTS, ours, strict=False)) | THEIRS
        return (button.clicked if measure else told)["fn"](0, *(values | changes).values())

    return ask


BOTH_GRADIOS = pytest.mark.parametrize("flavour", ["a1111", "forge"], indirect=True)


@BOTH_GRADIOS
def test_the_line_answers_for_each_pass_and_measures_on_request_alone(webui, line, costs):
    made, hires = costs(0.5), {"hr-checkbox": True}
    before = webui.job().latents
    assert line() == f"128x128: {FEW}" and not made
    assert line(measure=True) == line() == "128x128: about 2.0x faster" and len(made) == 1
    assert line(**hires) == f"first pass 128x128: about 2.0x faster; hires pass 192x192: {FEW}"
    assert line(**hires, where="hires pass") == f"hires pass 192x192: {FEW}"
    wide = {**hires, "hr_resize_x": 256, "hr_resize_y": 128, "where": "hires pass"}
    assert line(**wide) == f"hires pass 256x128: {FEW}"
    assert line(strength=0.9) == f"128x128: {FEW}", "another strength is another question"
    assert not merges(webui.unet) and torch.equal(webui.job().latents, before)


@BOTH_GRADIOS
def test_the_line_says_what_stands_in_the_way(webui, line, costs, monkeypatch):
    made = costs(0.5)
    assert line(strength=0) == "strength 0: off"
    assert line(where="hires pass") == "only the hires pass is to merge: turn on Hires. fix"
    assert "is no number from 0 to 1" in line(strength=2) and "sx=" in line(own=True, sx=99)
    assert line(width=None).startswith("0x128: ")
    webui.shared.opts.data["hypertile_enable_unet"] = True
    assert line(measure=True) == "128x128: nothing merges, HyperTile is on, whose tiles need every token"
    webui.shared.opts.data["hypertile_enable_unet"] = False
    params = vars(webui.unet)["__webui_hypertile_params"] = types.SimpleNamespace(enabled=True)  # of the last job
    assert line() == f"128x128: {FEW}"
    assert line(measure=True) == "128x128: not measured, HyperTile is on, whose tiles need every token"
    params.enabled = False
    lock = threading.Lock()
    webui.put("modules.call_queue", queue_lock=lock)
    with lock:
        assert line(measure=True) == "128x128: a picture is being made; measure when it is done"
    monkeypatch.setattr(webui.shared, "sd_model", None)
    webui.put("modules.sd_models", model_data=types.SimpleNamespace(sd_model=None))
    assert line(measure=True) == "no model is loaded yet" and not made


@pytest.mark.parametrize("flavour", ["forge"], indirect=True)
def test_forges_main_thread_measures_and_what_it_swallows_is_told(webui, line, costs):
    made, asked = costs(0.5), []

    def run_and_wait_result(function):
        asked.append(function)
        with contextlib.suppress(Exception):
            function()

    webui.put("modules_forge.main_thread", run_and_wait_result=run_and_wait_result)
    assert line(measure=True) == "128x128: about 2.0x faster" and len(made) == len(asked) == 1
    with pytest.raises(ZeroDivisionError):
        webui.part("host").on_the_card(lambda: 1 / 0)


def test_a_page_made_anew_is_linked_anew_and_the_old_one_is_let_go(webui):
    for _ in range(2):
        webui.script.ui(False)
        setting = Component(0.5)
        webui.call("after_component", setting, "setting_tome_strength")
        (link,) = setting.followed
        assert link["inputs"] == [setting] and len(link["outputs"]) == 1, "one panel of this tab"
        assert link["fn"](0.7) == [0.7]


def test_what_gradio_4_makes_anew_for_an_answer_is_no_part_of_a_page(webui, monkeypatch):
    webui.script.ui(False)
    monkeypatch.setattr(webui.context.Context, "root_block", None)  # Forge Neo's page asks for its settings as it loads
    for elem_id in ("setting_tome_strength", "txt2img_width"):
        again = Component(0.5)
        webui.call("after_component", again, elem_id)
        assert not again.followed


def followed_by(control):
    """What a change of it sets, by the functions that answer."""
    return [(one["fn"], one.get("outputs")) for one in control.followed]


def test_what_is_typed_as_an_experts_turns_own_settings_on(webui):
    controls = dict(zip(webui.part("wish").ARGUMENTS, webui.script.ui(False), strict=True))
    for name in webui.part("wish").form.NAMES:
        (turned,) = [one for one in controls[name].typed if one["outputs"] == [controls["own"]]]
        assert turned["fn"]() is True


def test_the_quicksettings_switch_brings_what_stands_beside_it(webui):
    webui.script.ui(False)
    switch = Component(False)
    webui.call("after_component", switch, "setting_tome_enabled")
    (beside,) = [fn for fn, outputs in followed_by(switch) if len(outputs) == 2]
    webui.shared.opts.data |= {"tome_strength": 0.7, "quicksettings_list": ["tome_enabled", "tome_strength"]}
    assert beside(True) == [{"value": 0.7}, {}] and beside(False) == [{}, {}]


def test_a_size_by_a_factor_is_not_told_as_the_other_tabs(webui, line, costs):
    theirs = {name: Component(128) for name in ("width", "height")}
    tabs = {name: Component() for name in ("img2img_tab_resize_to", "img2img_tab_resize_by")}
    for name, one in {**{f"img2img_{name}": one for name, one in theirs.items()}, **tabs}.items():
        one.select = lambda one=one, **arguments: one.followed.append(arguments)
        webui.call("after_component", one, name)
    webui.script.ui(True)
    assert [one.followed[-1]["fn"]() for one in tabs.values()] == [0, 1]
    told = theirs["width"].followed[0]
    values = [one.value for one in told["inputs"]]
    assert told["fn"](*values).startswith("128x128: ")
    assert told["fn"](1, *values[1:]) == "resized by a factor: its size is known when the picture is drawn"
