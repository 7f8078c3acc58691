"""The page without a browser: controls, code to copy, links, runs and what each touch shows. Needs no gradio."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import parse_qsl

import numpy as np
import pytest
import torch

import tome_core
from comfy_nodes import NODE_CLASS_MAPPINGS
from comfy_nodes.inputs import config_of
from demo import page_code, page_controls, page_hosts, sheet
from demo.page_code import Wanted
from demo.page_events import NAMES, Events, Wrong
from demo.page_run import DONE, MERGED, PLAIN, Studio
from demo.source import Embedded
from tests import tiny_pipeline, tiny_scenes
from tests.comfy_doubles import queued
from tests.webui_doubles import Webui
from tome_core import PRESETS, MergeConfig, describe_settings, form, preset, strength

PROMPT, ADDRESS = "night snow peaks right blue cone", "http://127.0.0.1:7860/"
# one rule for each setting, at a value that is not its default; and the presets
OTHER = {"method": "cluster", "side": "kv", "levels": (0, 2), "max_downsample": 4, "cluster_on": "mean_similarity",
         "metric": "keys", "early_ratio": 0.9, "max_beta": 0.01, "min_timestep": 20.0,
         "max_timestep": 900.5, "ratio": 0.3, "query_ratio": 0.5, "end_percent": 0.4, "seed": 7}  # fmt: skip
BESIDE = {"query_ratio": {"side": "kv"}}  # a setting that needs another


def other(setting):
    name, default = setting["name"], setting["default"]
    value = OTHER.get(name, not default if isinstance(default, bool) else None)
    value = setting["minimum"] + 3 * setting["step"] if value is None else value
    return MergeConfig(**{name: value, **BESIDE.get(name, {})})


RULES = {**{one["name"]: other(one) for one in describe_settings()}, **{name: preset(name) for name in PRESETS},
         "defaults": MergeConfig()}  # fmt: skip
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def changed(a, b):
    """Names of the settings in which two configs differ."""
    return {one["name"] for one in describe_settings() if a.value(one["name"]) != b.value(one["name"])}


# --- controls ---------------------------------------------------------------------------------------------------------


@each_rule
def test_a_rule_goes_into_the_controls_and_comes_out_the_same(rule):
    values = page_controls.values_of(rule)
    through_json = json.loads(json.dumps(values))
    assert page_controls.config_of(through_json) == rule
    # sliders give whole numbers as 2.0
    floats = {name: float(value) if type(value) is int else value for name, value in values.items()}
    assert page_controls.config_of(floats) == rule


@each_rule
def test_a_controls_choices_and_range_hold_what_a_rule_shows(rule):
    for name, value in page_controls.values_of(rule).items():
        kind, arguments = page_controls.component(name)
        if "choices" in arguments:
            assert value in arguments["choices"]
        if kind == "Slider":
            assert arguments["minimum"] <= value <= arguments["maximum"]


def test_every_setting_has_its_control_and_each_preset_knows_itself():
    assert set(page_controls.BASIC) | set(page_controls.ADVANCED) == {one["name"] for one in describe_settings()}
    assert [page_controls.preset_of(preset(name)) for name in PRESETS] == [name.capitalize() for name in PRESETS]
    assert page_controls.preset_of(MergeConfig(ratio=0.123)) == page_controls.CUSTOM


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"levels": "0, x"}, ("levels",)),
        ({"sx": 1.5}, ("sx",)),
        ({"early_ratio": 3}, ("early_ratio",)),
        ({"min_pixels": None}, ("min_pixels",)),
        ({"start_percent": 0.8, "end_percent": 0.2}, ("start_percent", "end_percent")),
        ({"levels": "0", "max_downsample": "4"}, ("levels", "max_downsample")),
        ({"method": "downsample", "side": "qkv"}, ("side", "method")),
    ],
)
def test_a_value_that_is_not_possible_is_told_in_the_engines_words_and_its_controls_are_named(changes, names):
    with pytest.raises(ValueError) as told:
        page_controls.config_of({**page_controls.values_of(MergeConfig()), **changes})
    assert page_controls.blamed(str(told.value)) == names


# --- code to copy -----------------------------------------------------------------------------------------------------


@each_rule
def test_a_link_restores_the_rule_and_the_picture(rule):
    wanted = Wanted("day, sea & snow", 5, 17, rule)
    query = dict(parse_qsl(page_code.query(wanted)))
    assert page_code.from_query(query, Wanted("x", 0, 1, preset("max"))) == wanted
    assert not {name for name in PRESETS if name in query.values()}, "a link must not depend on what a preset is"


def test_an_empty_link_is_the_start_and_a_wrong_one_is_refused():
    start = Wanted("x", 1, 2, preset("fast"))
    assert page_code.from_query({}, start) == start
    assert page_code.from_query({"steps": "9"}, start) == replace(start, steps=9)
    with pytest.raises(ValueError, match=r"'ratoi' is no setting; there are prompt, .*ratio"):
        page_code.from_query({"ratoi": "1"}, start)
    with pytest.raises(ValueError, match=r"ratio='much' is str; use a number from 0\.0 to 1\.0"):
        page_code.from_query({"ratio": "much"}, start)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return tiny_pipeline.write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", PRESETS)
def test_the_script_runs_and_merges_as_the_page_does(name, tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(page_code.script(Wanted('a "cat"\n', 3, 2, preset(name)), str(tiny_folder)), names)
    assert names["config"] == preset(name)
    assert (tmp_path / "merged.png").exists() and names["merging"].report().calls == 2
    assert "Token merging:" in capsys.readouterr().out


@pytest.fixture
def webui(monkeypatch):
    made = Webui(monkeypatch).start()
    yield made
    made.call("script_unloaded")


@each_rule
def test_the_payload_is_what_the_webui_reads_but_for_what_it_has_no_control_for(rule, webui):
    payload = json.loads(page_code.webui(Wanted(PROMPT, 3, 9, rule)))
    assert (payload["prompt"], payload["seed"], payload["steps"]) == (PROMPT, 3, 9)
    (args,) = [one["args"] for one in payload["alwayson_scripts"].values()]
    assert list(payload["alwayson_scripts"]) == [webui.script.title()]
    wish = webui.part("settings").read(args)
    for hires in (False, True):
        assert changed(wish.config(hires, 99), rule) == set(page_code.lost(rule)["webui"])


def test_a_hosts_table_brings_no_second_engine():
    """Its parts would take the places of the first one's, and a process would have two of each class."""
    page_hosts.webui()
    start = "_tome_core_page."
    twins = [name for name in sys.modules if name.startswith(f"{start}tome_core")]
    assert f"{start}tome_core.presets" in twins
    assert not [name for name in twins if sys.modules[name] is not sys.modules[name.removeprefix(start)]]


