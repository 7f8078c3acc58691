"""The panel and settings in real gradio, 3.41.2 (A1111, reForge) and 4.40.0 (Forge), each in a kept environment."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

import install
from tests.gradio_panel.serving import answers, free_port, running

pytestmark = pytest.mark.slow  # two versions of gradio, each in its own environment
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
PANEL = Path(__file__).parents[1] / "gradio_panel"
QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "no_proxy": "*"}
# --only-binary: on a Python too new for the webui's pins, say so instead of compiling numpy; --no-compile: what is
# imported is compiled then, a small part of it
INSTALL = ("install", "--disable-pip-version-check", "--only-binary=:all:", "--no-compile", "-r")
NUMBER = "input[type=number]"


@pytest.fixture(scope="module", params=["a1111", "forge"])
def address(chromium, request, tmp_path_factory):
    """The address at which app.py serves its page, in an environment with the gradio of each webui."""
    cache = getattr(request.config, "cache", None)  # pytest may have no cache
    folder = (cache.mkdir("gradio") if cache else tmp_path_factory.mktemp("gradio")) / request.param
    python, stamp, pins = install.venv_python(folder), folder / "installed.txt", PANEL / f"{request.param}.txt"
    mark = sys.version + pins.read_text(encoding="utf-8")
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != mark:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, symlinks=os.name != "nt")
        command = [sys.executable, "-m", "pip", "--python", str(python), *INSTALL, str(pins)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"pip could not install {pins.name}: {done.stderr[-300:]}")
        stamp.write_text(mark, encoding="utf-8")
    port, log = free_port(), tmp_path_factory.mktemp("served") / "page.log"
    # -I: nothing of this environment except the given torch
    command = [str(python), "-I", str(PANEL / "app.py"), str(port), str(Path(torch.__file__).parents[1])]
    url = f"http://127.0.0.1:{port}"
    with running(command, log, lambda: answers(url), env={**os.environ, **QUIET}):
        yield url


class Page:
    """The page of app.py; names are of the panel's controls."""

    def __init__(self, page, address):
        self.page = page
        page.set_default_timeout(120_000)  # ms; small machines take long to draw
        page.goto(address, wait_until="domcontentloaded")
        page.wait_for_selector("#generate")

    def at(self, name, inside=""):
        return self.page.locator(f"#script_txt2img_{name} {inside}".strip()).first

    def check(self, name, on=True):
        self.at(name, "input[type=checkbox]").set_checked(on)

    def unfold(self):
        self.at("panel", ".label-wrap").click()
        self.at("strength").wait_for()

    def wait_for_title(self, title):
        """The text on the panel, which tells whether merging is on."""
        box = "document.querySelector('#script_txt2img_panel .label-wrap')"
        self.page.wait_for_function(f"text => {box}.innerText.split('\\n')[0].trim() == text", arg=title)

    def type(self, box, value):
        box.fill(str(value))
        box.press("Tab")

    def wait_for_number(self, name, value):
        ask = "([id, value]) => document.querySelector(`#${id} input[type=number]`).value == value"
        self.page.wait_for_function(ask, arg=[f"script_txt2img_{name}", value])

    def infotext(self):
        """Generate, and return our part of the infotext; press again, because gradio 4 loses a click now and then."""
        box = "document.querySelector('#answer textarea')"
        before = self.page.evaluate(f"{box}.value")
        for _ in range(4):
            self.page.locator("#generate").click()
            try:
                ask = f"old => {box}.value !== old && {box}.value"
                return json.loads(self.page.wait_for_function(ask, arg=before, timeout=30_000).json_value())["ToMe"]
            except sync_api.TimeoutError as error:
                late = error
        raise late


@pytest.fixture
def page(chromium, address):
    with chromium.new_page(viewport={"width": 1280, "height": 2500}) as tab:
        yield Page(tab, address)


def test_untouched_or_unfolded_it_is_off_and_switched_on_its_strength_arrives(page):
    assert page.infotext() is None and not page.at("strength").is_visible()
    page.unfold()
    assert page.infotext() is None
    page.wait_for_title("Token Merging (ToMe)")
    page.check("enabled")
    page.wait_for_title("Token Merging (ToMe): on")
    page.type(page.at("strength", NUMBER), 0.35)
    assert page.infotext() == "0.35"
    page.at("panel", "a:text('fast')").click()
    page.wait_for_number("strength", 0.75)
    page.type(page.page.locator(f"#quick_tome_strength {NUMBER}").first, 0.15)
    page.wait_for_number("strength", 0.15)
    assert page.infotext() == "0.15"
    page.check("enabled", False)
    page.wait_for_title("Token Merging (ToMe)")
    assert page.infotext() is None


def test_what_an_expert_types_counts_without_a_tick_and_goes_along_with_strength(page):
    page.unfold()
    page.check("enabled")
    page.at("expert").get_by_text("Expert").click()
    page.at("sx").wait_for()
    page.type(page.at("sx", NUMBER), 2)
    assert page.infotext() == "0.5; sx=2"
    page.type(page.at("strength", NUMBER), 0.25)
    page.wait_for_number("early_ratio", 0.984)  # rounded
    assert page.infotext() == "0.25; sx=2"
    page.check("own", False)
    assert page.infotext() == "0.25"
