"""The panel of a real webui, clicked in a real browser: A1111 and reForge have gradio 3.41, Forge has 4.40."""

import re

import pytest

from tests.hosts.webui.running import PAYING

PANEL = "#script_txt2img_token_merging_tome_"
NUMBER = "input[type=number]"
SLOW = 1_200_000  # ms; small machines take long to draw


class Page:
    def __init__(self, page, webui):
        self.page, self.webui = page, webui
        self.load()

    def load(self):
        self.page.set_default_timeout(SLOW)
        self.page.goto(self.webui.url, wait_until="load")
        self.page.wait_for_selector("#txt2img_prompt textarea")
        self.page.wait_for_timeout(3000)

    def at(self, name):
        return self.page.locator(f"{PANEL}{name}").first

    def unfold(self, name="panel"):
        self.at(f"{name} .label-wrap").click()
        self.page.wait_for_timeout(1000)

    def title(self):
        return self.at("panel .label-wrap").inner_text().split("\n")[0].strip()

    def is_on(self):
        """Is it on? Folded, the panel says it too."""
        is_on = self.at("enabled input").is_checked()
        self.page.wait_for_timeout(1000)
        assert self.title() == ("Token Merging (ToMe): on" if is_on else "Token Merging (ToMe)")
        return is_on

    def number(self, name):
        return float(self.at(f"{name} {NUMBER}").input_value())

    def wait(self, name, condition):
        """Until a condition holds of the control's element, which it calls `it`."""
        self.page.wait_for_function(f"(it => {condition})(document.querySelector('{PANEL}{name}'))")

    def be_small(self):
        """Set a picture that is small, but has as many tokens as a strength needs."""
        for name, value in {**PAYING, "steps": 3}.items():
            box = self.page.locator(f"#txt2img_{name} {NUMBER}").first
            box.fill(str(value))
            box.press("Tab")

    def draw(self):
        self.page.locator("#txt2img_generate").click()
        self.page.wait_for_function("document.querySelector('#html_info_txt2img').innerText.includes('Steps:')")
        self.page.wait_for_timeout(1000)
        return self.page.locator("#txt2img_results").inner_text()

    def paste(self, text):
        self.page.locator("#txt2img_prompt textarea").fill(text)
        self.page.wait_for_timeout(300)
        self.page.locator("#txt2img_tools #paste").click()
        self.page.wait_for_timeout(3000)


@pytest.fixture
def page(webui, chromium):
    with chromium.new_page(viewport={"width": 1280, "height": 1300}) as tab:
        yield Page(tab, webui)


def test_after_reload_ui_unfolding_switches_nothing_on_and_a_clicked_marks_picture_is_the_apis(page, webui):
    """This test comes first, because gradio's server waits for requests of closed pages, sometimes for ever."""
    start = len(webui.log_text())
    page.page.evaluate("gradioApp().querySelector('#settings_restart_gradio').click()")
    while "Startup time" not in webui.log_text(start):
        page.page.wait_for_timeout(500)
    page.page.wait_for_timeout(2000)
    page.load()
    assert not page.is_on()
    page.unfold()
    assert not page.is_on()
    page.at("enabled input").check()
    assert page.is_on()
    page.at("panel a:text('fast')").click()
    page.wait(f"strength {NUMBER}", "it.value == 0.75")
    page.be_small()
    shown = page.draw()
    assert re.search(r"ToMe: 0\.75(?=[,;\n]|$)", shown) and webui.draw(True, 0.75, **PAYING).ours == ["ToMe: 0.75"]
    assert webui.our_lines()[-2] == webui.our_lines()[-1] and "strength 0.75, 3 steps, " in shown
    assert "Error loading script: token_merging.py" not in webui.log_text() and webui.state()["patched"] == 0


def test_there_are_three_controls_and_where_with_hires_fix_and_the_line_answers(page):
    """It answers as soon as the page opens."""
    page.wait("line", "/off; if enabled, ([0-9]+x[0-9]+: |no model)/.test(it.textContent)")  # Forge loads it later
    page.unfold()
    names = ("enabled", "strength", "where", "expert", "own", "sx")
    assert {name for name in names if page.at(name).is_visible()} == {"enabled", "strength", "expert"}
    page.be_small()
    answer = "{width}x{height}: about ".format(**PAYING)
    page.draw()  # the model is loaded then
    page.wait("line", f"it.innerText.includes('if enabled, {answer}')")
    page.at("enabled input").check()
    page.wait("line", f"it.innerText.trim().startsWith('{answer}')")
    page.page.locator("#txt2img_hr .label-wrap").first.click()
    page.at("where").wait_for()
    page.wait("line", f"/first pass {answer}.*; hires pass /.test(it.innerText)")
    page.unfold("expert")
    page.at("sx").wait_for()
    assert page.number("ratio") == 0.859, "rounded"


def test_an_open_page_asks_nothing_of_the_server_by_itself(page):
    """In gradio 4 some texts tell of a change whenever an answer is awaited, which may go on for ever."""
    asked = []
    page.page.on("request", lambda request: request.method == "POST" and asked.append(request.url))
    page.page.wait_for_timeout(15_000)
    asked.clear()
    page.page.wait_for_timeout(10_000)
    assert len(asked) <= 2, asked


def test_pasting_sets_the_panel_and_pasting_a_picture_without_us_turns_it_off(page):
    pairs = "Steps: 3, Sampler: Euler, CFG scale: 7, Seed: 1, Size: 128x128"
    page.paste(f"a lake\n{pairs}, ToMe: 0.35; hires pass; sx=3; start=0.1")
    wanted = {"strength": 0.35, "sx": 3, "start": 0.1, "end": 1}
    assert page.is_on() and {name: page.number(name) for name in wanted} == wanted
    assert page.at("own input").is_checked()
    assert page.at("where input:checked").evaluate("it => it.value") == "hires pass"
    page.paste(f"a lake\n{pairs}")
    assert not page.is_on() and page.number("strength") == 0.35


def test_each_tooltip_is_ours_as_the_webui_knows_texts_of_its_own(page, checkout):
    """The webui gives a text its own tooltip if the text is in a list of the webui's: our labels are not in it."""
    hints = (checkout / "javascript" / "hints.js").read_text(encoding="utf-8")
    known = set(re.findall(r"""^\s*["'](.+?)["']\s*:""", hints, re.MULTILINE))
    assert "Seed" in known, "the list is read"
    page.page.wait_for_timeout(3000)  # the webui puts tooltips on after a second
    spans = page.page.locator(f"{PANEL}panel span")
    assert not known & {text.strip() for text in spans.all_text_contents()}
    assert not [title for title in spans.evaluate_all("all => all.map(it => it.title)") if title]
    assert page.at("merge_seed").get_attribute("title").startswith("The seed of the random destinations.")
    assert "Begin with 0.5" in page.at("strength").get_attribute("title")
