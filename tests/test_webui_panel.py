"""The panel, the settings tab, and what comes through the API."""

from __future__ import annotations

import re

import pytest

import tome_core
from tests.webui_doubles import Processing, Webui
from tests.webui_modules import ROOT
from tome_core import describe_settings

START = tome_core.presets.DEFAULT
# up to early_ratio, early_until, proportional
FULL = ("custom", 0.5, "same", 0.5, "automatic", 0.0, 1.0, 0, "bipartite", "automatic", False, False, 2, 2, True, -1,
        -1, 500.0, True)  # fmt: skip
ENGINE = {one["name"]: one for one in describe_settings()}


@pytest.fixture
def webui(monkeypatch):
    made = Webui(monkeypatch).start()
    yield made
    made.call("script_unloaded")


def controls(webui, is_img2img=False):
    return {one.arguments["label"]: one for one in webui.script.ui(is_img2img)}


def test_building_the_panel_again_changes_nothing(webui):
    """With --api it is built three times a tab."""
    first = [(one.kind, one.value, one.arguments) for one in webui.script.ui(False)]
    assert [(one.kind, one.value, one.arguments) for one in webui.script.ui(False)] == first
    assert len({one["label"] for *_, one in first}) == len(first)


def test_labels_help_ranges_and_steps_are_the_engines(webui):
    panel = controls(webui)
    for name in ("ratio", "start_percent", "end_percent", "sx", "sy", "early_until", "query_ratio", "keep"):
        slider = panel[ENGINE[name]["label"]].arguments
        assert slider["info"] == ENGINE[name]["help"]
        wanted = [ENGINE[name][key] for key in ("minimum", "maximum", "step")]
        assert [slider[key] for key in ("minimum", "maximum", "step")] == wanted


def test_what_is_merged_is_told_in_the_words_of_its_choices(webui):
    info = controls(webui)["Merge what"].arguments
    assert "automatic" in info["choices"] and all(one.lower() in info["info"].lower() for one in info["choices"])
    assert not re.search(r"\b(qkv|kv)\b", info["info"])


def test_the_settings_tab_does_not_promise_that_a_preset_fills_it(webui):
    labels = webui.shared.opts.labels
    for tab in ("", "img2img_"):
        told = labels[f"tomecore_{tab}preset"].comment
        assert "fills in" not in told and "outweigh the defaults below" in told
    assert "fills in the settings below" in controls(webui)["Preset"].arguments["info"]


def test_no_control_starts_as_none_and_none_is_kept_in_ui_config(webui):
    for one in webui.script.ui(False):
        assert one.value is not None and one.do_not_save_to_config


def test_the_settings_tab_holds_every_default_for_both_tabs(webui):
    labels = webui.shared.opts.labels
    names = [one.name for one in webui.part("settings").FIELDS]
    assert all(f"tomecore_{name}" in labels for name in names)
    assert all(f"tomecore_img2img_{name}" in labels for name in names if not name.startswith("hires"))
    assert {one.section for one in labels.values()} == {("tome_core", "Token Merging (ToMe)")}
    assert {"tomecore_console", "tomecore_note", "tomecore_map"} <= set(labels)


def test_the_users_defaults_fill_the_panel_each_tab_with_its_own(webui):
    webui.shared.opts.saved |= {"tomecore_enabled": True, "tomecore_ratio": 0.3, "tomecore_img2img_ratio": 0.7,
                                "tomecore_method": "downsample", "tomecore_preset": "custom"}  # fmt: skip
    assert [one.value for one in webui.script.ui(False)][:3] == [True, "custom", 0.3]
    assert controls(webui)["Method"].value == controls(webui)["Method"].get_config()["value"] == "downsample"
    assert [one.value for one in webui.script.ui(True)][:3] == [False, START, 0.7]


HUGE = pytest.param(10**400, id="huge")


@pytest.mark.parametrize("nonsense", [None, "much", [], True, float("nan"), float("inf"), HUGE])
def test_a_nonsensical_saved_default_is_not_used(webui, nonsense):
    """A1111 1.10 does not start where a panel raises."""
    webui.shared.opts.saved |= {f"tomecore_{name}": nonsense for name in ("ratio", "level", "sx", "metric")}
    panel = controls(webui)
    assert panel["Ratio"].value == 0.5 and panel["Level"].value == "automatic"
    assert panel["Stride x"].value == 2 and panel["Compare"].value == "input"


