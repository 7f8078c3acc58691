"""The page: what it reads, draws and says; and in a browser, `install.py page` in a fresh copy of the project."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tome_core
from demo import page
from demo.page import Stopped, Studio, Wanted
from tests.gradio_panel.serving import OPENER, free_port, wait_until_ready
from tests.project.checkout import fresh
from tests.small_models.unets import small
from tests.watching.traces import traces
from tome_core import form
from tome_core.settings.presets import SD

SLOW = 120_000  # ms; small machines take long to draw
VALUES = {"strength": 0.5, "prompt": "day sea", "seed": 5, "steps": 2.0, "own": False,
          **form.values_of(tome_core.strength(0.5))}  # fmt: skip


def test_a_strength_counts_unless_own_settings_do_and_what_is_not_possible_is_told_in_a_sentence():
    assert page.read(VALUES, SD, True) == Wanted("day sea", 5, 2, {"strength": 0.5})
    config = page.read({**VALUES, "own": True, "ratio": 0.35}, SD, True).how["config"]
    assert form.values_of(config) == {**form.values_of(tome_core.strength(0.5)), "ratio": 0.35}
    for changes, words in (
        ({"prompt": "day banana"}, "does not know the word 'banana'"), ({"seed": -1}, "'-1' is no seed"),
        ({"seed": None}, "Seed and steps"), ({"steps": 0.5}, "'0.5' is no number of steps"),
        ({"strength": 2}, "strength=2"), ({"own": True, "ratio": 2}, "ratio=2"),
        ({"own": True, "start": 0.8, "end": 0.2}, "start=0.8 lies after end=0.2; swap them")):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=re.escape(words)):
            page.read({**VALUES, **changes}, SD, True)


def test_a_mosaic_has_the_mean_colour_of_each_group():
    picture = np.array([[10, 20, 30, 50], [10, 20, 50, 70]], np.uint8)[..., None].repeat(3, 2)
    assert page.mosaic(picture, (1, 2), np.array([0, 1]))[..., 0].tolist() == [[15, 15, 50, 50]] * 2
    assert page.mosaic(picture, (1, 4), np.array([0, 1, 1, 0]))[..., 0].tolist() == [[35, 30, 30, 35]] * 2


def test_a_picture_that_is_stopped_leaves_the_model_as_it_was_and_the_next_is_drawn():
    def picture(text, seed, steps, on_step):
        for _ in range(steps):
            on_step()
        return np.full((8, 8, 3), seed, np.uint8)

    source = SimpleNamespace(
        target=small(), device=torch.device("cpu"), prompt_row=0, timesteps=lambda steps: None, picture=picture)
    studio, said, before = Studio(source), [], traces(source.target)

    def tell(share, doing):
        said.append((share, doing))
        if doing == "with merging":
            studio.stop()

    with pytest.raises(Stopped):
        studio.draw(Wanted("", 1, 3, {"strength": 0.5}), tell)
    assert traces(source.target) == before
    assert [doing for _, doing in said] == ["warming up", *["without merging"] * 3, "warming up", "with merging"]
    shares = [share for share, _ in said]
    assert shares == sorted(shares) and shares[0] > 0 and shares[-1] < 1
    drawn = studio.draw(Wanted("", 2, 1, {"strength": 0.5}), lambda *_: None)
    assert (drawn.plain == 2).all() and "Token merging" in drawn.report and traces(source.target) == before


@contextlib.contextmanager
def served(config, port, tmp_path):
    """The process of `install.py page` in a fresh copy of the project; it makes its environment first."""
    cache = getattr(config, "cache", None)  # pytest may have no cache
    copy = fresh((cache.mkdir("checkout") if cache else tmp_path) / "repository")
    command = [sys.executable, str(copy / "install.py"), "page"]
    first = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
    if first.returncode:
        pytest.skip(f"install.py page could not make its environment: {first.stdout[-500:]}{first.stderr[-500:]}")
    (tmp_path / "temporary").mkdir()
    away = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "TMPDIR": f"{tmp_path}/temporary"}
    with subprocess.Popen([*command, "--no-browser", "--port", str(port), "--device", "cpu"], cwd=tmp_path,
                          env={**os.environ, **away}, start_new_session=True) as process:  # fmt: skip
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/", process)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):  # the process has ended, with all that it started
                os.killpg(process.pid, signal.SIGTERM)


def generate(tab, until, **values):
    """Fill the controls, press the button and wait for these words."""
    for name, value in values.items():
        box = tab.locator(f"#{name} input[type=number], #{name} textarea").first
        box.fill(str(value))
        box.press("Tab")
    tab.locator("#generate").click()
    tab.get_by_text(re.compile(until)).first.wait_for()


# gradio's words for a draw that runs; the figures of the last picture have "without merging" as well
DRAWING = r"without merging\s*-\s*[\d.]+%"
FILE = b'--edge\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nhello\r\n--edge--\r\n'
FROM_ELSEWHERE = {"Content-Type": "multipart/form-data; boundary=edge", "Origin": "https://elsewhere.example"}


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows ends a program without telling it")
def test_a_picture_is_drawn_stopped_and_refused_and_the_page_ends_with_a_picture_half_drawn(chromium, request,
                                                                                            tmp_path):  # fmt: skip
    """The page starts as a user starts it, from another folder and without a network."""
    port, requests, failed = free_port(), [], []
    address = f"http://127.0.0.1:{port}/"
    with served(request.config, port, tmp_path) as process, contextlib.closing(chromium.new_page()) as tab:
        tab.set_default_timeout(SLOW)
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("pageerror", lambda error: failed.append(str(error)))
        tab.goto(address, wait_until="networkidle")  # gradio loses clicks before
        generate(tab, "does not know the word 'banana'", prompt="day banana", steps=1)
        assert not tab.locator("#slider img").count()
        generate(tab, r"times as fast; PSNR [\d.]+ dB, \d+% of the detail", prompt="night snow", steps=2)
        tab.locator("#gallery").get_by_text(re.compile(r"Level 0: 4096 tokens became \d+")).first.wait_for()
        assert tab.locator("#slider img").count() >= 2
        assert "model calls" in tab.locator("#report textarea").input_value()
        for foreign in (urllib.request.Request(address, headers={"Host": "elsewhere.example"}),
                        urllib.request.Request(f"{address}gradio_api/upload", FILE, FROM_ELSEWHERE)):
            with pytest.raises(urllib.error.HTTPError):
                OPENER.open(foreign)
        generate(tab, DRAWING, steps=500)
        tab.locator("#stop").click()
        tab.get_by_text("Stopped.").first.wait_for()
        generate(tab, DRAWING)
        tab.close()  # nobody waits for the picture, which is drawn all the same
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0
    assert not failed
    assert not [url for url in requests if not url.startswith((address, "data:", "blob:"))]
    assert not list((tmp_path / "temporary").iterdir()), "files are left"
