"""The page in a browser: `install.py page` in a fresh copy of the project, clicked in Chromium."""

from __future__ import annotations

import contextlib
import functools
import http.client
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from tests import checkout
from tests.gradio_panel.page import Page, TimeoutError
from tests.gradio_panel.serving import OPENER, free_port, wait_until_ready
from tome_core import form

pytestmark = pytest.mark.slow  # an environment with gradio, and a browser
pytest.importorskip("playwright.sync_api", reason="needs playwright")
SLOW = 120_000  # ms; small machines take long to draw
NARROW = {"width": 400, "height": 800}
COMPARE, EXPERT, ELSEWHERE = FOLDED = ("Compare strengths", "Expert", "These settings elsewhere")


@pytest.fixture(scope="module")
def installed(request, tmp_path_factory):
    """A fresh copy of the project whose `install.py page` has made itself the environment it needs."""
    copy = checkout.kept(request.config, tmp_path_factory.mktemp("page"))
    first = subprocess.run(page_command(copy, "--help"), capture_output=True, text=True, check=False)
    if first.returncode:
        pytest.skip(f"install.py page could not make its environment: {first.stdout[-500:]}{first.stderr[-500:]}")
    return copy


@pytest.fixture(scope="module")
def address(installed, tmp_path_factory):
    """Where the page with the embedded model is."""
    with started(installed, tmp_path_factory.mktemp("elsewhere")) as (found, _):
        yield found


def page_command(copy, *options):
    return [sys.executable, str(copy / "install.py"), "page", *options]


@contextlib.contextmanager
def started(copy, folder, *options, **environment):
    """The page's address and its process, as a user starts it, from a folder not ours and with no way to others."""
    port = free_port()
    command = page_command(copy, "--no-browser", "--port", str(port), "--device", "cpu", *options)
    away = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    variables = {**os.environ, **away, **environment}
    with subprocess.Popen(command, cwd=folder, env=variables, start_new_session=True) as process:
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}/", process
        finally:
            checkout.end(process)


class MergingPage(Page):
    """What a user sees and does; a name is a part's."""

    def __init__(self, page):
        super().__init__(page, "")

    def text(self, name):
        return self.at(name).inner_text()

    def box(self, name):
        return self.at(name, ":is(textarea, input)")

    def link(self):
        self.unfold(ELSEWHERE, "link")
        return self.page.locator("#link textarea, #link input").first.input_value()

    def until(self, name, pattern):
        """Wait for a text in a part, and give the part's whole text."""
        self.at(name).filter(has_text=re.compile(pattern)).wait_for()
        return self.text(name)

    def unfold(self, title, part):
        """Open what is folded under a title, until a part in it is there."""
        if not self.at(part).count():
            self.page.get_by_text(title, exact=True).click()
            self.at(part).wait_for()

    def until_link(self, part, there=True, again=None):
        """again: does once more what gradio may have lost, see `Page.click`."""
        self.unfold(ELSEWHERE, "link")
        ask = "([part, there]) => document.querySelector('#link textarea, #link input').value.includes(part) === there"
        try:
            self.page.wait_for_function(ask, arg=[part, there], timeout=SLOW if again is None else 30_000)
        except TimeoutError:
            if again is None:
                raise
            again()
            self.page.wait_for_function(ask, arg=[part, there])

    def type(self, name, text):
        """Write a text in the place of the one that is there, as fingers do."""
        self.box(name).fill("")
        self.box(name).press_sequentially(text)

    def until_drawn(self, images, number, width):
        """Wait until there are so many images at least, all loaded and so wide: a browser loads them after the text."""
        ask = """([images, number, width]) => {
            const widths = [...document.querySelectorAll(images)].map(one => one.complete && one.naturalWidth)
            return widths.length >= number && widths.every(one => one === width)
        }"""
        self.page.wait_for_function(ask, arg=[images, number, width])

    def until_line(self, low, high):
        """Wait until the line is so far from the picture's left, in %; the picture is in the middle of its frame."""
        ask = """([low, high]) => {
            const frame = document.querySelector('#slider img.fixed'), width = frame.clientWidth
            const picture = Math.min(width, frame.clientHeight * frame.naturalWidth / frame.naturalHeight)
            const clipped = +frame.style.clipPath.match(/([\\d.]+)%\\)/)[1] / 100 * width
            const at = (clipped - (width - picture) / 2) / picture * 100
            return low <= at && at <= high
        }"""
        self.page.wait_for_function(ask, arg=[low, high])


