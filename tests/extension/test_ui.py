"""The panel and the settings built and clicked in real gradio: 3.41.2 (A1111, reForge) and 4.40.0 (Forge).

Each in an environment of its own with the webui's pins, made once and kept in pytest's cache folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import install
from tests.gradio_panel.serving import environment, serve

pytestmark = pytest.mark.slow  # two versions of gradio, each in an environment of its own
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
PINS = Path(__file__).parents[1] / "gradio_panel"
SLOW = 120_000  # ms; small machines take long to draw
RATIO = 0.984  # what the panel shows for a strength of 0.25


@pytest.fixture(scope="module", params=["a1111", "forge"])
def address(chromium, request, tmp_path_factory):
    """Where the page is served, by the gradio of each webui."""
    cache = getattr(request.config, "cache", None)  # pytest can be told to have none
    folder = (cache.mkdir("gradio") if cache else tmp_path_factory.mktemp("gradio")) / request.param
    try:
        python = environment(folder, PINS / f"{request.param}.txt")
    except install.Failure as failure:
        pytest.skip(str(failure))
    with serve(python, tmp_path_factory.mktemp("served") / "page.log") as running:
        yield running


class Page:
    """The page of app.py; names are of the panel's controls."""

    def __init__(self, page, address):
        self.page = page
        page.set_default_timeout(SLOW)
        page.goto(address, wait_until="domcontentloaded")
        page.wait_for_selector("#generate")

    def at(self, name, inside=""):
        return self.page.locator(f"#script_txt2img_{name} {inside}".strip()).first

    def check(self, name, on=True):
        self.at(name, "input[type=checkbox]").set_checked(on)

    def type(self, box, value):
        box.fill(str(value))
        box.press("Tab")

    def number(self, name, value):
        self.type(self.at(name, "input[type=number]"), value)

    def wait_for_number(self, name, value):
        ask = "([id, value]) => document.querySelector(`#${id} input[type=number]`).value == value"
        self.page.wait_for_function(ask, arg=[f"script_txt2img_{name}", value])

    def click(self, button):
        """Press a button, and give the answer when it has come.

        gradio 4 loses a click now and then on a busy machine; a user presses again, and so does this.
        """
        box = "document.querySelector('#answer textarea')"
        before = self.page.evaluate(f"{box}.value")
        for _ in range(4):
            self.page.locator(f"#{button}").click()
            try:
                ask = f"old => {box}.value !== old && {box}.value"
                return json.loads(self.page.wait_for_function(ask, arg=before, timeout=30_000).json_value())
            except sync_api.TimeoutError as error:
                late = error
        raise late

    def infotext(self):
        """What the hooks write of us."""
        return self.click("generate").get("ToMe")


@pytest.fixture
def page(chromium, address):
    """The page, as it starts."""
    with chromium.new_page(viewport={"width": 1280, "height": 2500}) as tab:
        yield Page(tab, address)


def test_untouched_it_is_off_and_switched_on_it_folds_out_and_strength_arrives(page):
    assert page.infotext() is None and not page.at("strength").is_visible()
    page.check("enabled-checkbox")
    page.at("strength").wait_for()
    page.number("strength", 0.35)
    assert page.infotext() == "0.35"
    page.page.locator("#script_txt2img_enabled a", has_text="fast").click()
    page.wait_for_number("strength", 0.75)
    assert page.infotext() == "0.75"
    page.check("enabled-checkbox", False)
    assert page.infotext() is None


def test_what_an_expert_types_counts_without_a_tick_and_goes_along_with_strength(page):
    page.check("enabled-checkbox")
    page.at("expert").get_by_text("Expert").click()
    page.at("sx").wait_for()
    page.number("sx", 2)
    assert page.infotext() == "0.5; sx=2"
    page.number("strength", 0.25)
    page.wait_for_number("early_ratio", RATIO)
    assert page.infotext() == "0.25; sx=2"
    page.check("own", False)
    assert page.infotext() == "0.25"


def test_a_pasted_picture_and_a_moved_quicksetting_set_the_panel(page):
    page.check("enabled-checkbox")
    page.type(page.page.locator("#quick_tome_strength input[type=number]").first, 0.15)
    page.wait_for_number("strength", 0.15)
    assert page.infotext() == "0.15"
    for infotext, wanted in (({"ToMe": "0.7; hires pass; keep=30.0"}, "0.7; hires pass; keep=30.0"),
                             ({"Steps": "3"}, None)):  # fmt: skip
        page.page.locator("#infotext textarea").fill(json.dumps(infotext))
        page.click("paste")
        assert page.infotext() == wanted
