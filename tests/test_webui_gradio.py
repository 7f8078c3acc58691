"""The panel and the settings built and clicked in real gradio: 3.41.2 (A1111, reForge) and 4.40.0 (Forge).

Each in an environment of its own with the webui's pins, made once and kept in pytest's cache folder.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import install
import tome_core
from tests.gradio_panel.page import CHOOSING, Page
from tests.gradio_panel.serving import environment, serve

pytest.importorskip("playwright.sync_api", reason="needs playwright")
# the panel's fields without a webui: `extension` speaks to the engine as a neighbour, so it needs a package around it
sys.modules["_tome_core_gradio"] = around = ModuleType("_tome_core_gradio")
around.__path__ = [str(Path(__file__).parents[1])]
settings = import_module("_tome_core_gradio.extension.settings")
Page.generates = len(settings.ARGUMENTS)
PINS = Path(__file__).parent / "gradio_panel"
SLOW = 120_000  # ms; small machines take long to draw
NAMES = tome_core.PRESETS
# of img2img; the preset outweighs the ratio
SAVED = {"enabled": True, "preset": NAMES[-1], "ratio": 0.123, "min_pixels": 4096, "seed": 11}


@pytest.fixture(scope="module", params=["a1111", "forge"])
def address(chromium, request, tmp_path_factory):
    """Where the page is served, by the gradio of each webui. The user's own defaults: custom; a preset in img2img."""
    cache = getattr(request.config, "cache", None)  # pytest can be told to have none
    folder = (cache.mkdir("gradio") if cache else tmp_path_factory.mktemp("gradio")) / request.param
    try:
        python = environment(folder, PINS / f"{request.param}.txt")
    except install.Failure as failure:
        pytest.skip(str(failure))
    saved = {f"tomecore_img2img_{name}": value for name, value in SAVED.items()} | {"tomecore_preset": "custom"}
    with serve(python, saved) as running:
        yield running


def filled(name, **changes):
    """What differs from custom at the defaults, when a preset was chosen and then some settings were changed."""
    values = {"preset": name, **settings.preset_values(name), **changes}
    plain = {**settings.DEFAULTS, "preset": "custom"}
    return {key: value for key, value in values.items() if value != plain[key]}


def choose_and_wait(page, name):
    """Choose a preset, and wait until it is filled in: until then it outweighs what is clicked."""
    page.choose("preset", name)
    page.wait_until_shown({"preset": name, **settings.preset_values(name)})


@pytest.fixture
def page(chromium, address):
    """The page, as it starts."""
    made = chromium.new_page(viewport={"width": 1280, "height": 2500})
    made.set_default_timeout(SLOW)
    made.goto(address, wait_until="domcontentloaded")
    made.wait_for_selector("#txt2img_generate")
    yield Page(made)
    made.close()


def test_untouched_it_gives_the_defaults_and_nothing_happens(page):
    assert page.generate() == ({}, {}, [])


def test_switching_on_folds_it_out_and_the_ratio_arrives(page):
    assert not page.at("ratio").is_visible()
    page.check("enabled-checkbox")
    page.at("ratio").wait_for()
    page.number("ratio", 0.35)
    changed, infotext, comments = page.generate()
    assert changed == {"enabled": True, "ratio": 0.35} and comments == []
    assert infotext["ToMe ratio"] == 0.35
    page.key("ratio", "ArrowRight")
    assert page.generate()[0] == {"enabled": True, "ratio": 0.4}
    page.check("enabled-checkbox", False)
    page.at("ratio").wait_for(state="hidden")
    assert page.generate() == ({"ratio": 0.4}, {}, [])