@each_rule
def test_the_node_is_what_comfyui_reads_but_for_what_it_has_no_input_for(rule):
    nodes = json.loads(page_code.comfyui(rule))
    for node in nodes.values():
        types = NODE_CLASS_MAPPINGS[node["class_type"]].INPUT_TYPES()
        assert set(types["required"]) <= set(node["inputs"]) <= {*types["required"], *types["optional"]}
        assert queued(NODE_CLASS_MAPPINGS[node["class_type"]], node["inputs"])[1] == []
    asked = nodes["5"]["inputs"]
    settings, left_out = form.settle(nodes["6"]["inputs"]) if "settings" in asked else (None, [])
    made = config_of(asked.get("strength"), asked["start"], asked["end"], settings)
    assert not left_out and changed(made, rule) == set(page_code.lost(rule)["ComfyUI"])


def test_the_node_has_a_strength_where_one_stands_for_the_rule():
    for rule, value in ((strength(0.35), 0.35), (replace(preset("fast"), end_percent=0.5), 0.75)):
        (node,) = json.loads(page_code.comfyui(rule)).values()
        assert (node["class_type"], node["inputs"]["strength"]) == ("ApplyToMe", value)
    assert set(json.loads(page_code.comfyui(replace(preset("fast"), keep=0.0)))) == {"5", "6"}


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def source():
    """The embedded model's source, with a smaller model in it."""
    made = object.__new__(Embedded)
    made.name, made.device, made.model = "tiny", torch.device("cpu"), tiny_scenes.make()
    made.target = made.model.unet
    return made