@pytest.fixture
def opened(chromium, address):
    """Opens the page with the embedded model."""
    with visits(chromium, address) as go:
        yield go


@contextlib.contextmanager
def visits(chromium, address):
    """Opens the page, with a query and a size; whatever it asks for has to come from this machine, and to be given."""
    with contextlib.ExitStack() as stack:
        asked, failed, refused = [], [], []

        def go(query="", **size):
            made = chromium.new_page(viewport=size or {"width": 1280, "height": 1400})
            stack.callback(made.close)
            made.set_default_timeout(SLOW)
            made.on("request", lambda request: asked.append(request.url))
            made.on("response", lambda one: refused.append((one.status, one.url)) if one.status >= 400 else None)
            made.on("pageerror", lambda error: failed.append(str(error)))
            made.goto(address + query, wait_until="domcontentloaded")
            page = MergingPage(made)
            page.at("generate").wait_for()
            page.at("plot", "svg").wait_for()  # with which all is filled in
            return page

        yield go
        assert not failed and not refused
        assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]


def test_a_picture_is_made_told_step_by_step_and_the_line_moves_by_mouse_and_keyboard(opened):
    page = opened("?steps=2&prompt=night+snow+peaks+right+blue+cone")
    assert not page.at("stop", "").is_enabled()
    page.at("generate").click()
    page.until("says", r"Without merging: step \d of 2")
    assert page.at("says", "progress").get_attribute("max") == "1" and page.at("stop").is_enabled()
    page.until("says", r"^\s*Done\.")
    figures = r"Strength 0\.5: [\d.]+ s of processor time without merging, [\d.]+ s of processor time with: " \
        r"[\d.]+ times as fast; PSNR [\d.]+ dB, detail \d"  # fmt: skip
    assert re.search(figures, page.text("figures"))
    assert page.at("plot", "circle.now").get_attribute("data-strength") == "0.5"
    assert page.at("plot", "circle.run").get_attribute("data-strength") == "0.5"
    assert "Dots: your last pictures here, 0.5:" in page.text("plot")
    assert re.search(r"Level 0: 4096 tokens became \d+", page.at("maps").inner_text())
    page.page.get_by_text("Report", exact=True).click()
    assert "Token merging:" in page.until("report", "model calls")
    page.until_drawn("#slider img, #difference img, #maps img", number=4, width=512)
    before, after = (one.get_attribute("src") for one in page.page.locator("#slider img").all())
    assert before != after

    page.until_line(50, 50)
    page.at("slider", "img").scroll_into_view_if_needed()  # the report lies below, and with it open it is on screen
    here = page.at("slider", "[data-testid=slider] .icon-wrap").bounding_box()
    frame = page.at("slider", "img").bounding_box()
    page.page.mouse.move(here["x"] + here["width"] / 2, here["y"] + here["height"] / 2)
    page.page.mouse.down()
    page.page.mouse.move(here["x"] - 100, frame["y"] + frame["height"] / 2, steps=4)
    page.page.mouse.up()
    page.until_line(10, 40)
    page.number("position", 80)
    page.until_line(79, 81)
    page.key("position", "ArrowRight")
    page.until_line(80.5, 82)


def test_ones_own_model_is_drawn_with_and_the_code_to_copy_names_it(chromium, installed, tmp_path, tiny_folder):
    with started(installed, tmp_path, "--model", str(tiny_folder)) as (address, _), visits(chromium, address) as go:
        page = go("?steps=2&prompt=a+cat&strength=0.5&only_if_it_pays=False")
        page.at("generate").click()
        page.until("says", r"^\s*Done\.")
        assert re.search(r"[\d.]+ times as fast; PSNR [\d.]+ dB", page.text("figures"))
        assert re.search(r"Level 0: 256 tokens became \d+", page.at("maps").inner_text())
        page.unfold(ELSEWHERE, "script")
        assert str(tiny_folder) in page.until("script", "image.save")


def test_a_run_is_cancelled_and_the_next_one_is_made(opened):
    page = opened("?steps=500")
    page.at("generate").click()
    page.until("says", r"Without merging: step \d+ of 500")
    page.at("stop").click()
    page.until("says", r"Stopped\.")
    page.page.wait_for_function("document.querySelector('#stop').disabled")
    page.unfold(EXPERT, "steps")
    page.number("steps", 1)
    page.until_link("steps=1&")
    page.at("generate").click()
    page.until("says", r"^\s*Done\.")