def test_every_choice_for_the_hires_pass_and_its_own_ratio_arrive(page):
    page.check("enabled-checkbox")
    page.at("ratio").wait_for()
    page.number("hires_ratio", 0.8)
    for hires in ("off", "own ratio", "only hires"):
        page.choose("hires", hires)
        changed, infotext, comments = page.generate()
        assert changed == {"enabled": True, "hires": hires, "hires_ratio": 0.8} and comments == []
        assert infotext["ToMe hires"] == hires
        assert infotext.get("ToMe hires ratio") == (0.8 if hires == "own ratio" else None)
    page.choose("hires", "same")
    assert page.generate()[0] == {"enabled": True, "hires_ratio": 0.8}


def test_everything_folded_below_arrives_at_its_own_place(page):
    page.check("enabled-checkbox")
    page.at("ratio").wait_for()
    assert not page.at("level").is_visible()
    page.at("advanced").get_by_text("Advanced").click()
    page.at("level").wait_for()
    page.pick("level", "up to /4")
    page.choose("merge_what", "k+v")
    page.choose("method", "cluster")
    numbers = {"start_percent": 0.1, "end_percent": 0.9, "min_pixels": 4096, "sx": 3, "sy": 4, "seed": 99}
    for name, value in numbers.items():
        page.number(name, value)
    page.check("merge_crossattn")
    page.check("use_rand", False)
    wanted = {**numbers, "enabled": True, "level": "up to /4", "merge_what": "k+v", "method": "cluster",
              "use_rand": False}  # fmt: skip
    changed, infotext, comments = page.generate()
    assert changed == {**wanted, "merge_crossattn": True} and comments == []
    assert infotext["ToMe stride x"] == 3 and infotext["ToMe stride y"] == 4 and infotext["ToMe random"] is False
    page.check("merge_crossattn", False)
    page.check("merge_mlp")
    assert page.generate()[0] == {**wanted, "merge_mlp": True}


@pytest.mark.parametrize("name", NAMES)
def test_choosing_a_preset_fills_the_controls(page, name):
    page.check("enabled-checkbox")
    page.at("preset").wait_for()
    page.number("ratio", 0.123)
    choose_and_wait(page, name)
    changed, infotext, comments = page.generate()
    assert changed == {"enabled": True, **filled(name)} and comments == []
    assert infotext["ToMe preset"] == name and infotext["ToMe ratio"] == settings.preset_values(name)["ratio"]


def test_touching_any_kind_of_control_makes_it_custom(page):
    page.check("enabled-checkbox")
    page.at("advanced").get_by_text("Advanced").click()
    page.at("level").wait_for()
    for act, name, value in (
        (page.number, "ratio", 0.3), (page.number, "early_ratio", 0.6), (page.pick, "level", "up to /4"),
        (page.choose, "metric", "keys"), (page.check, "merge_mlp", True), (page.number, "keep", 30),
    ):  # fmt: skip
        choose_and_wait(page, NAMES[-1])
        assert page.generate()[0] == {"enabled": True, **filled(NAMES[-1])}
        act(name, value)
        page.wait_until_shown({"preset": "custom", name: value})
        changed, infotext, comments = page.generate()
        assert changed == {"enabled": True, **filled(NAMES[-1], preset="custom", **{name: value})}, name
        assert "ToMe preset" not in infotext and comments == []
    choose_and_wait(page, NAMES[0])
    page.key("ratio", "ArrowRight")
    page.wait_until_shown({"preset": "custom"})
    choose_and_wait(page, NAMES[0])
    page.number("seed", 99)
    page.number("hires_ratio", 0.8)
    assert page.generate()[0] == {"enabled": True, "seed": 99, "hires_ratio": 0.8, **filled(NAMES[0])}


