"""The page without a browser: controls, code to copy, links, runs and what each touch shows. Needs no gradio."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import parse_qsl

import numpy as np
import pytest
import torch

import tome_core
from benchmarks import quality_figures
from comfy_nodes import NODE_CLASS_MAPPINGS
from comfy_nodes.inputs import config_of
from demo import page_code, page_controls, page_curve, page_map, page_plot, sheet
from demo.page_code import Wanted
from demo.page_curve import Point
from demo.page_events import NAMES, Events, Seen, Wrong
from demo.page_run import DONE, MERGED, PLAIN, Studio
from demo.source import Embedded
from tests import tiny_pipeline, tiny_scenes
from tests.comfy_doubles import queued
from tests.webui_doubles import Webui
from tome_core import MergeConfig, form, strength
from tome_core.settings.presets import MARKS

PROMPT, ADDRESS = "night snow peaks right blue cone", "http://127.0.0.1:7860/"
# a value of each field that a strength of 0.5 does not have
OTHER = {"method": "cluster", "merge_what": "q+k+v", "level": "up to /4", "metric": "keys", "ratio": 0.3,
         "sx": 3, "sy": 5, "cluster_on": "mean_similarity", "early_ratio": 0.8, "end": 0.4, "refine": 2}  # fmt: skip


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
    assert page_controls.config_of(values, by_hand=False) == form.changed(strength(0.75), {"end": 0.4})
    assert page_controls.config_of(values, by_hand=True) == form.changed(strength(0.25), {"end": 0.4})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"sx": 1.5}, ("sx",)), ({"early_ratio": 3}, ("early_ratio",)), ({"min_pixels": None}, ("min_pixels",)),
        ({"method": "cubist"}, ("method",)), ({"start": 0.8, "end": 0.2}, ("start", "end")),
        ({"strength": float("nan")}, ("strength",)),
    ],
)  # fmt: skip
def test_a_value_that_is_not_possible_is_told_in_the_forms_words_and_its_controls_are_named(changes, names):
    values = {"strength": 0.5, **form.values_of(strength(0.5))}
    with pytest.raises(ValueError) as told:
        page_controls.config_of({**values, **changes}, by_hand=True)
    assert page_controls.blamed(str(told.value)) == names


# --- code to copy -----------------------------------------------------------------------------------------------------


@each_config
def test_a_link_restores_the_settings_and_the_picture(config):
    wanted = Wanted("day, sea & snow", 5, 17, 0.5, config)
    assert page_code.from_query(dict(parse_qsl(page_code.query(wanted))), Wanted.of_strength("x", 0, 1, 0.75)) == wanted


def test_a_link_says_the_strength_and_what_was_changed_alone():
    assert page_code.query(Wanted.of_strength("sea", 5, 17, 0.3)) == "prompt=sea&seed=5&steps=17&strength=0.3"
    by_hand = Wanted("sea", 5, 17, 0.3, form.changed(strength(0.3), {"ratio": 0.9}))
    assert page_code.query(by_hand) == "prompt=sea&seed=5&steps=17&strength=0.3&ratio=0.9"


def test_an_empty_link_is_the_start_and_a_wrong_one_is_refused():
    start = Wanted.of_strength("x", 1, 2, 0.75)
    assert page_code.from_query({}, start) == start
    assert page_code.from_query({"steps": "9"}, start) == replace(start, steps=9)
    with pytest.raises(ValueError, match=r"'ratoi' is no setting; there are prompt, .*strength, .*ratio"):
        page_code.from_query({"ratoi": "1"}, start)
    with pytest.raises(ValueError, match=r"ratio='much' is str; use a number from 0\.0 to 1\.0"):
        page_code.from_query({"ratio": "much"}, start)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return tiny_pipeline.write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("changes", [{}, {"ratio": 0.5, "metric": "input"}], ids=["strength", "by hand"])
def test_the_script_runs_and_merges_as_the_page_does(changes, tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names, asked, patch = {}, [], tome_core.patch

    def listening(*given, **named):
        asked.append((given[1:], named))
        return patch(*given, **named)

    monkeypatch.setattr(tome_core, "patch", listening)
    wanted = Wanted('a "cat"\n', 3, 2, 0.3, form.changed(strength(0.3), changes))
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
    assert not left_out and (made or strength(0)) == config


def test_the_node_has_its_strength_alone_where_nothing_but_its_times_was_changed():
    for changes in ({}, {"end": 0.5}):
        wanted = Wanted(PROMPT, 3, 9, 0.35, form.changed(strength(0.35), changes))
        (node,) = json.loads(page_code.comfyui(wanted)).values()
        assert (node["class_type"], node["inputs"]["strength"]) == ("ApplyToMe", 0.35)
    wanted = Wanted(PROMPT, 3, 9, 0.35, form.changed(strength(0.35), {"keep": 0.0}))
    assert set(json.loads(page_code.comfyui(wanted))) == {"5", "6"}


# --- the plot and the map ---------------------------------------------------------------------------------------------


def test_the_curve_is_the_benchmarks():
    """Its own figures, which its tables are made of, from the same file."""
    newest = max((json.loads(one.read_text()) for one in page_curve.RESULTS.glob("quality-*.json")),
                 key=lambda one: one["created"])  # fmt: skip
    section = quality_figures.sections(newest)[0]
    curve = {point.strength: point for point in page_curve.measured()}
    assert len(curve) > 5 and curve[0.0] == Point(0.0, 0.0, 0.0)
    for name, facts in section.variants.items():
        if facts["method"] in ("preset", "strength"):
            point, figures = curve.pop(MARKS.get(facts["setting"]) or float(facts["setting"])), section.pictures[name]
            assert 1 - point.saved == pytest.approx(figures.time)
            # a mean over pictures of decibels is above the decibels of a mean
            assert figures.psnr.value - 2 < 20 * np.log10(255 / point.error) <= figures.psnr.value
    assert set(curve) == {0.0}


CURVE = (Point(0.0, 0.0, 0.0), Point(0.5, 0.4, 2.0), Point(1.0, 0.5, 5.0))


def test_the_plot_has_the_strength_on_the_curve_and_the_pictures_where_they_were_measured():
    assert page_curve.between(CURVE, 0.25) == Point(0.25, 0.2, 1.0)
    drawn = page_plot.plot(CURVE, 0.25, [Point(0.25, -0.1, 0.5), Point(None, 0.3, 9.0)])
    assert drawn.count('class="now" data-strength="0.25"') == 1 and drawn.count('class="run"') == 2
    assert "Ring: strength 0.25: 20 % of the time saved, error 1.0." in drawn
    assert "0.25: 10 % longer, error 0.5; by hand: 30 % of the time saved, error 9.0." in drawn
    assert 'class="now"' not in page_plot.plot(CURVE, None)


@pytest.mark.parametrize("runs", [(), (Point(0.5, -8.0, 0.0),), (Point(1.0, 0.99, 120.0),)])
@pytest.mark.parametrize("curve", [(), CURVE])
def test_all_of_the_plot_is_inside_of_it(curve, runs):
    frame = page_plot._Frame((*curve, *runs))
    for point in (*curve, *runs):
        x, y = frame.at(point)
        assert 0 < x < page_plot.WIDTH and 0 < y < page_plot.HEIGHT
    assert page_plot.plot(curve, 0.5, runs).startswith("<figure")


def test_a_map_gives_each_group_the_mean_of_its_own():
    picture = np.zeros((4, 4, 3), np.uint8)
    picture[:2, :2], picture[2:, 2:], picture[:2, 2:] = 200, 100, 7
    drawn = page_map.mosaic(picture, (2, 2), np.array([0, 1, 2, 0]))
    assert (drawn[:2, :2] == 150).all() and (drawn[2:, 2:] == 150).all()
    assert (drawn[:2, 2:] == 7).all() and (drawn[2:, :2] == 0).all()


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def source():
    """The embedded model's source, with a smaller model in it."""
    made = object.__new__(Embedded)
    made.name, made.device, made.model = "tiny", torch.device("cpu"), tiny_scenes.make()
    made.target = made.model.unet
    return made


