"""The page: what it reads, draws and says; and in a browser, `install.py page` in a fresh copy of the project."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tome_core
from demo import page
from demo.page import Drawn, Stopped, Studio, Wanted
from tests import checkout
from tests.gradio_panel.serving import OPENER, free_port, wait_until_ready
from tests.traces import traces
from tome_core import form
from tome_core.settings.presets import SD

SLOW = 120_000  # ms; small machines take long to draw
VALUES = {"strength": 0.5, "prompt": "day sea", "seed": 5, "steps": 2.0, "own": False,
          **form.values_of(tome_core.strength(0.5))}  # fmt: skip


# --- by itself --------------------------------------------------------------------------------------------------------


def test_a_strength_counts_unless_own_settings_do():
    assert page.read(VALUES, SD, True) == Wanted("day sea", 5, 2, {"strength": 0.5})
    own = page.read({**VALUES, "own": True, "ratio": 0.35}, SD, True).how["config"]
    assert form.values_of(own) == {**form.values_of(tome_core.strength(0.5)), "ratio": 0.35}


@pytest.mark.parametrize("changes, words", [
    ({"prompt": "day banana"}, "does not know the word 'banana'"), ({"seed": -1}, "'-1' is no seed"),
    ({"seed": None}, "Seed and steps"), ({"steps": 0.5}, "'0.5' is no number of steps"),
    ({"strength": 2}, "strength=2"), ({"own": True, "ratio": 2}, "ratio=2"),
    ({"own": True, "start": 0.8, "end": 0.2}, "start=0.8 lies after end=0.2; swap them"),
], ids=str)  # fmt: skip
def test_what_is_not_possible_is_told_in_a_sentence(changes, words):
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        page.read({**VALUES, **changes}, SD, True)


@pytest.mark.parametrize("own", [False, True], ids=["strength", "own settings"])
def test_the_script_says_all_and_can_be_read(own):
    wanted = page.read({**VALUES, "own": own, "ratio": 0.35}, SD, True)
    asked = []

    def patch(pipe, *how, **more):
        asked.append(how or more)

    names = {"tome_core": SimpleNamespace(MergeConfig=tome_core.MergeConfig, patch=patch)}
    told = re.search(r"tome_core\.patch\(pipe, .*\)(?= as)", page.script(wanted)).group()
    exec(told, {**names, "pipe": None})
    assert asked == [(wanted.how["config"],) if own else {"strength": 0.5}]
    assert "manual_seed(5)" in page.script(wanted) and "num_inference_steps=2" in page.script(wanted)


def test_of_equal_pictures_it_says_so_and_of_others_how_near_they_are():
    one, other = np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 16, np.uint8)
    same = page.figures(Drawn(one, one, (4.0, 2.0), "", []), True)
    assert same.endswith("2.00 times as fast; the same picture, bit for bit.")
    assert "4.00 s without merging, 2.00 s with it: 2.00 times as fast; PSNR 24.0 dB" in page.figures(
        Drawn(one, other, (4.0, 2.0), "", []), False)  # fmt: skip


def test_a_mosaic_has_the_mean_colour_of_each_group():
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    found = page.mosaic(picture, (2, 2), np.array([0, 1, 1, 0]))
    for group in (slice(0, 2), slice(2, 4)), (slice(2, 4), slice(0, 2)):
        assert (found[group] == found[0, 2]).all()
    assert (found[0, 2] == np.stack([picture[:2, 2:], picture[2:, :2]]).mean((0, 1, 2)).round()).all()


class _Source:
    """Draws noise with a small model."""

    prompt_row, device, prompts, name = 0, torch.device("cpu"), ("day sea",), "a model"

    def __init__(self):
        from tests.models import small

        self.target, self.steps = small(), []

    def timesteps(self, steps):
        return None

    def picture(self, text, seed, steps, on_step):
        for step in range(steps):
            self.steps.append(step)
            on_step()
        return np.full((8, 8, 3), seed, np.uint8)


def test_a_picture_that_is_stopped_leaves_the_model_as_it_was_and_the_next_is_drawn():
    studio, told = Studio(_Source()), []
    before = traces(studio.source.target)

    def tell(share, doing):
        told.append((share, doing))
        if doing == "with merging":
            studio.stop()

    with pytest.raises(Stopped):
        studio.draw(Wanted("", 1, 3, {"strength": 0.5}), tell)
    assert traces(studio.source.target) == before
    assert [doing for _, doing in told] == ["warming up", *["without merging"] * 3, "warming up", "with merging"]
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and shares[0] > 0 and shares[-1] < 1
    drawn = studio.draw(Wanted("", 2, 1, {"strength": 0.5}), lambda *_: None)
    assert (drawn.plain == 2).all() and "Token merging" in drawn.report and traces(studio.source.target) == before


def test_pictures_are_drawn_one_after_the_other():
    studio, inside, most = Studio(_Source()), [], []

    def tell(share, doing):
        inside.append(threading.current_thread())
        most.append(len(set(inside[-2:])))

    threads = [threading.Thread(target=studio.draw, args=(Wanted("", 1, 20, {"strength": 0.5}), tell)) for _ in "ab"]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert most.count(2) == 1


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(request, tmp_path_factory):
    """A fresh copy of the project whose `install.py page` has made itself the environment it needs."""
    pytest.importorskip("playwright.sync_api", reason="needs playwright")
    copy = checkout.kept(request.config, tmp_path_factory.mktemp("page"))
    first = subprocess.run(_command(copy, "--help"), capture_output=True, text=True, check=False)
    if first.returncode:
        pytest.skip(f"install.py page could not make its environment: {first.stdout[-500:]}{first.stderr[-500:]}")
    return copy


def _command(copy, *options):
    return [sys.executable, str(copy / "install.py"), "page", *options]


@contextlib.contextmanager
def started(copy, folder, *options, **environment):
    """The page's address and its process, as a user starts it, from a folder not ours and with no way to others."""
    port = free_port()
    command = _command(copy, "--no-browser", "--port", str(port), "--device", "cpu", *options)
    away = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    variables = {**os.environ, **away, **environment}
    with subprocess.Popen(command, cwd=folder, env=variables, start_new_session=True) as process:
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}/", process
        finally:
            checkout.end(process)


