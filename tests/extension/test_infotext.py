"""The settings in a picture's infotext, under one key; the panel after a paste; and the axes of the X/Y/Z plot."""

import re
import types

import pytest

from tests.host_doubles.webuis import ON, Processing, custom, report

# the webui's own pattern, and its splitting of values such as 2x2
PAIR = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
# whole numbers, which a page may give as 30.0
WISHES = [(True, 1), (True, 0.33, "hires pass"), (custom(where="first pass", sx=3, keep=30, level="up to /2"),)]


def parsed(text):
    pairs = dict(PAIR.findall(text))
    assert not [value for value in pairs.values() if re.fullmatch(r"\d+x\d+", value)]
    return pairs


def pasted(webui, text, on_page=True):
    """Control values after a paste into a fresh panel, converted as the webui does it; the API calls no listener."""
    controls = webui.script.ui(False)
    values, parameters = {control: control.value for control in controls}, parsed(text)
    if on_page:
        webui.call("infotext_pasted", text, parameters)
    for control, read in webui.script.infotext_fields:
        value, kind = read(parameters), type(control.value)
        if value is not None and (on_page or not isinstance(value, kind)):  # the API keeps what fits
            values[control] = float(value) if kind is int else kind(value)
        elif value is not None:
            values[control] = value
    return list(values.values())


def wished(webui, *args):
    return webui.part("job_settings").read(args, webui.part("settings_tab").default_of)


def test_a_pasted_picture_brings_back_the_very_same_panel_and_wish(webui):
    for wish in (wished(webui, *args) for args in WISHES):
        text = f"Steps: 3, ToMe: {webui.part('infotext').text_of(wish)}"
        assert wished(webui, *pasted(webui, text)) == wish
        assert '"' not in text and len(parsed(text)) == 2, "it needs no quotes"


def test_a_merged_picture_has_one_key_and_one_that_did_not_merge_none(webui):
    ungated = {"enabled": True, "strength": 0.7, "only_if_it_pays": False}
    job = webui.job({**ungated, "where": "first pass"})
    assert job.infotexts == ["ToMe: 0.7; first pass; only_if_it_pays=False"]
    p = Processing(webui, (True, 0.7))
    assert webui.process(p).infotexts == [""], "so small"
    assert p.params_txt == "ToMe: 0.7", "of a picture to come it says what was asked"
    half = webui.job({**ungated, "where": "hires pass"}, enable_hr=True)
    assert half.infotexts[0].startswith("ToMe: 0.7; hires pass"), "one pass of it merged"


def test_a_picture_without_us_turns_us_off_and_leaves_the_rest_alone(webui):
    parameters, value = parsed("Steps: 3, Token merging ratio: 0.5"), webui.part("infotext").Paste().value
    names = webui.part("job_settings").ARGUMENTS
    assert [value(name, parameters) for name in names] == [False, *[None] * (len(names) - 1)]


def test_a_text_that_makes_no_sense_leaves_the_page_alone_and_is_the_apis_wrong_value(webui, log):
    start = [control.value for control in webui.script.ui(False)]
    for wrong in ("much", "nan", "-1", "9" * 5000):
        log.clear()
        written, text = f"{wrong[:9]}", f"Steps: 3, ToMe: {wrong}"
        assert pasted(webui, text) == start and len(log) == 1
        job = webui.job(*pasted(webui, text, on_page=False))
        for sentence in (log[0], report(job)["error"], job.comments):
            assert f"'{written}" in sentence and "in the infotext is not used: " in sentence, sentence
            assert "nan" not in sentence or wrong == "nan", "nobody wrote this"
        assert report(job)["merged"] is False


WRONG = ["sx=65", "sx=inf", "sx=1" + "0" * 400, "end=much", "level=up to /3", "use_rand=1"]


def test_a_part_that_makes_no_sense_is_ignored_with_a_sentence_and_the_rest_is_pasted(webui, log):
    for part in (*WRONG, "hues=2"):
        log.clear()
        wish = wished(webui, *pasted(webui, f"Steps: 3, ToMe: 0.7; {part}; sy=64; hires pass; keep=30"))
        assert (wish.strength, wish.where, dict(wish.changes)) == (0.7, "hires pass", {"sy": 64, "keep": 30.0}), part
        (sentence,) = log
        problem = f"{part.partition('=')[0]}=" if part in WRONG else f"'{part}' is no setting"
        assert sentence.startswith(f"a part of the infotext is not used: {problem}") and len(sentence) < 700


@pytest.fixture
def axes(webui):
    """Our axes, by the label after "[ToMe]"."""
    plot = types.SimpleNamespace(axis_options=[], AxisOption=lambda label, kind, apply, **more: types.SimpleNamespace(
        label=label, apply=apply, **more))  # fmt: skip
    script = type("Script", (), {"__module__": "xyz_grid.py"})
    webui.scripts.scripts_data.append(types.SimpleNamespace(script_class=script, module=plot))
    for _ in range(2):
        webui.call("before_ui")
    axes = {axis.label.removeprefix("[ToMe] "): axis for axis in plot.axis_options}
    assert len(axes) == len(plot.axis_options), "added once"
    return axes


def test_the_plots_axes_reach_the_job_and_refuse_what_would_be_drawn_unmerged_under_its_label(webui, axes):
    assert axes["Where"].choices() == ["everywhere", "first pass", "hires pass"]
    p = Processing(webui, (False,))
    axes["Strength"].apply(p, 0.25, None)
    webui.process(p)
    assert p.params_txt == "ToMe: 0.25"
    axes["Strength"].apply(p, 0.0, None)
    assert webui.process(p).latents.equal(webui.job(False).latents)
    axes["Ratio"].apply(cell := Processing(webui, ON), 0.25, None)
    assert report(webui.process(cell))["settings"]["ratio"] == 0.25
    axes["Strength"].confirm(p, [0.0, 0.5, 1.0])
    for label, wrong, sentence in (("Strength", 1.5, "1.5 is no number from 0 to 1"), ("Ratio", 7, "ratio=7")):
        with pytest.raises(RuntimeError, match=sentence):
            axes[label].confirm(p, [0.5, wrong])
