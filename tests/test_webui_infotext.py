"""What a picture remembers, and what becomes of the controls when it is pasted."""

from __future__ import annotations

import copy
import re
import types

import pytest

from tests.webui_doubles import Component, Processing, Webui

FULL = (True, "custom", 0.35, "own ratio", 0.65, "up to /2", 0.1, 0.8, 65536, "bipartite", "k+v", True, True, 3, 4,
        False, 99, 0.45, 600.0, True, "keys", 1, 0.3, 50.0, True, 0.35)  # fmt: skip
# the webui's own pattern and its splitting of values such as 2x2, as facts
PAIR = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')


NAMES_BEFORE_DEEP_MLP = (
    "enabled", "preset", "ratio", "hires", "hires_ratio", "level", "start_percent", "end_percent", "min_pixels",
    "method", "merge_what", "merge_crossattn", "merge_mlp", "sx", "sy", "use_rand", "seed", "early_ratio",
    "early_until", "proportional", "metric", "refine", "query_ratio", "keep", "only_if_it_pays",
)  # fmt: skip


@pytest.fixture
def webui(monkeypatch):
    made = Webui(monkeypatch).start()
    yield made
    made.call("script_unloaded")


def parsed(text):
    pairs = dict(PAIR.findall(text))
    assert not [value for value in pairs.values() if re.fullmatch(r"\d+x\d+", value)]
    return pairs


def pasted(webui, text, is_img2img=False):
    """Control values after a paste into a fresh panel, converted as the webui does it."""
    controls = webui.script.ui(is_img2img)
    values = [one.value for one in controls]
    for control, key in webui.script.infotext_fields:
        value = key(parsed(text))
        if value is None:
            continue
        kind = type(control.value)
        value = float(value) if kind is int else kind(value)
        values[next(n for n, one in enumerate(controls) if one is control)] = value
    return values


@pytest.mark.parametrize("args", [
    FULL, (True, "custom", 0.5), (True, "custom", 0.5, "only hires"), (True, "custom", 0.3, "off"),
    (True, "custom", 0.5, "same", 0.5, "automatic", 0.0, 1.0, 0, "downsample", "k+v"),
])  # fmt: skip
def test_a_pasted_infotext_makes_the_same_picture(webui, args):
    done = webui.job(*args, enable_hr=True)
    again = webui.job(*pasted(webui, done.infotexts[0]), enable_hr=True)
    assert again.latents.equal(done.latents)
    assert again.infotexts == done.infotexts
    assert not webui.errors


def test_a_list_of_before_deep_mlp_means_what_it_meant(webui):
    settings = webui.part("settings")
    saved = FULL[: len(NAMES_BEFORE_DEEP_MLP)]
    assert settings.read(saved).values == {**dict(zip(NAMES_BEFORE_DEEP_MLP, saved, strict=True)), "deep_mlp": 0.0}


def test_at_ratio_0_a_pass_is_left_alone_whatever_the_early_and_mlp_ratios_are(webui):
    settings = webui.part("settings")
    values = dict(zip(settings.NAMES, FULL, strict=True)) | {"ratio": 0.0}
    assert values["early_ratio"] and values["deep_mlp"]
    wish = settings.read(tuple(values.values()))
    assert wish.config(hires=False) is None and wish.config(hires=True) is not None


def test_everything_is_read_back_exactly(webui):
    done = webui.job(*FULL, enable_hr=True)
    assert tuple(pasted(webui, done.infotexts[0])) == (*FULL, "custom")


def test_a_picture_without_us_turns_us_off_and_leaves_the_rest_alone(webui):
    webui.shared.opts.saved |= {"tomecore_enabled": True, "tomecore_ratio": 0.3}
    values = pasted(webui, "Steps: 3, Sampler: Euler, Token merging ratio: 0.5")
    assert values[0] is False and values[2] == 0.3


def test_a_picture_without_a_hires_pass_leaves_the_hires_controls_alone(webui):
    done = webui.job(True, "custom", 0.5, "off")
    webui.shared.opts.saved["tomecore_hires"] = "only hires"
    assert "hires" not in done.infotexts[0]
    assert pasted(webui, done.infotexts[0])[3] == "only hires"


def test_a_hires_choice_is_not_pasted_into_img2img_where_nobody_would_see_it(webui):
    done = webui.job(True, "custom", 0.35, "only hires", enable_hr=True)
    assert "ToMe hires: only hires" in done.infotexts[0]
    values = pasted(webui, done.infotexts[0], is_img2img=True)
    assert values[:4] == [True, "custom", 0.35, "same"]
    assert "256 -> 167 tokens" in webui.job(*values).comments


def test_what_the_infotext_does_not_mention_is_at_its_default_not_at_the_users(webui):
    done = webui.job(True, "custom", 0.5)
    webui.shared.opts.saved |= {"tomecore_level": "up to /8", "tomecore_sx": 5}
    values = pasted(webui, done.infotexts[0])
    assert values[5] == "automatic" and values[13] == 2