def test_what_is_clicked_before_the_page_hears_of_it_counts(page):
    page.check("enabled-checkbox")
    page.at("preset").wait_for()
    choose_and_wait(page, NAMES[-1])
    with page.waiting(page.number, "ratio", 0.3):
        changed, infotext, comments = page.generate()
        assert changed == {"enabled": True, **filled(NAMES[-1], ratio=0.3)}
        assert infotext["ToMe ratio"] == 0.3 and "ToMe preset" not in infotext and comments == []
    page.wait_until_shown({"preset": "custom"})
    with page.waiting(page.choose, "preset", NAMES[0]):
        changed, infotext, comments = page.generate()
        assert changed == {"enabled": True, **filled(NAMES[-1], ratio=0.3, preset=NAMES[0])}
        ratio = settings.preset_values(NAMES[0])["ratio"]
        assert (infotext["ToMe preset"], infotext["ToMe ratio"]) == (NAMES[0], ratio) and comments == []
    page.wait_for_number("ratio", ratio)
    assert page.generate()[0] == {"enabled": True, **filled(NAMES[0])}


def test_a_preset_clicked_while_another_is_being_answered_is_filled_in(page):
    page.check("enabled-checkbox")
    page.at("advanced").get_by_text("Advanced").click()
    page.at("level").wait_for()
    for first, second in ((NAMES[0], NAMES[-1]), (NAMES[1], NAMES[0])):
        with page.waiting(page.choose, "preset", first):
            page.choose("preset", second)
        page.wait_until_shown({"preset": second, **settings.preset_values(second)})
        assert page.generate()[0] == {"enabled": True, **filled(second)}


def test_a_control_clicked_while_its_last_click_is_being_answered_makes_it_custom(page):
    page.check("enabled-checkbox")
    page.at("advanced").get_by_text("Advanced").click()
    page.at("level").wait_for()
    choose_and_wait(page, NAMES[0])
    page.number("ratio", 0.3)
    page.wait_until_shown({"preset": "custom"})
    with page.waiting(page.number, "ratio", 0.4, but=CHOOSING):  # custom stays custom
        choose_and_wait(page, NAMES[0])
        page.number("ratio", 0.3)
    page.wait_until_shown({"preset": "custom", "ratio": 0.3})
    assert page.generate()[0] == {"enabled": True, **filled(NAMES[0], preset="custom", ratio=0.3)}


def test_off_folds_the_panel_and_switching_on_gives_the_preset_that_all_begin_with(page):
    page.check("enabled-checkbox")
    page.at("preset").wait_for()
    page.heard(page.choose, "preset", "off")
    page.at("preset").wait_for(state="hidden")
    assert page.generate() == ({"preset": "off"}, {}, [])
    page.heard(page.check, "enabled-checkbox")
    page.at("preset").wait_for()
    page.wait_for_number("ratio", settings.preset_values(settings.START)["ratio"])
    assert page.generate()[0] == {"enabled": True, **filled(settings.START)}


def test_pasting_a_presets_picture_gives_custom_with_its_values(page):
    page.check("enabled-checkbox")
    page.at("preset").wait_for()
    choose_and_wait(page, NAMES[-1])
    infotext = {key: str(value) for key, value in page.generate()[1].items()}
    choose_and_wait(page, NAMES[0])
    page.page.locator("#txt2img_infotext textarea").fill(json.dumps(infotext))
    page.click("txt2img_paste", "txt2img")
    assert page.generate()[0] == {"enabled": True, **filled(NAMES[-1], preset="custom")}


def test_values_that_do_not_go_together_are_told_and_nothing_is_written(page):
    page.check("enabled-checkbox")
    page.at("advanced").get_by_text("Advanced").click()
    page.at("start_percent").wait_for()
    page.number("start_percent", 0.8)
    page.number("end_percent", 0.2)
    _, infotext, comments = page.generate()
    assert infotext == {} and len(comments) == 1
    assert "start_percent=0.8 lies after end_percent=0.2" in comments[0]
    page.number("end_percent", 1)
    assert page.generate()[1:] == ({"ToMe ratio": 0.5, "ToMe method": "bipartite", "ToMe start": 0.8,
                                    "ToMe hires": "same"}, [])  # fmt: skip