def test_an_api_only_start_has_no_settings_and_works(webui):
    webui.shared.opts.saved.clear()
    webui.shared.opts.saved["token_merging_ratio"] = 0.0
    assert webui.script.ui(False)[2].value == 0.5
    assert "128 tokens" in webui.job(True, "custom").comments and not webui.errors


@pytest.mark.parametrize(("args", "message"), [
    (("yes",), "enabled='yes' is str; use true or false"),
    ((1,), "enabled=1 is int"),
    ((True, "of tomorrow"), "preset='of tomorrow' is not possible; use one of 'off', 'quality'"),
    ((True, 1), "preset=1 is not possible"),
    ((True, "custom", "0.5"), "ratio='0.5' is str; use a number from 0.0 to 1.0"),
    ((True, "custom", None), "ratio=None is NoneType"),
    ((True, "custom", 1.5), "ratio=1.5 is out of range"),
    ((True, "custom", float("nan")), "ratio=nan is out of range"),
    ((True, "custom", 0.5, "hires"), "hires='hires' is not possible; use one of 'same', 'off'"),
    ((True, "custom", 0.5, "same", -1), "hires_ratio=-1 is out of range"),
    ((True, "custom", 0.5, "same", 0.5, 1), "level=1 is not possible; use one of 'automatic', 'up to /1'"),
    ((True, "custom", 0.5, "same", 0.5, "automatic", 0.8, 0.2), "start_percent=0.8 lies after end_percent=0.2"),
    ((True, "custom", 0.5, "same", 0.5, "automatic", 0.0, 1.0, 0.5), "min_pixels=0.5 is float; use a whole number"),
    ((True, "custom", 0.5, "same", 0.5, "automatic", 0.0, 1.0, 0, {}), "method={} is not possible"),
    ((True, *FULL, "keys+values", 1, 0.5), "query_ratio=0.5 merges queries beside merge_what='k+v'"),
    ((True, *FULL[:-3], 2.0), "early_ratio=2.0 is out of range"),
    ((True, *FULL[:8], "downsample", *FULL[9:-3], 0.5), "leave it at -1"),
    ((True,) + ("custom",) * 30, "31 values were given; there are 27: enabled, preset, ratio"),
])  # fmt: skip
def test_wrong_api_values_are_told_and_the_picture_is_unmerged(webui, caplog, args, message):
    webui.part("host").logging.getLogger("_tome_core_webui").propagate = True
    done = webui.job(*args)
    assert message in done.comments and done.comments.startswith("ToMe: not merged, because a setting is wrong: ")
    assert message in done.extra_generation_params["ToMe error"]
    assert message in caplog.text
    assert done.infotexts == [""] and done.latents.equal(webui.job(False).latents)
    assert not webui.errors


def test_wrong_values_do_not_matter_while_it_is_off(webui):
    assert webui.job(False, None, "much").comments == ""


def test_whole_numbers_may_come_as_floats(webui):
    args = (True, "custom", 0.5, "same", 0.5, "automatic", 0, 1, 0.0, "bipartite", "automatic", False, False, 2.0, 2.0,
            True, -1.0)  # fmt: skip
    assert webui.job(*args).latents.equal(webui.job(True, "custom", 0.5).latents)


def test_the_report_can_be_kept_out_of_log_and_comments(webui, capsys):
    webui.shared.opts.saved |= {"tomecore_note": False, "tomecore_console": False}
    capsys.readouterr()
    assert webui.job(True).comments == ""
    assert "tokens" not in capsys.readouterr().out


def test_the_documented_argument_list_is_the_panels(webui):
    text = (ROOT / "extension" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    assert rows == [(str(n), name) for n, name in enumerate(webui.part("settings").ARGUMENTS)]


def test_a_job_without_the_first_hook_still_works(webui):
    p = Processing(webui, (True, "custom", 0.5))
    webui.hook("process", p)
    assert "ToMe ratio" in p.extra_generation_params