def test_nonsense_in_an_infotext_leaves_the_control_alone(webui):
    values = pasted(webui, "ToMe ratio: much, ToMe level: up to /3, Steps: 3")
    assert values[0] is True and values[2] == 0.5 and values[5] == "automatic"


def test_hires_keys_are_written_for_hires_pictures_alone(webui):
    assert "ToMe hires" not in webui.job(True, "custom", 0.5, "own ratio", 0.2).infotexts[0]
    assert "ToMe hires ratio: 0.2" in webui.job(True, "custom", 0.5, "own ratio", 0.2, enable_hr=True).infotexts[0]


@pytest.mark.parametrize("args", [(0.5, "only hires"), (0.0, "own ratio", 0.5)])
def test_only_hires_without_a_hires_pass_is_off_and_says_why(webui, args):
    done = webui.job(True, "custom", *args)
    assert done.infotexts == [""]
    assert done.comments == "ToMe: left alone, because only the hires pass is to merge, and there is none\n"
    assert webui.job(True, "custom", 0.0).comments == "ToMe: ratio 0, left alone\n"


def test_nothing_leaks_from_one_cell_of_a_plot_to_the_next(webui):
    first = Processing(webui, FULL, enable_hr=True)
    webui.process(first)
    cell = copy.copy(first)  # as the plot does it: one dict for all cells
    cell.args = [False]
    done = webui.process(cell)
    assert done.infotexts == [""] and done.built_in == [0.0, 0.0]
    assert "ToMe ratio" in first.extra_generation_params


def test_the_plots_axes_reach_the_job_and_are_added_once(webui):
    plot = types.SimpleNamespace(axis_options=[], AxisOption=AxisOption)
    data = types.SimpleNamespace(script_class=type("Script", (), {"__module__": "xyz_grid.py"}), module=plot)
    webui.scripts.scripts_data.append(data)
    webui.call("before_ui")
    webui.call("before_ui")
    labels = [one.label for one in plot.axis_options]
    names = ("Preset", "Ratio", "Hires ratio", "Early ratio", "Method", "Level", "Start", "End")
    assert labels == [f"[ToMe] {name}" for name in names]
    _, ratio, hires, _, method, level, *_ = plot.axis_options
    assert (ratio.type, method.type) == (float, str) and "downsample" in method.choices()
    assert "up to /2" in level.choices()

    p = Processing(webui, (False, "custom"), enable_hr=True)
    ratio.apply(p, 0.25, None)
    twin = copy.copy(p)
    hires.apply(twin, 0.75, None)
    assert "ToMe ratio: 0.25, ToMe method: bipartite, ToMe hires: same" in webui.process(p).infotexts[0]
    assert "ToMe hires: own ratio, ToMe hires ratio: 0.75" in webui.process(twin).infotexts[0]


def test_an_axis_value_of_zero_is_the_unmerged_picture(webui):
    p = Processing(webui, (True, "custom", 0.5))
    webui.part("metadata")._apply("ratio")(p, 0.0, None)
    assert webui.process(p).latents.equal(webui.job(False).latents)


class AxisOption:
    def __init__(self, label, type, apply, choices=None):
        self.label, self.type, self.apply, self.choices = label, type, apply, choices


def test_the_built_in_merging_is_off_while_ours_is_on_and_back_afterwards(webui):
    webui.shared.opts.saved["token_merging_ratio"] = 0.5
    off = webui.job(False, enable_hr=True)
    assert off.built_in == [0.5, 0.5] and "Token merging ratio: 0.5" in off.infotexts[0]
    on = webui.job(True, "custom", 0.4, enable_hr=True)
    assert on.built_in == [0, 0] and "Token merging ratio" not in on.infotexts[0]
    assert webui.job(True, "custom", 0.0).built_in == [0.5], "ratio 0 is off, so it is as if we were not there"
    assert webui.shared.opts.saved["token_merging_ratio"] == 0.5


@pytest.mark.parametrize(("options", "is_img2img", "expected"), [
    ({"token_merging_ratio": 0.4}, False, [True, 0.4, "same", 0.4]),
    ({"token_merging_ratio": 0.4, "token_merging_ratio_hr": 0.6}, False, [True, 0.4, "own ratio", 0.6]),
    ({"token_merging_ratio": 0.4, "token_merging_ratio_img2img": 0.2}, True, [True, 0.2, "own ratio", 0.4]),
    ({}, False, [False, 0.0, "same", 0.0]),
])  # fmt: skip
def test_the_button_takes_over_the_built_ins_values(webui, options, is_img2img, expected):
    webui.shared.opts.saved |= options
    Component.made.clear()
    webui.script.ui(is_img2img)
    (button,) = [one for one in Component.made if one.kind == "Button"]
    labels = [one.arguments["label"] for one in button.clicked["outputs"]]
    taken = dict(zip(labels, button.clicked["fn"](), strict=True))
    assert [taken.pop(one) for one in ("Token Merging (ToMe)", "Ratio", "Hires pass", "Hires ratio")] == expected
    assert taken.pop("Preset") == taken.pop("Filled with") == "custom"
    defaults = {one.label: one.default for one in webui.part("settings").FIELDS}
    assert taken and taken == {label: defaults[label] for label in taken}
