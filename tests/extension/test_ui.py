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
from tests.gradio_panel.page import Page
from tests.gradio_panel.serving import environment, serve

pytestmark = pytest.mark.slow  # two versions of gradio, each in an environment of its own
pytest.importorskip("playwright.sync_api", reason="needs playwright")
# the panel's fields without a webui: `extension` speaks to the engine as a neighbour, so it needs a package around it
sys.modules["_tome_core_gradio"] = around = ModuleType("_tome_core_gradio")
around.__path__ = [str(Path(__file__).parents[2])]
wish = import_module("_tome_core_gradio.extension.wish")
PINS = Path(__file__).parents[1] / "gradio_panel"
SLOW = 120_000  # ms; small machines take long to draw


@pytest.fixture(scope="module", params=["a1111", "forge"])
def address(chromium, request, tmp_path_factory):
    """Where the page is served, by the gradio of each webui."""
    cache = getattr(request.config, "cache", None)  # pytest can be told to have none
    folder = (cache.mkdir("gradio") if cache else tmp_path_factory.mktemp("gradio")) / request.param
    try:
        python = environment(folder, PINS / f"{request.param}.txt")
    except install.Failure as failure:
        pytest.skip(str(failure))
    with serve(python) as running:
        yield running


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
    assert page.generate() == ({}, {})


def test_switching_on_folds_it_out_and_strength_arrives(page):
    assert not page.at("strength").is_visible()
    page.check("enabled-checkbox")
    page.at("strength").wait_for()
    page.number("strength", 0.35)
    changed, infotext = page.generate()
    assert (changed["enabled"], changed["strength"]) == (True, 0.35)
    assert infotext == {"ToMe": "0.35"}
    page.page.locator("#script_txt2img_enabled a", has_text="fast").click()
    page.wait_for_number("strength", 0.75)
    assert page.generate()[1] == {"ToMe": "0.75"}
    page.check("enabled-checkbox", False)
    assert page.generate()[1] == {}


def open_expert(page):
    page.check("enabled-checkbox")
    page.at("expert").get_by_text("Expert").click()
    page.at("sx").wait_for()


def test_an_experts_values_count_below_their_switch_and_go_along_with_strength(page):
    open_expert(page)
    page.check("own")
    page.number("sx", 2)
    assert page.generate()[1] == {"ToMe": "0.5; sx=2"}
    page.number("strength", 0.25)
    page.wait_for_number("ratio", wish.base_of(0.25)["ratio"])
    assert page.generate()[1] == {"ToMe": "0.25; sx=2"}
    page.check("own", False)
    assert page.generate()[1] == {"ToMe": "0.25"}


def test_what_is_typed_counts_without_a_tick(page):
    open_expert(page)
    page.number("sx", 2)
    assert page.generate()[1] == {"ToMe": "0.5; sx=2"}


def test_a_pasted_picture_sets_the_panel_and_one_without_us_turns_it_off(page):
    for infotext, wanted in (({"ToMe": "0.7; hires pass; keep=30.0"}, {"ToMe": "0.7; hires pass; keep=30.0"}),
                             ({"Steps": "3"}, {})):  # fmt: skip
        page.page.locator("#txt2img_infotext textarea").fill(json.dumps(infotext))
        page.click("txt2img_paste", "txt2img")
        assert page.generate()[1] == wanted


def test_a_moved_quicksetting_moves_the_panels(page):
    page.below("quick_tome_").number("strength", 0.15)
    page.wait_for_number("strength", 0.15)
    page.check("enabled-checkbox")
    assert page.generate()[1] == {"ToMe": "0.15"}