RULE = MergeConfig(ratio=0.75, start_percent=0.2, keep=500.0)
WANTED = Wanted(PROMPT, 4, 3, RULE)


def test_a_run_gives_both_pictures_as_the_model_makes_them_and_says_how_far_it_is(source):
    shots = list(Studio(source).make(WANTED, threading.Event()))
    shares = [shot.share for shot in shots]
    assert shares == sorted(shares) and shares[-1] == 1 and shots[-1].doing == DONE
    assert [shot.step for shot in shots if shot.doing == PLAIN] == [1, 2, 3]
    plain = source.picture(PROMPT, 4, 3, lambda: None)
    assert np.array_equal(shots[-1].plain, plain)
    assert np.array_equal(shots[-2].unfinished, shots[-1].merged), "the last unfinished picture is the finished one"
    assert not np.array_equal(shots[-1].merged, plain)
    assert np.array_equal(shots[-1].difference, sheet.difference(plain, shots[-1].merged))
    ((title, drawn),) = shots[-1].maps
    assert title == "Level 0: 256 tokens became 64" and drawn.ndim == 3
    assert shots[-1].report.startswith("Token merging: 3 UNet calls, ") and "bipartite 75%" in shots[-1].report


def test_a_model_that_knows_no_time_is_told_it(source):
    """Without it a rule that is limited in time would merge nothing on the embedded model, and keep no match."""
    late = replace(RULE, start_percent=1.0)
    *_, last = Studio(source).make(replace(WANTED, config=late), threading.Event())
    assert np.array_equal(last.plain, last.merged) and "the same picture, bit for bit" in last.figures
    *_, kept = Studio(source).make(replace(WANTED, config=replace(RULE, keep=1000.0, start_percent=0.0)),
                                   threading.Event())  # fmt: skip
    *_, anew = Studio(source).make(replace(WANTED, config=replace(RULE, keep=0.0, start_percent=0.0)),
                                   threading.Event())  # fmt: skip
    assert not np.array_equal(kept.merged, anew.merged)


@pytest.mark.parametrize("doing", [PLAIN, MERGED])
@pytest.mark.parametrize("how", ["stop", "leave"])
def test_a_run_that_is_stopped_ends_within_a_step_and_leaves_the_model_unpatched(source, doing, how):
    studio, stop = Studio(source), threading.Event()
    before = {name: module.forward.__func__ for name, module in source.target.named_modules()}
    run = studio.make(replace(WANTED, steps=50), stop)
    next(shot for shot in run if shot.doing == doing and shot.step)
    if how == "stop":
        stop.set()
        assert all(shot.doing == doing and shot.step < 50 for shot in run)
    else:
        run.close()
    assert not tome_core.report(source.target).patched
    assert {name: module.forward.__func__ for name, module in source.target.named_modules()} == before
    assert list(studio.make(WANTED, threading.Event()))[-1].doing == DONE


def test_what_goes_wrong_in_a_run_is_raised_where_it_is_waited_for(source):
    def failing(*given):
        raise RuntimeError("no memory left")

    source.model.forward = failing
    with pytest.raises(RuntimeError, match="no memory left"):
        list(Studio(source).make(WANTED, threading.Event()))


# --- what a touch shows -----------------------------------------------------------------------------------------------