def test_the_button_takes_over_the_webuis_own_ratios(page):
    settings, names = page.below("setting_token_merging_ratio"), ("", "_img2img", "_hr")
    page.check("enabled-checkbox")
    for built_in, panel in (
        ((0.4, 0.2, 0.0), {"enabled": True, "ratio": 0.4, "hires_ratio": 0.4}),
        ((0.3, 0.2, 0.6), {"enabled": True, "ratio": 0.3, "hires": "own ratio", "hires_ratio": 0.6}),
        ((0.0, 0.0, 0.0), {"ratio": 0.0, "hires_ratio": 0.0}),
    ):
        for name, value in zip(names, built_in, strict=True):
            settings.number(name, value)
        saved = page.click("apply", "settings")["saved"]
        page.at("take_over").click()
        page.wait_for_number("ratio", panel["ratio"])
        assert page.generate()[0] == panel
        assert page.click("apply", "settings")["saved"] == saved


def test_a_pasted_picture_sets_the_panel_and_one_without_us_turns_it_off(page):
    ours = {"ToMe ratio": "0.35", "ToMe method": "downsample", "ToMe level": "up to /2", "ToMe stride x": "3",
            "ToMe random": "False", "ToMe hires": "own ratio", "ToMe hires ratio": "0.6"}  # fmt: skip
    pasted = {"ratio": 0.35, "method": "downsample", "level": "up to /2", "sx": 3, "use_rand": False,
              "hires": "own ratio", "hires_ratio": 0.6}  # fmt: skip
    for infotext, switch in ((ours, {"enabled": True}), ({"Steps": "3"}, {})):
        page.page.locator("#txt2img_infotext textarea").fill(json.dumps(infotext))
        page.click("txt2img_paste", "txt2img")
        assert page.generate()[0] == {**pasted, **switch}


def test_img2img_starts_with_its_own_defaults_and_has_no_hires_row(page):
    img2img = page.below("script_img2img_")
    assert img2img.at("ratio").is_visible() and not img2img.at("hires").is_visible()
    changed, infotext, comments = img2img.generate("img2img")
    own = {name: SAVED[name] for name in ("enabled", "min_pixels", "seed")}
    assert changed == {**own, **filled(NAMES[-1])} and comments == []
    assert infotext["ToMe preset"] == NAMES[-1] and "ToMe hires" not in infotext
    img2img.number("ratio", 0.3)
    img2img.wait_until_shown({"preset": "custom"})
    assert img2img.generate("img2img")[0] == {**own, **filled(NAMES[-1], preset="custom", ratio=0.3)}


def test_what_the_settings_tab_saves_is_what_a_panel_starts_with(page):
    settings = page.below("setting_tomecore_")
    settings.check("enabled")
    settings.number("ratio", 0.25)
    settings.choose("hires", "only hires")
    settings.pick("level", "up to /8")
    settings.choose("method", "cluster")
    settings.number("min_pixels", 1024)
    settings.number("sy", 5)
    settings.number("seed", 5)
    wanted = {"enabled": True, "ratio": 0.25, "hires": "only hires", "level": "up to /8", "method": "cluster",
              "min_pixels": 1024, "sy": 5, "seed": 5}  # fmt: skip
    told = page.click("apply", "settings")
    assert told["starts"] == wanted
    assert all(told["saved"][f"tomecore_{name}"] == value for name, value in wanted.items())
    assert all(told["saved"][f"tomecore_img2img_{name}"] == value for name, value in SAVED.items())


def test_quicksettings_are_saved_as_they_change_and_stay_usable(page):
    quick = page.below("quick_tomecore_")
    for act, name, value in (
        (quick.number, "ratio", 0.15), (quick.choose, "method", "cluster"), (quick.pick, "level", "up to /1"),
        (quick.number, "min_pixels", 2048), (quick.number, "ratio", 0.2), (quick.pick, "level", "up to /2"),
    ):  # fmt: skip
        act(name, value)
        page.wait_until_saved(f"tomecore_{name}", value)