BY_HAND = {"start": 0.2, "keep": 500.0}
BIPARTITE = MergeConfig(ratio=0.75)
WANTED = Wanted(PROMPT, 4, 3, 0.5, form.changed(BIPARTITE, BY_HAND))


def test_a_run_gives_both_pictures_as_the_model_makes_them_and_says_how_far_it_is(source):
    shots = list(Studio(source).make(WANTED, threading.Event()))
    shares = [shot.share for shot in shots]
    assert shares == sorted(shares) and shares[-1] == 1 and shots[-1].doing == DONE
    assert [shot.step for shot in shots if shot.doing == PLAIN] == [1, 2, 3]
    plain = source.picture(PROMPT, 4, 3, lambda: None)
    (merged,) = shots[-1].merged
    assert np.array_equal(shots[-1].plain.picture, plain)
    assert np.array_equal(shots[-2].unfinished, merged.picture), "the last unfinished picture is the finished one"
    assert not np.array_equal(merged.picture, plain)
    assert np.array_equal(merged.difference(shots[-1].plain), sheet.difference(plain, merged.picture))
    ((title, drawn),) = merged.maps
    assert title == "Level 0: 256 tokens became 64" and drawn.ndim == 3
    assert merged.report.startswith("Token merging: 3 model calls, ") and "bipartite 75%" in merged.report


