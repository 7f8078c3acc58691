"""What a picture remembers, in one key, and what becomes of the panel when it is pasted."""

from __future__ import annotations

import re
import types

import pytest

from tests.webui_doubles import Processing, custom, report
from tests.webui_modules import ROOT
from tome_core import form

# the webui's own pattern and its splitting of values such as 2x2, as facts
PAIR = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
# whole numbers, which a page may give as 30.0
WISHES = [(True, 1), (True, 0.33, "hires pass"), (custom(where="first pass", sx=3, keep=30, level="up to /2"),)]
NONSENSE = ["", "much", "0.5 v1", "nan", "1e400", "2", "-1", "9" * 5000]


@pytest.fixture(autouse=True)
def heard(webui):
    webui.part("host").logging.getLogger("_tome_core_webui").propagate = True


def parsed(text):
    pairs = dict(PAIR.findall(text))
    assert not [value for value in pairs.values() if re.fullmatch(r"\d+x\d+", value)]
    return pairs


def pasted(webui, text, on_page=True):
    """Control values after a paste into a fresh panel, converted as the webui does it; the API tells no listener."""
    controls = webui.script.ui(False)
    values, parameters = [one.value for one in controls], parsed(text)
    if on_page:
        webui.call("infotext_pasted", text, parameters)
    for control, key in webui.script.infotext_fields:
        value = key(parameters)
        if value is None:
            continue
        kind = type(control.value)
        value = float(value) if kind is int else kind(value)
        values[next(n for n, one in enumerate(controls) if one is control)] = value
    return values


def written(webui, *args):
    return f"Steps: 3, ToMe: {webui.part('infotext').text_of(wished(webui, *args))}"


def wished(webui, *args):
    return webui.part("wish").read(args, webui.part("options").of_dial)


@pytest.mark.parametrize("args", WISHES)
def test_a_pasted_picture_brings_back_the_very_same_panel_and_wish(webui, args):
    text = written(webui, *args)
    panel = pasted(webui, text)
    assert wished(webui, *panel) == wished(webui, *args)
    assert written(webui, *panel) == text and pasted(webui, written(webui, *panel)) == panel
    assert '"' not in text and len(parsed(text)) == 2, "nobody has to quote it"


def test_a_paste_asks_for_the_layout_of_the_model_once(webui, monkeypatch):
    text, asked = written(webui, True, 0.5), []
    monkeypatch.setattr(webui.part("host"), "layout", lambda: asked.append(1) or "sd")
    assert pasted(webui, text)[:2] == [True, 0.5] and asked == [1]


def test_a_merged_picture_has_one_key_and_one_that_did_not_merge_none(webui):
    done = webui.job({"enabled": True, "strength": 0.7, "where": "first pass", "only_if_it_pays": False})
    assert done.infotexts == ["ToMe: 0.7; first pass; only_if_it_pays=False"]
    p = Processing(webui, (True, 0.7))
    assert webui.process(p).infotexts == [""], "so few tokens"
    assert p.params_txt == "ToMe: 0.7", "of a picture to come it says what was asked"
    wish = {"enabled": True, "strength": 0.7, "where": "hires pass", "only_if_it_pays": False}
    half = webui.job(wish, enable_hr=True)
    assert half.infotexts[0].startswith("ToMe: 0.7; hires pass"), "one pass of it merged"


def test_a_picture_without_us_turns_us_off_and_leaves_the_rest_alone(webui):
    start = [one.value for one in webui.script.ui(False)]
    assert pasted(webui, "Steps: 3, Token merging ratio: 0.5") == start and start[0] is False


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_ignored_with_a_line_and_leaves_the_panel_alone(webui, caplog, text):
    assert pasted(webui, f"Steps: 3, ToMe: {text}") == [one.value for one in webui.script.ui(False)]
    assert "in the pasted infotext is ignored" in caplog.text


@pytest.mark.parametrize("text", NONSENSE[1:])
def test_over_the_api_it_is_the_jobs_wrong_value_and_told_in_the_answer(webui, text):
    done = webui.job(*pasted(webui, f"Steps: 3, ToMe: {text}", on_page=False))
    assert report(done)["merged"] is False and "strength=nan is no number from 0 to 1" in report(done)["line"]


def test_a_part_that_makes_no_sense_is_ignored_and_the_rest_is_pasted(webui, caplog):
    text = "Steps: 3, ToMe: 0.7; sx=1e400; level=up to /3; hues=2; hires pass; keep=30"
    wish = wished(webui, *pasted(webui, text))
    assert (wish.strength, wish.where, dict(wish.changes)) == (0.7, "hires pass", {"keep": 30.0})
    told = caplog.text
    assert "sx=inf" in told and "up to /3" in told and "'hues=2' is no setting" in told