@pytest.fixture
def events(source):
    return Events(Studio(source), Wanted(PROMPT, 0, 20, preset("balanced")))


@pytest.fixture
def values(events):
    shown = events.opened({}, ADDRESS)
    return {name: shown[name]["value"] for name in NAMES}


def test_it_opens_with_the_start_and_its_preset(events, values):
    shown = events.opened({}, ADDRESS)
    assert shown["preset"] == "Balanced" and shown["says"] == ""
    assert events.wanted(values) == events.start


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_the_controls_and_a_touch_makes_it_custom(events, values, name):
    shown = events.chosen(values, name.capitalize(), (), ADDRESS)
    filled = {**values, **{one: shown[one]["value"] for one in page_controls.NAMES}}
    assert page_controls.config_of(filled) == preset(name) and shown["preset"] == name.capitalize()
    touched = events.touched({**filled, "ratio": 0.123}, (), ADDRESS)
    assert touched["preset"] == "Custom" and "ratio=0.123" in touched["script"] and "ratio=0.123" in touched["link"]


WRONG = {"prompt": "day banana", "picture_seed": -1, "steps": 2.5, "levels": "all", "sx": 0}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_told_beside_its_control_until_it_is_right(events, values, name):
    shown = events.touched({**values, name: WRONG[name]}, (), ADDRESS)
    with pytest.raises(Wrong) as refused:
        events.wanted({**values, name: WRONG[name]})
    assert shown[name]["info"] == str(refused.value)
    assert shown["wrong"] == (name,) and shown[name]["elem_classes"] == ["wrong"] and "value" not in shown[name]
    assert shown["script"] == shown["link"] == shown["payload"] == shown["node"] == ""
    assert [next(events.made({**values, name: WRONG[name]}, (), "s"))["wrong"]] == [(name,)], "a run was begun"
    healed = events.touched(values, shown["wrong"], ADDRESS)
    assert healed["wrong"] == () and healed[name]["elem_classes"] == [] and healed[name]["info"] == events.help(name)
    assert healed["says"] == "" and healed["script"]


def test_a_wrong_link_is_told_and_not_used(events):
    for query in ({"ratio": "2"}, {"steps": "0"}, {"prompt": "<b>"}, {"nonsense": "1"}):
        shown = events.opened(query, ADDRESS)
        assert "The link was not used" in shown["says"] and "<b>" not in shown["says"]
        assert shown["preset"] == "Balanced" and shown["steps"]["value"] == 20


def test_a_run_lets_stop_be_pressed_while_it_lasts_and_stop_ends_that_of_its_own_tab(events, values):
    run = events.made({**values, "steps": 40}, (), "mine")
    assert next(run)["stop"]["interactive"] is True
    next(run)
    events.stopped("another's")
    next(run)
    events.stopped("mine")
    *_, last = run
    assert "Stopped." in last["says"] and last["stop"]["interactive"] is False


def test_where_the_page_ends_every_run_ends_and_none_begins(events, values):
    run = events.made({**values, "steps": 40}, (), "mine")
    next(run)
    next(run)
    events.end()
    for ended in (run, events.made({**values, "steps": 40}, (), "another's")):
        *_, last = ended
        assert "Stopped." in last["says"]


def test_what_goes_wrong_in_a_run_is_told(events, values):
    events.studio = SimpleNamespace(make=lambda wanted, stop: (_ for _ in ()).throw(MemoryError("<none> left")))
    *_, last = events.made(values, (), "s")
    assert "MemoryError: &lt;none&gt; left" in last["says"] and last["stop"]["interactive"] is False


def test_the_seed_of_the_picture_is_refused_as_a_sentence(events, values):
    with pytest.raises(Wrong, match=r"Seed of the picture: '-1' is no seed; allowed is a whole number from 0"):
        events.wanted({**values, "picture_seed": -1.0})