def test_a_wrong_value_is_told_beside_its_control_and_nothing_is_made(opened):
    page = opened("?steps=1")
    page.type("prompt", "day banana")
    assert "does not know the word 'banana'" in page.until("prompt", "banana")
    page.until_link("strength=", there=False)
    page.box("prompt").press("Enter")
    page.until("says", "does not know the word 'banana'")
    assert not page.page.locator("#slider img").count()
    page.type("prompt", "day sea")
    page.until("prompt", "The embedded model knows")
    page.unfold(EXPERT, "start")
    page.number("start", 0.8)
    page.until_link("start=0.8")
    page.number("end", 0.2)
    for name in ("start", "end", "says"):
        assert "start=0.8 lies after end=0.2; swap them" in page.until(name, "swap them")
    page.number("end", 1)
    page.until_link("start=0.8")
    assert "swap" not in page.text("start") + page.text("end") + page.text("says")


SEEN = """() => [...document.querySelectorAll('input, textarea, button, select, [role=tab], [tabindex="0"]')]
    .filter(one => one.checkVisibility({visibilityProperty: true}) && one.getClientRects().length)
    .map(one => one.closest('[id]:not(input)').id || one.innerText.trim())"""


def test_at_first_sight_there_is_a_strength_a_prompt_and_two_buttons_and_all_else_is_folded(opened):
    page = opened(width=1280, height=900)
    # a slider is a number, a button that resets it and a knob
    assert page.page.evaluate(SEEN) == [*["strength"] * 3, "prompt", "generate", "stop", "comparing", "expert",
                                        "elsewhere"]
    assert page.box("prompt").bounding_box()["y"] > page.at("strength").bounding_box()["y"]
    for mark in ("0\noff", "0.25\nquality", "0.5\nbalanced", "0.75\nfast", "1\nmax"):
        assert mark in page.page.locator(".marks").inner_text()


def test_the_strength_fills_the_settings_moves_the_ring_and_the_link_restores_what_was_changed(opened):
    page = opened()
    page.number("strength", 1)
    page.until_link("strength=1")
    page.page.locator("#plot circle.now[data-strength='1']").wait_for()
    page.unfold(EXPERT, "merge_seed")
    page.wait_for_number("ratio", form.fill(1.0)["ratio"])
    page.number("ratio", 0.35)
    page.until("by", r"Changed by hand: ratio\.")
    page.number("merge_seed", 77)
    page.number("picture_seed", 5)
    page.until_link("merge_seed=77")
    page.until_link("&seed=5&")
    script = page.until("script", "image.save")
    assert "ratio=0.35" in script and "seed=77" in script and "manual_seed(5)" in script
    again = opened(page.link().partition("/?")[2].join(("?", "")))
    assert again.link() == page.link()
    again.until("by", r"Changed by hand: ratio, merge_seed\.")
    again.number("strength", 0.9)
    again.until_link("strength=0.9&merge_seed=77")
    wrong = opened("?ratio=2")
    assert "ratio=2 is out of range" in wrong.until("says", "The link was not used")


def test_four_strengths_are_compared_side_by_side_and_0_is_the_same_picture_bit_for_bit(opened):
    page = opened("?steps=1")
    page.unfold(COMPARE, "compare")
    page.type("strengths", "0, .25, .5, .75, 1")
    page.at("compare").click()
    assert "5 strengths to compare; give 1 to 4" in page.until("strengths", "give 1 to 4")
    page.type("strengths", "0, .25, .5, 1")
    page.box("strengths").press("Enter")
    page.until("says", r"With merging, 2 of 4: step \d of 1|Done")
    page.until("says", r"^\s*Done\.")
    cells = page.page.locator("#grid figure")
    names = [one.split("\n")[0] for one in cells.all_inner_texts()]
    assert names == ["Strength 0", "Strength 0.25", "Strength 0.5", "Strength 1"]
    assert "the same picture, bit for bit" in cells.nth(0).inner_text()
    figures = r"[\d.]+ s of processor time, [\d.]+ times as fast; PSNR [\d.]+ dB, detail \d+%"
    assert re.search(figures, cells.nth(3).inner_text())
    boxes = [one.bounding_box() for one in cells.all()]
    assert len({box["y"] for box in boxes}) == 1 and len({box["x"] for box in boxes}) == 4, "not side by side"
    assert page.page.locator("#plot circle.run").count() == 4
    assert "Strength 1:" in page.text("figures")