class AxisOption:
    def __init__(self, label, type, apply, choices=None, confirm=None):
        self.label, self.type, self.apply, self.choices = label, type, apply, choices


def test_the_plots_axes_reach_the_job_and_are_added_once(webui):
    plot = types.SimpleNamespace(axis_options=[], AxisOption=AxisOption)
    data = types.SimpleNamespace(script_class=type("Script", (), {"__module__": "xyz_grid.py"}), module=plot)
    webui.scripts.scripts_data.append(data)
    webui.call("before_ui")
    webui.call("before_ui")
    axes = {one.label: one for one in plot.axis_options}
    assert len(axes) == len(plot.axis_options) and list(axes)[:2] == ["[ToMe] Strength", "[ToMe] Where"]
    assert axes["[ToMe] Where"].choices() == ["everywhere", "first pass", "hires pass"]
    p = Processing(webui, (False,))
    axes["[ToMe] Strength"].apply(p, 0.25, None)
    webui.process(p)
    assert p.params_txt == "ToMe: 0.25"
    axes["[ToMe] Strength"].apply(p, 0.0, None)
    assert webui.process(p).latents.equal(webui.job(False).latents)


def test_what_is_counted(webui):
    """Controls at first sight, settings, infotext keys."""
    assert len(webui.shared.opts.labels) == 4
    assert {one.section for one in webui.shared.opts.labels.values()} == {("tome", "Token Merging (ToMe)")}
    assert {one.category_id for one in webui.shared.opts.labels.values()} == {"sd"}, "beside Optimizations"
    webui.script.ui(False)
    assert webui.script.paste_field_names == ["ToMe", "ToMe strength"]  # the latter is written by SD.Next alone
    text = (ROOT / "docs" / "webui.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    assert rows == [(str(n), name) for n, name in enumerate(webui.part("wish").DIAL)]
    assert all(f"`{key}`" in text for key in webui.shared.opts.labels)
    (named,) = re.findall(r"`merge_what` is ([^,]*),", text)
    assert tuple(re.findall(r'"([^"]+)"', named)) == form.field("merge_what").choices


def test_a_call_that_says_nothing_is_told_from_one_that_says_the_defaults(webui):
    assert [one.value for one in webui.script.ui(False)][:3] == [False, 0.5, "everywhere"]
    webui.context.Context.block = webui.context.Context.root_block  # the API builds the controls so
    assert {one.value for one in webui.script.ui(False)} == {None}


@pytest.mark.parametrize("saved", [None, "much", [], float("nan"), float("inf"), 10**400])
def test_a_nonsensical_saved_setting_breaks_no_page(webui, saved):
    """A1111 1.10 does not start where a panel raises."""
    webui.shared.opts.data |= dict.fromkeys(("tome_enabled", "tome_strength", "tome_where"), saved)
    assert [one.get_config()["value"] for one in webui.script.ui(False)][:3] == [False, 0.5, "everywhere"]


def test_a_page_starts_with_the_settings_unless_the_user_saved_a_default_of_the_panel(webui):
    webui.shared.opts.data |= {"tome_enabled": True, "tome_strength": 0.7}
    controls = webui.script.ui(False)
    assert [one.get_config()["value"] for one in controls][:3] == [True, 0.7, "everywhere"]
    controls[1].value = 0.3
    assert controls[1].get_config()["value"] == 0.3


def test_the_fields_start_with_what_the_strength_stands_for_unless_the_user_saved_another_default(webui):
    wish = webui.part("wish")
    controls = dict(zip(wish.ARGUMENTS, webui.script.ui(False), strict=True))

    def shown():
        return {name: controls[name].get_config()["value"] for name in (wish.FILLED_FOR, *form.NAMES)}

    webui.shared.opts.data |= {"tome_strength": 0.7}
    assert shown() == {wish.FILLED_FOR: 0.7, **wish.base_of(0.7)}
    controls["sx"].value, controls["strength"].value = 2, 0.3
    assert shown() == {wish.FILLED_FOR: 0.3, **wish.base_of(0.3), "sx": 2}
    for saved, strength in ((7, 0.5), ("much", 0.5), (None, 0.7)):
        controls["strength"].value = saved
        assert shown() == {wish.FILLED_FOR: strength, **wish.base_of(strength), "sx": 2}
        assert controls["strength"].get_config()["value"] == strength