@contextlib.contextmanager
def visited(chromium, address):
    """The page in a browser; whatever it asks for has to come from this machine."""
    asked, failed = [], []
    with contextlib.closing(chromium.new_page(viewport={"width": 1280, "height": 1400})) as made:
        made.set_default_timeout(SLOW)
        made.on("request", lambda request: asked.append(request.url))
        made.on("pageerror", lambda error: failed.append(str(error)))
        made.goto(address, wait_until="domcontentloaded")
        made.locator("#generate").wait_for()
        yield made
    assert not failed
    assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]


def _fill(made, **values):
    for name, value in values.items():
        box = made.locator(f"#{name} input[type=number], #{name} textarea").first
        box.fill(str(value))
        box.press("Tab")


def _generate(made, until):
    """Press once more if gradio has lost the click, as a user does."""
    from playwright.sync_api import TimeoutError

    for last in (False, True):
        made.locator("#generate").click()
        try:
            return made.get_by_text(re.compile(until)).first.wait_for(timeout=SLOW if last else 60_000)
        except TimeoutError:
            if last:
                raise


@pytest.mark.slow
def test_a_picture_is_drawn_and_told_and_what_is_wrong_is_said(chromium, installed, tmp_path, tiny_folder):
    with started(installed, tmp_path) as (address, _), visited(chromium, address) as made:
        _fill(made, prompt="day banana", steps=1)
        _generate(made, "does not know the word 'banana'")
        assert not made.locator("#slider img").count()
        _fill(made, prompt="night snow peaks right blue cone", steps=2, strength=1)
        _generate(made, r"times as fast; PSNR [\d.]+ dB, \d+% of the detail")
        made.locator("#gallery").get_by_text(re.compile(r"Level 0: 4096 tokens became \d+")).first.wait_for()
        assert made.locator("#slider img").count() >= 2
        made.get_by_text("Report, and the same with diffusers").click()
        assert "model calls" in made.locator("#report textarea").input_value()
        assert "strength=1" in made.locator("#script").inner_text()
        with pytest.raises(urllib.error.HTTPError):
            OPENER.open(urllib.request.Request(address, headers={"Host": "elsewhere.example"}))
        from_elsewhere = {"Content-Type": "multipart/form-data; boundary=edge", "Origin": "https://elsewhere.example"}
        with pytest.raises(urllib.error.HTTPError):
            OPENER.open(urllib.request.Request(f"{address}gradio_api/upload", _FILE, from_elsewhere))
    with started(installed, tmp_path, "--model", str(tiny_folder)) as (address, _), visited(chromium, address) as made:
        _fill(made, prompt="a cat", steps=2)
        _generate(made, r"times as fast|bit for bit")
        made.get_by_text("Report, and the same with diffusers").click()
        assert str(tiny_folder) in made.locator("#script").inner_text()


_FILE = b'--edge\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nhello\r\n--edge--\r\n'


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows ends a program without telling it")
@pytest.mark.parametrize(("which", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["kill", "Ctrl-C"])
def test_it_stops_and_leaves_nothing_behind_when_it_is_ended_with_a_picture_half_drawn(
    installed, chromium, tmp_path, which, code
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with started(installed, tmp_path, TMPDIR=str(temporary)) as (address, process):
        with visited(chromium, address) as made:
            _fill(made, steps=500)
            _generate(made, "without merging")
            made.locator("#stop").click()
            made.get_by_text("Stopped.").first.wait_for()
            _generate(made, "without merging")
            os.killpg(process.pid, which)
            ended = process.wait(60)
        assert not list(temporary.iterdir())
        assert ended == code
        with pytest.raises(ConnectionError), socket.socket() as gone:
            gone.connect(("127.0.0.1", int(address.rstrip("/").rpartition(":")[2])))