# what a block around it may cut off without making the page wider
OUTSIDE = """width => [...document.querySelectorAll('svg, img, button, input, textarea, p, figcaption')]
    .filter(one => one.checkVisibility({visibilityProperty: true}) && one.getClientRects().length)
    .filter(one => one.getBoundingClientRect().right > width || one.getBoundingClientRect().left < 0)
    .map(one => one.outerHTML.slice(0, 200))"""


def test_it_fits_into_400_pixels(opened):
    page = opened("?steps=1", **NARROW)
    for title, part in zip(FOLDED, ("compare", "merge_seed", "link"), strict=True):
        page.unfold(title, part)
    page.type("strengths", "0.5, 1")
    page.at("compare").click()
    page.until("says", r"^\s*Done\.")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    assert page.page.evaluate(OUTSIDE, NARROW["width"]) == []
    for name in ("strength", "prompt", "generate", "stop", "plot", "compare", "merge_seed", "grid", "slider",
                 "position", "difference", "maps", "link"):  # fmt: skip
        box = page.at(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= NARROW["width"], name


def test_the_keyboard_is_enough(opened):
    page = opened("?steps=1")
    press, focused = page.page.keyboard.press, "document.activeElement.closest('[id]:not(input)')?.id"
    outline = "(() => {const one = getComputedStyle(document.activeElement);" \
        "return one.outlineStyle !== 'none' || one.boxShadow !== 'none' || one.borderColor})()"  # fmt: skip
    seen = []

    def knob_once_more():
        for one in ("ArrowLeft", "ArrowRight"):
            page.key("strength", one)

    page.box("strength").focus()
    while "expert" not in seen and len(seen) < 20:
        press("Tab")
        seen.append(page.page.evaluate(focused))
        assert page.page.evaluate(outline)
        if page.page.evaluate("document.activeElement.type") == "range":
            press("ArrowRight")
            page.until_link("strength=0.55", again=knob_once_more)
    order = ["strength", "prompt", "generate", "comparing", "expert"]
    assert [name for name in dict.fromkeys(seen) if name in order] == order
    press("Enter")
    page.at("merge_seed").wait_for()
    page.at("generate").focus()
    press("Space")
    page.until("says", r"^\s*Done\.")
    page.key("position", "ArrowRight")
    page.until_line(50.5, 52)


def test_it_listens_on_this_machine_alone_and_forbids_the_page_to_ask_elsewhere(address):
    with OPENER.open(address) as answer:
        policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self'") and "http" not in policy
    others = {one[4][0] for one in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for other in others:
        with socket.socket() as outside, pytest.raises(OSError):
            outside.settimeout(5)
            outside.connect((other, int(address.rstrip("/").rpartition(":")[2])))
    with pytest.raises(urllib.error.HTTPError):
        OPENER.open(urllib.request.Request(address, headers={"Host": "elsewhere.example"}))


JSON = {"Content-Type": "application/json"}
FILE = b'--edge\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nhello\r\n--edge--\r\n'


def answer(address, path, body=None, **headers):
    """(status, text) of a request. Where a length is given, it is told and nothing sent."""
    server = http.client.HTTPConnection("127.0.0.1", int(address.rstrip("/").rpartition(":")[2]), timeout=60)
    with contextlib.closing(server):
        server.putrequest("GET" if body is None else "POST", path)
        kind = {} if body is None else {"Content-Type": "multipart/form-data; boundary=edge"}
        for name, value in ({**kind, "Content-Length": str(len(body or b"")), **headers}).items():
            server.putheader(name, value)
        server.endheaders(None if "Content-Length" in headers else body)
        response = server.getresponse()
        return response.status, response.read().decode()


def test_no_one_can_upload_a_file_and_another_sites_page_can_ask_for_nothing(address):
    status, sentence = answer(address, "/gradio_api/upload", FILE, Origin=address.rstrip("/"))
    assert status == 415 and "takes no file" in sentence
    status, sentence = answer(address, "/gradio_api/upload", FILE, Origin="https://elsewhere.example")
    assert status == 403 and "only the page itself may" in sentence
    assert answer(address, "/?seed=5", Referer="https://elsewhere.example/links")[0] == 200
    status, sentence = answer(address, "/gradio_api/queue/join", b"", **JSON, **{"Content-Length": str(2**20 + 1)})
    assert status == 413 and f"send at most {2**20} (1 MB)" in sentence


class Asker:
    """A program that asks the page as the page's own script does."""

    def __init__(self, address):
        self.address, self.asked = address, 0
        self.config = json.loads(answer(address, "/config")[1])
        self.names = {one["id"]: one["props"].get("elem_id") for one in self.config["components"]}
        self.values = {one["id"]: one["props"].get("value") for one in self.config["components"]}

    def event(self, part, does):
        """The number of what happens where a part is touched so."""
        part = next(number for number, name in self.names.items() if name == part)
        return next(one for one in self.config["dependencies"] if [part, does] in one["targets"])

    def ask(self, event, part, number):
        """(status, text): what is said where a part's value is this JSON text."""
        data = ",".join(number if self.names[one] == part else json.dumps(self.values[one]) for one in event["inputs"])
        self.asked += 1
        body = f'{{"fn_index": {event["id"]}, "session_hash": "s{self.asked}", "data": [{data}]}}'
        status, text = answer(self.address, "/gradio_api/queue/join", body.encode(), **JSON)
        if status != 200:
            return status, text
        told = answer(self.address, f"/gradio_api/queue/data?session_hash=s{self.asked}")[1]
        (last,) = [one for one in map(json.loads, re.findall(r"^data: ?(.*)$", told, re.M))
                   if one["msg"] == "process_completed"]  # fmt: skip
        assert last["success"], last
        return status, "".join(re.findall(r'role="alert"><strong>(.*?)</strong>', json.dumps(last).replace('\\"', '"')))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 400, "9" * 5000, "null", "-5", "[]"],
                         ids=lambda one: one[:20])  # fmt: skip
