"""The page's controls, the code to copy and its links hold the settings. No browser, no gradio."""

from __future__ import annotations

import json
from dataclasses import replace
from urllib.parse import parse_qsl

import pytest

import tome_core
from comfy_nodes import NODE_CLASS_MAPPINGS
from comfy_nodes.inputs import config_of
from demo import page_code, page_controls
from demo.page_code import Wanted
from tests.comfy_doubles import queued
from tests.webui_doubles import Webui
from tome_core import form, strength
from tome_core.settings.presets import MARKS

PROMPT = "night snow peaks right blue cone"
# a value of each field that a strength of 0.5 does not have
OTHER = {"method": "cluster", "merge_what": "q+k+v", "level": "up to /4", "metric": "input", "ratio": 0.3,
         "sx": 3, "sy": 5, "early_ratio": 0.8, "end": 0.4, "refine": 2}  # fmt: skip


def other(field):
    base = form.values_of(strength(0.5))[field.name]
    value = not base if isinstance(field.default, bool) else OTHER.get(field.name)
    value = field.minimum + 3 * field.step if value is None else value
    assert value != base
    return form.settle(form.values_of(strength(0.5)) | {field.name: value})[0]


CONFIGS = {**{one.name: other(one) for one in form.FIELDS},
           **{f"strength {value}": strength(value) for value in (0, 0.05, *MARKS.values())}}  # fmt: skip
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


# --- controls ---------------------------------------------------------------------------------------------------------


@each_config
def test_a_config_goes_into_the_controls_and_comes_out_the_same(config):
    values = {"strength": 0.5, **form.values_of(config)}
    assert page_controls.config_of(json.loads(json.dumps(values)), by_hand=True) == config
    # sliders give whole numbers as 2.0
    floats = {name: float(value) if type(value) is int else value for name, value in values.items()}
    assert page_controls.config_of(floats, by_hand=True) == config


@each_config
def test_a_controls_choices_and_range_hold_what_a_config_shows(config):
    values = form.values_of(config)
    for field in form.FIELDS:
        kind, arguments = page_controls.component(field)
        if "choices" in arguments:
            assert values[field.name] in arguments["choices"]
        if kind == "Slider":
            assert arguments["minimum"] <= values[field.name] <= arguments["maximum"]


def test_a_strength_counts_and_what_it_leaves_alone_beside_it_until_more_was_set_by_hand():
    values = {"strength": 0.75, **form.values_of(strength(0.25)), "end": 0.4}
    assert page_controls.config_of(values, by_hand=False) == form.change(strength(0.75), {"end": 0.4})
    assert page_controls.config_of(values, by_hand=True) == form.change(strength(0.25), {"end": 0.4})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"sx": 1.5}, ("sx",)), ({"early_ratio": 3}, ("early_ratio",)), ({"sy": None}, ("sy",)),
        ({"method": "cubist"}, ("method",)), ({"start": 0.8, "end": 0.2}, ("start", "end")),
        ({"strength": float("nan")}, ("strength",)),
    ],
)  # fmt: skip
def test_a_value_that_is_not_possible_is_told_in_the_forms_words_and_its_controls_are_named(changes, names):
    values = {"strength": 0.5, **form.values_of(strength(0.5))}
    with pytest.raises(ValueError) as told:
        page_controls.config_of({**values, **changes}, by_hand=True)
    assert page_controls.find_blamed(str(told.value)) == names


# --- code to copy -----------------------------------------------------------------------------------------------------


@each_config
def test_a_link_restores_the_settings_and_the_picture(config):
    wanted = Wanted("day, sea & snow", 5, 17, 0.5, config)
    assert page_code.from_query(dict(parse_qsl(page_code.query(wanted))), Wanted.of_strength("x", 0, 1, 0.75)) == wanted


def test_a_link_says_the_strength_and_what_was_changed_alone():
    assert page_code.query(Wanted.of_strength("sea", 5, 17, 0.3)) == "prompt=sea&seed=5&steps=17&strength=0.3"
    by_hand = Wanted("sea", 5, 17, 0.3, form.change(strength(0.3), {"ratio": 0.9}))
    assert page_code.query(by_hand) == "prompt=sea&seed=5&steps=17&strength=0.3&ratio=0.9"