def test_several_ways_share_one_unmerged_picture_and_each_is_the_one_it_makes_alone(source):
    configs = tuple(form.changed(strength(one), {"only_if_it_pays": False}) for one in (0, 1, 0.25))
    *shots, last = Studio(source).make(WANTED, threading.Event(), configs)
    shares = [shot.share for shot in shots]
    assert shares == sorted(shares) and last.share == 1 and len(last.merged) == 3
    same = [np.array_equal(made.picture, last.plain.picture) for made in last.merged]
    assert same == [True, False, False], "strength 0 alone is off"
    for config, made in zip(configs, last.merged, strict=True):
        *_, alone = Studio(source).make(replace(WANTED, config=config), threading.Event())
        assert np.array_equal(alone.merged[0].picture, made.picture)


def test_a_model_that_knows_no_time_is_told_it(source):
    """Without it a rule that is limited in time would merge nothing on the embedded model, and keep no match."""
    def made(**changes):
        *_, last = Studio(source).make(replace(WANTED, config=form.changed(BIPARTITE, changes)), threading.Event())
        return last.plain, last.merged[0]

    plain, late = made(start=1.0)
    assert np.array_equal(plain.picture, late.picture) and "the same picture, bit for bit" in late.figures(plain)
    assert not np.array_equal(made(keep=1000.0)[1].picture, made(keep=0.0)[1].picture)


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
    return Events(Studio(source), Wanted.of_strength(PROMPT, 0, 20, 0.5))


@pytest.fixture
def values(events):
    shown = events.opened({}, ADDRESS)
    return {name: shown[name]["value"] for name in NAMES if name != "strengths"} | {"strengths": "0, .5 1"}


def test_it_opens_with_the_start(events, values):
    shown = events.opened({}, ADDRESS)
    assert shown["says"] == "" and shown["by"]["visible"] is False and 'data-strength="0.5"' in shown["plot"]
    assert events.wanted(values, False) == events.wanted(values, True) == events.start


@pytest.mark.parametrize("mark", [0, 0.05, *MARKS.values()])
def test_a_strength_fills_the_controls_and_a_touch_says_what_was_changed(events, values, mark):
    shown = events.moved({**values, "strength": mark, "end": 0.9}, Seen(by_hand=True), ADDRESS)
    filled = {**values, "strength": mark, "end": 0.9, **{one: shown[one]["value"] for one in form.filled(mark)}}
    assert shown["seen"] == Seen(by_hand=False) and "end" not in form.filled(mark)
    assert page_controls.config_of(filled, True) == form.changed(strength(mark), {"end": 0.9})
    touched = events.set_by_hand({**filled, "ratio": 0.123}, shown["seen"], ADDRESS)
    assert touched["seen"].by_hand and touched["by"]["value"].startswith("Changed by hand: ratio, end.")
    assert "ratio=0.123" in touched["script"] and "ratio=0.123" in touched["link"]
    assert 'class="now"' not in touched["plot"]


def test_a_strength_counts_before_its_settings_have_been_filled_in(events, values):
    """Generate may be pressed at once."""
    late = {**values, "strength": 1.0}
    assert events.wanted(late, False).config == strength(1.0)


WRONG = {"prompt": "day banana", "picture_seed": -1, "steps": 2.5, "sx": 0, "strength": float("nan"), "method": []}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_told_beside_its_control_until_it_is_right(events, values, name):
    by_hand = Seen(by_hand=True)
    shown = events.touched({**values, name: WRONG[name]}, by_hand, ADDRESS)
    with pytest.raises(Wrong) as refused:
        events.wanted({**values, name: WRONG[name]}, True)
    assert shown[name]["info"] == str(refused.value)
    assert shown["seen"].wrong == (name,) and shown[name]["elem_classes"] == ["wrong"] and "value" not in shown[name]
    assert shown["script"] == shown["link"] == shown["payload"] == shown["node"] == ""
    wrong = {**values, name: WRONG[name]}
    assert [one["seen"].wrong for one in events.made(wrong, by_hand, "s")] == [(name,)], "a run was begun"
    healed = events.touched(values, shown["seen"], ADDRESS)
    assert healed["seen"] == by_hand and healed["says"] == "" and healed["script"]
    assert healed[name]["elem_classes"] == [] and healed[name]["info"] == events.help(name)