def test_a_program_that_sends_what_is_no_number_is_told_so_in_a_sentence(address, number):
    asker = Asker(address)
    for part, does in (("strength", "input"), ("picture_seed", "input"), ("steps", "input"), ("sx", "input"),
                       ("early_until", "input"), ("strengths", "submit")):  # fmt: skip
        status, text = asker.ask(asker.event(part, does), part, number)
        finite = number in ("null", "-5", "[]")
        assert (status, "is no number that the page takes" in text) == ((200, False) if finite else (400, True))
        assert text.strip() and "Traceback" not in text and len(text) < 500, (part, text)


def test_a_browser_that_shows_another_sites_page_is_refused(chromium, address, tmp_path):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with contextlib.closing(chromium.new_page()) as elsewhere:
            elsewhere.goto(f"http://127.0.0.1:{other.server_port}/")
            heard = []
            elsewhere.on("response", lambda one: heard.append((one.url, one.status)))
            upload = """async address => {
                const body = new FormData()
                body.append('files', new Blob(['hello']), 'a.txt')
                await fetch(`${address}gradio_api/upload`, {method: 'POST', mode: 'no-cors', body})
            }"""
            elsewhere.evaluate(upload, address)
            assert heard == [(f"{address}gradio_api/upload", 403)]
        other.shutdown()


@pytest.mark.skipif(os.name == "nt", reason="Windows ends a program without telling it")
@pytest.mark.parametrize(("which", "to_all", "code"), [
    (signal.SIGTERM, False, 0), (signal.SIGTERM, True, 0), (signal.SIGINT, True, 130),
], ids=["kill", "kill all", "Ctrl-C"])  # fmt: skip
def test_it_leaves_nothing_behind_when_it_is_ended_with_a_picture_half_made(
    installed, chromium, tmp_path, which, to_all, code
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with started(installed, tmp_path, TMPDIR=str(temporary)) as (address, process):
        with visits(chromium, address) as go:
            page = go("?steps=500")
            page.at("generate").click()
            page.until("says", r"Without merging: step \d+ of 500")
            page.page.locator("#slider img").first.wait_for()
            assert [one for one in temporary.rglob("*") if one.is_file()], "no picture was kept: this test sees nothing"
            (os.killpg if to_all else os.kill)(process.pid, which)
            ended = process.wait(60)
        assert not list(temporary.iterdir())
        assert ended == code
        with pytest.raises(ConnectionError), socket.socket() as gone:
            gone.connect(("127.0.0.1", int(address.rstrip("/").rpartition(":")[2])))