def test_an_empty_link_is_the_start_and_a_wrong_one_is_refused():
    start = Wanted.of_strength("x", 1, 2, 0.75)
    assert page_code.from_query({}, start) == start
    assert page_code.from_query({"steps": "9"}, start) == replace(start, steps=9)
    with pytest.raises(ValueError, match=r"'ratoi' is no setting; there are prompt, .*strength, .*ratio"):
        page_code.from_query({"ratoi": "1"}, start)
    with pytest.raises(ValueError, match=r"ratio='much' is str; use a number from 0\.0 to 1\.0"):
        page_code.from_query({"ratio": "much"}, start)


@pytest.mark.parametrize("changes", [{}, {"ratio": 0.5, "metric": "input"}], ids=["strength", "by hand"])
def test_the_script_runs_and_merges_as_the_page_does(changes, tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names, asked, patch = {}, [], tome_core.patch

    def listening(*given, **named):
        asked.append((given[1:], named))
        return patch(*given, **named)

    monkeypatch.setattr(tome_core, "patch", listening)
    wanted = Wanted('a "cat"\n', 3, 2, 0.3, form.change(strength(0.3), changes))
    exec(page_code.script(wanted, str(tiny_folder)), names)
    assert asked == [((wanted.config,), {})] if changes else [((), {"strength": 0.3})]
    assert (tmp_path / "merged.png").exists() and names["merging"].report().calls == 2
    assert "Token merging:" in capsys.readouterr().out


@pytest.fixture(scope="module")
def panel():
    """(title, reader) of the webui's panel, as a webui has loaded it."""
    with pytest.MonkeyPatch.context() as patches:
        webui = Webui(patches).start()
        title, wish = webui.script.title(), webui.part("wish")
        webui.call("script_unloaded")
    return title, lambda values: wish.read(values, wish.DEFAULTS.__getitem__)


@each_config
def test_the_payload_is_what_the_webuis_panel_reads(config, panel):
    title, read = panel
    payload = json.loads(page_code.webui(Wanted(PROMPT, 3, 9, 0.5, config)))
    assert (payload["prompt"], payload["seed"], payload["steps"]) == (PROMPT, 3, 9)
    wish = read(payload["alwayson_scripts"][title]["args"])
    assert wish.enabled and wish.strength == 0.5 and not wish.left_out
    # the extension brings an engine of its own, whose classes are others
    for made in (wish.config(hires=False), wish.config(hires=True)):
        assert config.is_off if made is None else form.values_of(made) == form.values_of(config)


@each_config
def test_the_node_is_what_comfyui_reads(config):
    nodes = json.loads(page_code.comfyui(Wanted(PROMPT, 3, 9, 0.5, config)))
    for node in nodes.values():
        types = NODE_CLASS_MAPPINGS[node["class_type"]].INPUT_TYPES()
        assert set(types["required"]) <= set(node["inputs"]) <= {*types["required"], *types["optional"]}
        assert queued(NODE_CLASS_MAPPINGS[node["class_type"]], node["inputs"])[1] == []
    asked = nodes["5"]["inputs"]
    settings, left_out = form.settle(nodes["6"]["inputs"]) if "settings" in asked else (None, [])
    made = config_of(asked["strength"], asked["start"], asked["end"], settings)
    wanted = form.change(config, {"merge_crossattn": False, "merge_mlp": False})  # of which the node has no inputs
    assert not left_out and (made or strength(0)) == wanted


def test_the_node_has_its_strength_alone_where_nothing_but_its_times_was_changed():
    for changes in ({}, {"end": 0.5}, {"merge_mlp": True}):
        wanted = Wanted(PROMPT, 3, 9, 0.35, form.change(strength(0.35), changes))
        (node,) = json.loads(page_code.comfyui(wanted)).values()
        assert (node["class_type"], node["inputs"]["strength"]) == ("ApplyToMe", 0.35)
    wanted = Wanted(PROMPT, 3, 9, 0.35, form.change(strength(0.35), {"keep": 0.0}))
    assert set(json.loads(page_code.comfyui(wanted))) == {"5", "6"}