@pytest.mark.parametrize("text", ["", "0.1, 0.2, 0.3, 0.4, 0.5", "0.5, 1.1", "nan", "1e400", "half", None, "9" * 5000])
def test_a_list_that_is_no_strengths_is_refused_and_nothing_is_made(events, values, text):
    (shown,) = events.compared({**values, "strengths": text}, Seen(), "s")
    assert shown["seen"].wrong == ("strengths",) and shown["strengths"]["elem_classes"] == ["wrong"]
    assert "from 0 to 1" in shown["says"] or "give 1 to 4" in shown["says"]


def test_a_comparison_shows_each_strength_with_what_it_took_and_changed(events, values, monkeypatch):
    # the small model has too few tokens for merging to pay
    always = {"only_if_it_pays": False}
    for module, name in ((page_code, "config_of_strength"), (page_controls, "strength")):
        monkeypatch.setattr(module, name, lambda one: form.changed(strength(one), always))
    *_, last = events.compared({**values, "steps": 2, "strengths": "0; .5 1, 0.25"}, Seen(), "s")
    grid = last["grid"]["value"]
    assert last["grid"]["visible"] and grid.count("<img") == 4
    assert [grid.index(f"<strong>Strength {one}</strong>") for one in ("0", "0.5", "1", "0.25")] == sorted(
        grid.index(f"<strong>Strength {one}</strong>") for one in ("0", "0.5", "1", "0.25")
    )
    assert grid.count(" s of processor time, ") == 4 and grid.count("dB, detail ") == 3
    assert "the same picture, bit for bit" in grid
    assert [run.strength for run in last["seen"].runs] == [0, 0.5, 1, 0.25]
    assert last["plot"].count('class="run"') == 4
    moved = events.moved({**values, "strength": 0.9}, last["seen"], ADDRESS)
    assert moved["plot"].count('class="run"') == 4 and 'class="now" data-strength="0.9"' in moved["plot"]
    *_, last = events.made({**values, "steps": 2}, moved["seen"], "s")
    assert last["grid"]["visible"] is False and last["plot"].count('class="run"') == 1


@pytest.mark.parametrize("query", [
    {"ratio": "2"}, {"steps": "0"}, {"prompt": "<b>"}, {"nonsense": "1"}, {"strength": "nan"}, {"strength": "1e400"},
    {"seed": "inf"}, {"seed": "9" * 400}, {"steps": "9" * 5000}, {"sx": "1e400"}, {"min_pixels": "-inf"},
], ids=lambda query: str(query)[:30])  # fmt: skip
def test_a_wrong_link_is_told_and_not_used(events, query):
    shown = events.opened(query, ADDRESS)
    assert "The link was not used" in shown["says"] and "<b>" not in shown["says"]
    assert shown["strength"]["value"] == 0.5 and shown["steps"]["value"] == 20


def test_a_run_lets_stop_be_pressed_while_it_lasts_and_stop_ends_that_of_its_own_tab(events, values):
    run = events.made({**values, "steps": 40}, Seen(), "mine")
    assert next(run)["stop"]["interactive"] is True
    next(run)
    events.stopped("another's")
    next(run)
    events.stopped("mine")
    *_, last = run
    assert "Stopped." in last["says"] and last["stop"]["interactive"] is False


def test_where_the_page_ends_every_run_ends_and_none_begins(events, values):
    run = events.made({**values, "steps": 40}, Seen(), "mine")
    next(run)
    next(run)
    events.end()
    for ended in (run, events.made({**values, "steps": 40}, Seen(), "another's")):
        *_, last = ended
        assert "Stopped." in last["says"]


def test_what_goes_wrong_in_a_run_is_told(events, values):
    events.studio = SimpleNamespace(make=lambda *given: (_ for _ in ()).throw(MemoryError("<none> left")))
    *_, last = events.made(values, Seen(), "s")
    assert "MemoryError: &lt;none&gt; left" in last["says"] and last["stop"]["interactive"] is False


def test_the_seed_of_the_picture_is_refused_as_a_sentence(events, values):
    with pytest.raises(Wrong, match=r"Seed of the picture: '-1' is no seed; allowed is a whole number from 0"):
        events.wanted({**values, "picture_seed": -1.0}, False)
