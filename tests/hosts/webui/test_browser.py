"""The panel of a real webui, clicked in a real browser: A1111 and reForge bring gradio 3.41, Forge 4.40."""

from __future__ import annotations

import json
import re
from contextlib import suppress

import pytest

from tests.hosts.webui.running import PAYING
from tome_core import form
from tome_core.settings.presets import MARKS

PANEL = "#script_txt2img_token_merging_tome_"
SLOW = 1_200_000  # ms; small machines take long to draw


@pytest.fixture
def page(webui, chromium):
    """The webui's page, loaded."""
    page = chromium.new_page(viewport={"width": 1280, "height": 1300})
    page.set_default_timeout(SLOW)
    load(page, webui)
    yield page
    page.close()


def load(page, webui):
    page.goto(webui.url, wait_until="load")
    page.wait_for_selector("#txt2img_prompt textarea")
    page.wait_for_timeout(3000)


def wait_for(page, webui, setting, value):
    """Until the webui has saved it. (Forge's API does not tell of settings of extensions.)"""
    saved = {}
    while saved.get(setting) != value:
        page.wait_for_timeout(500)
        with suppress(ValueError):  # it is being written
            saved = json.loads((webui.log.parent / "config.json").read_text(encoding="utf-8"))


def unfold(page):
    page.locator(f"{PANEL}enabled .label-wrap").first.click()
    page.wait_for_timeout(1000)


def is_on(page):
    return page.locator(f"{PANEL}enabled-visible-checkbox").is_checked()


def number(page, name):
    return float(page.locator(f"{PANEL}{name} input[type=number]").first.input_value())


def where(page):
    return page.locator(f"{PANEL}where input:checked").evaluate("one => one.value")


def set_number(page, selector, value):
    box = page.locator(f"{selector} input[type=number]").first
    box.fill(str(value))
    box.press("Tab")


def small(page):
    """A picture that is drawn soon, and yet with as many tokens as a strength asks for."""
    for name, value in {**PAYING, "steps": 3}.items():
        set_number(page, f"#txt2img_{name}", value)


def fold_out_hires(page):
    page.locator("#txt2img_hr .label-wrap").first.click()
    page.locator(f"{PANEL}where").wait_for()


def draw(page):
    """Generate, and give what stands below the picture."""
    page.locator("#txt2img_generate").click()
    page.wait_for_function("document.querySelector('#html_info_txt2img').innerText.includes('Steps:')")
    page.wait_for_timeout(1000)
    return page.locator("#txt2img_results").inner_text()


def ours(text):
    """What an infotext says of us."""
    return re.findall(r"ToMe: [0-9.]+(?=[,;\n]|$)", text)  # and not the report's "ToMe: strength 0.5"


def paste(page, text):
    page.locator("#txt2img_prompt textarea").fill(text)
    page.wait_for_timeout(300)
    page.locator("#txt2img_tools #paste").click()
    page.wait_for_timeout(3000)


def test_reload_ui_keeps_it_working(page, webui):
    """The first, because gradio's server waits for whatever closed pages had asked, now and then for ever."""
    start = len(webui.said())
    page.evaluate("gradioApp().querySelector('#settings_restart_gradio').click()")
    while "Startup time" not in webui.said(start):
        page.wait_for_timeout(500)
    assert "Restarting UI" in webui.said(start)
    page.wait_for_timeout(2000)
    load(page, webui)
    unfold(page)
    small(page)
    assert ours(draw(page)) == ["ToMe: 0.5"]
    assert "Error loading script: token_merging.py" not in webui.said() and webui.state()["patched"] == 0


def test_at_first_sight_there_are_four_controls_and_where_with_hires_fix(page):
    unfold(page)
    shown = {name for name in ("strength", "where", "line", "measure", "expert", "own", "sx")
             if page.locator(f"{PANEL}{name}").first.is_visible()}  # fmt: skip
    assert is_on(page) and shown - {"line"} == {"strength", "measure", "expert"}
    fold_out_hires(page)
    page.locator("#txt2img_hr .label-wrap").first.click()
    page.locator(f"{PANEL}where").wait_for(state="hidden")
    page.locator(f"{PANEL}expert .label-wrap").first.click()
    page.locator(f"{PANEL}sx").first.wait_for()
    assert page.locator(f"{PANEL}enabled").first.bounding_box()["height"] < 1300, "one screen"


def test_unfolding_is_switching_on_and_the_picture_says_what_merged(page):
    assert not is_on(page)
    unfold(page)
    assert is_on(page)
    small(page)
    shown = draw(page)
    assert ours(shown) == ["ToMe: 0.5"]
    assert re.search(r"ToMe: strength 0\.5, 3 steps, \d+% of attention left out", shown)


def test_a_clicked_mark_moves_the_panel_and_its_picture_is_the_apis(page, webui):
    unfold(page)
    page.locator(f"{PANEL}enabled a", has_text="off").click()
    page.wait_for_function(f"document.querySelector('{PANEL}line').innerText == 'strength 0: off'")
    page.locator(f"{PANEL}enabled a", has_text="fast").click()
    wanted = round(form.fill("fast")["ratio"], 3)  # as the panel shows it
    page.wait_for_function(f"document.querySelector('{PANEL}ratio input[type=number]').value == {wanted}")
    assert is_on(page) and number(page, "strength") == MARKS["fast"]
    small(page)
    shown = draw(page)
    of_api = webui.draw(True, MARKS["fast"], **PAYING)
    assert ours(shown) == ours(of_api.infotext) == ["ToMe: 0.75"] and webui.told(0)[-2] == webui.told(0)[-1]


