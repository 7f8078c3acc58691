"""The panel of a real webui, clicked in a real browser: A1111 and reForge bring gradio 3.41, Forge 4.40."""

from __future__ import annotations

import os
import re
import shutil

import pytest

from tests.hosts.webui.running import PAYING
from tome_core import preset
from tome_core.presets import DEFAULT

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
PANEL = "#script_txt2img_token_merging_tome_"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
SLOW = 1_200_000  # ms; small machines take long to draw


@pytest.fixture
def page(webui):
    """The webui's page, loaded."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("needs a Chromium: install it, or set CHROMIUM to its path")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 1300})
        page.set_default_timeout(SLOW)
        page.goto(webui.url, wait_until="load")
        page.wait_for_selector("#txt2img_prompt textarea")
        page.wait_for_timeout(3000)
        yield page
        browser.close()


def unfold(page):
    page.locator(f"{PANEL}enabled .label-wrap").first.click()
    page.wait_for_timeout(1000)


def is_on(page):
    return page.locator(f"{PANEL}enabled-visible-checkbox").is_checked()


def number(page, name):
    return float(page.locator(f"{PANEL}{name} input[type=number]").first.input_value())


def chosen(page, name):
    return page.locator(f"{PANEL}{name} input:checked").evaluate("one => one.value")


def choose(page, name, text):
    page.locator(f"{PANEL}{name} label").filter(has_text=text).last.click()


def small(page):
    """A picture that is drawn soon, and yet with as many tokens as the presets ask for."""
    for name, value in {**PAYING, "steps": 3}.items():
        box = page.locator(f"#txt2img_{name} input[type=number]").first
        box.fill(str(value))
        box.press("Tab")


def draw(page):
    """Generate, and give what stands below the picture."""
    page.locator("#txt2img_generate").click()
    page.wait_for_function("document.querySelector('#html_info_txt2img').innerText.includes('Steps:')")
    page.wait_for_timeout(1000)
    return page.locator("#txt2img_results").inner_text()


def ours(text):
    """What an infotext says of us."""
    return re.findall(r"ToMe [a-zA-Z -]+: [^,\n]+", text)


def paste(page, text):
    page.locator("#txt2img_prompt textarea").fill(text)
    page.wait_for_timeout(300)
    page.locator("#txt2img_tools #paste").click()
    page.wait_for_timeout(3000)


def test_unfolding_is_switching_on_and_the_picture_says_what_merged(page):
    assert not is_on(page)
    unfold(page)
    assert is_on(page)
    small(page)
    shown = draw(page)
    assert f"ToMe ratio: {preset(DEFAULT).rules[0].ratio}" in shown and f"ToMe preset: {DEFAULT}" in shown
    assert "ToMe: level 0 (/1) " in shown and "of its attention saved, 3 steps" in shown


def test_a_clicked_preset_fills_the_panel_and_its_picture_is_the_apis(page, webui):
    unfold(page)
    choose(page, "preset", "fast")
    ratio = preset("fast").rules[0].ratio
    page.wait_for_function(f"document.querySelector('{PANEL}ratio input[type=number]').value == {ratio}")
    assert is_on(page) and chosen(page, "preset") == "fast"
    assert number(page, "sx") == preset("fast").rules[0].sx and chosen(page, "merge_what") == "k+v"
    small(page)
    shown = draw(page)
    assert "ToMe preset: fast" in shown and "of its attention saved, 3 steps" in shown
    of_api = webui.draw(True, "fast", **PAYING)
    assert ours(shown) == ours(of_api.infotext) and webui.told(0)[-2] == webui.told(0)[-1]
    box = page.locator(f"{PANEL}ratio input[type=number]").first
    box.fill("0.5")
    box.press("Tab")
    page.wait_for_function(f"document.querySelector('{PANEL}preset input[value=custom]').checked")


def test_a_control_moved_in_the_instant_before_generate_counts(page):
    unfold(page)
    small(page)
    asked = []  # the page's questions, which wait for their answers until the picture is there
    page.route("**/run/predict*", lambda route: asked.append(route))
    box = page.locator(f"{PANEL}ratio input[type=number]").first
    box.fill("0.5")
    box.press("Tab")
    shown = draw(page)
    assert asked and chosen(page, "preset") == DEFAULT
    assert "ToMe ratio: 0.5" in shown and "ToMe preset" not in shown
    for route in asked:
        route.continue_()
    page.wait_for_function(f"document.querySelector('{PANEL}preset input[value=custom]').checked")


def test_hires_alone_is_two_clicks(page):
    unfold(page)
    choose(page, "hires", "only hires")
    page.wait_for_timeout(300)
    assert is_on(page) and chosen(page, "hires") == "only hires"


def test_pasting_sets_the_panel_and_pasting_a_picture_without_us_turns_it_off(page):
    pairs = "Steps: 3, Sampler: Euler, CFG scale: 7, Seed: 1, Size: 128x128"
    paste(page, f"a lake\n{pairs}, ToMe ratio: 0.35, ToMe method: downsample, ToMe stride x: 3, ToMe start: 0.1")
    assert is_on(page) and number(page, "ratio") == 0.35 and chosen(page, "method") == "downsample"
    assert number(page, "sx") == 3 and number(page, "start_percent") == 0.1 and number(page, "end_percent") == 1
    paste(page, f"a lake\n{pairs}")
    assert not is_on(page) and number(page, "ratio") == 0.35


def test_the_button_takes_over_the_webuis_own_ratio(page, webui):
    webui.ask("/sdapi/v1/options", {"token_merging_ratio": 0.4})
    try:
        unfold(page)
        page.locator(f"{PANEL}take_over").click()
        page.wait_for_timeout(2000)
        assert is_on(page) and number(page, "ratio") == 0.4 and chosen(page, "hires") == "same"
        assert webui.ask("/sdapi/v1/options")["token_merging_ratio"] == 0.4
    finally:
        webui.ask("/sdapi/v1/options", {"token_merging_ratio": 0.0})


def test_reload_ui_keeps_it_working(page, webui):
    start = len(webui.said())
    page.evaluate("gradioApp().querySelector('#settings_restart_gradio').click()")
    while "Startup time" not in webui.said(start):
        page.wait_for_timeout(500)
    assert "Restarting UI" in webui.said(start)
    page.wait_for_timeout(2000)
    page.goto(webui.url, wait_until="load")
    page.wait_for_selector("#txt2img_prompt textarea")
    page.wait_for_timeout(3000)
    unfold(page)
    small(page)
    assert "of its attention saved, 3 steps" in draw(page)
    assert "Error loading script: token_merging.py" not in webui.said() and webui.state()["patched"] == 0


def test_a_quicksetting_of_ours_counts_at_once(page, webui):
    page.locator("#quicksettings #setting_tome_strength input[type=number]").wait_for()
    box = page.locator("#quicksettings #setting_tome_map input[type=checkbox]")
    for is_on in (True, False):
        box.click()
        while webui.ask("/sdapi/v1/options")["tome_map"] is not is_on:
            page.wait_for_timeout(500)
        assert len(webui.draw(True, "custom", 0.5).all) == 1 + is_on


def test_the_settings_tab_is_there(page):
    found = page.evaluate("[...document.querySelectorAll('[id^=setting_tome_]')].map(one => one.id)")
    assert "setting_tome_strength" in found
    assert "setting_tome_map" in found