def test_a_control_moved_in_the_instant_before_generate_counts(page):
    unfold(page)
    small(page)
    page.wait_for_timeout(1000)
    asked = []  # the page's questions, which wait for their answers until the picture is there
    page.route("**/run/predict*", lambda route: asked.append(route))
    set_number(page, f"{PANEL}strength", 0.3)
    shown = draw(page)
    assert asked and ours(shown) == ["ToMe: 0.3"]
    for route in asked:
        route.continue_()


def test_the_line_answers_and_measure_measures_now(page):
    unfold(page)
    small(page)
    size = "{width}x{height}: ".format(**PAYING)
    page.wait_for_function(f"document.querySelector('{PANEL}line').innerText.includes('{size}')")
    page.locator(f"{PANEL}measure").click()
    answer = rf"{size}(about \d+\.\d+x faster|no faster)"
    page.wait_for_function(f"/{answer}/.test(document.querySelector('{PANEL}line').innerText)")
    fold_out_hires(page)
    page.wait_for_function(f"document.querySelector('{PANEL}line').innerText.includes('; hires pass ')")
    assert re.match(f"first pass {answer}; hires pass ", page.locator(f"{PANEL}line").first.inner_text())


def test_hires_alone_is_two_clicks(page):
    page.locator("#txt2img_hr .label-wrap").first.click()  # Hires. fix itself
    unfold(page)
    page.locator(f"{PANEL}where label").filter(has_text="hires pass").last.click()
    page.wait_for_timeout(300)
    assert is_on(page) and where(page) == "hires pass"


def test_pasting_sets_the_panel_and_pasting_a_picture_without_us_turns_it_off(page):
    pairs = "Steps: 3, Sampler: Euler, CFG scale: 7, Seed: 1, Size: 128x128"
    paste(page, f"a lake\n{pairs}, ToMe: 0.35; hires pass; sx=3; start=0.1")
    assert is_on(page) and number(page, "strength") == 0.35 and number(page, "sx") == 3
    assert number(page, "start") == 0.1 and number(page, "end") == 1
    assert page.locator(f"{PANEL}own input").is_checked()
    assert where(page) == "hires pass"
    paste(page, f"a lake\n{pairs}")
    assert not is_on(page) and number(page, "strength") == 0.35


def test_what_an_expert_types_counts_and_a_strength_is_shown_rounded(page):
    unfold(page)
    page.locator(f"{PANEL}expert .label-wrap").first.click()
    page.locator(f"{PANEL}sx").first.wait_for()
    assert number(page, "ratio") == 0.859
    set_number(page, f"{PANEL}sx", 3)
    page.wait_for_function(f"document.querySelector('{PANEL}own input').checked")
    small(page)
    assert re.findall(r"ToMe: 0\.5; [a-z0-9=_;. ]+", draw(page)) == ["ToMe: 0.5; sx=3"]


def test_the_line_of_a_size_by_a_factor_is_not_the_other_tabs(page):
    page.locator("#tabs button", has_text="img2img").first.click()
    panel = PANEL.replace("txt2img", "img2img")
    page.locator(f"{panel}enabled .label-wrap").first.click()
    by_factor = f"document.querySelector('{panel}line').innerText.includes('resized by a factor')"
    page.locator("#img2img_tabs_resize button", has_text="Resize by").click()
    page.wait_for_function(by_factor)
    page.locator("#img2img_tabs_resize button", has_text="Resize to").click()
    page.wait_for_function(f"!{by_factor}")


def test_switching_on_among_the_quicksettings_draws_with_the_strength_beside_it(page, webui):
    unfold(page)
    set_number(page, f"{PANEL}strength", 0.37)
    box = page.locator("#quicksettings #setting_tome_enabled input[type=checkbox]")
    try:
        box.click()
        page.wait_for_function(f"document.querySelector('{PANEL}strength input[type=number]').value == 0.5")
        wait_for(page, webui, "tome_enabled", True)
        assert is_on(page)
        small(page)
        assert ours(draw(page)) == ["ToMe: 0.5"]
    finally:
        box.click()
        wait_for(page, webui, "tome_enabled", False)
    page.wait_for_function(f"!document.querySelector('{PANEL}enabled-visible-checkbox').checked")


def test_a_quicksetting_of_ours_counts_at_once_and_moves_the_panel(page, webui):
    unfold(page)
    for value in (0.3, 0.5):
        set_number(page, "#quicksettings #setting_tome_strength", value)
        page.wait_for_function(f"document.querySelector('{PANEL}strength input[type=number]').value == {value}")
        wait_for(page, webui, "tome_strength", value)  # else the first may be set after the second


def test_the_settings_tab_has_four_of_ours(page):
    found = page.evaluate("[...document.querySelectorAll('#settings_tome [id^=setting_tome_]')].map(one => one.id)")
    # those among the quicksettings are not there a second time
    assert set(found) == {f"setting_tome_{name}" for name in ("where", "report")}
