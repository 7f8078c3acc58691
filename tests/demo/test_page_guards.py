"""What stands before the page's server, asked as a server asks it. Needs neither gradio nor a browser."""

from __future__ import annotations

import asyncio
import json

import pytest

from demo import page_guards
from demo.page_guards import LARGEST

JOIN = "/gradio_api/queue/join"
ELSEWHERE = "https://elsewhere.example"
JSON = "application/json"


def answer(guard, scope, body=b"", parts=1):
    """(status, text) of a request with a body in so many parts; what gets through gives (200, the body as it came)."""
    step = -(-len(body) // parts) or 1
    waiting = [{"type": "http.request", "body": body[at : at + step], "more_body": at + step < len(body)}
               for at in range(0, max(len(body), 1), step)]  # fmt: skip
    told = []

    async def receive():
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message):
        told.append(message)

    async def app(scope, receive, send):
        read, more = b"", True
        while more:
            message = await receive()
            read, more = read + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": read})

    asyncio.run(guard(app)(scope, receive, send))
    first, *rest = told
    if first["type"] == "websocket.close":
        return 403, first["reason"]
    text = rest[0]["body"]
    if first["status"] != 200:
        assert dict(first["headers"])[b"content-length"] == str(len(text)).encode()
    return first["status"], text.decode()


def asked(path=JOIN, method="POST", kind="http", host="127.0.0.1:7860", **headers):
    """The answer to a request whose body nobody looks at."""
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in {"host": host, **headers}.items()]
    scope = {"type": kind, "path": path, "headers": raw} | ({"method": method} if kind == "http" else {})
    return answer(page_guards.Own, scope)


@pytest.mark.parametrize("headers", [
    {}, {"origin": "http://127.0.0.1:7860"}, {"origin": "http://localhost:7860"},
    {"host": "localhost:7860", "origin": "http://localhost:7860", "referer": "http://localhost:7860/?seed=5"},
    {"host": "localhost:9000", "origin": "http://localhost:9000"},  # through a tunnel
    {"host": "localhost", "origin": "http://localhost", "referer": "http://localhost/"},
    {"referer": "http://127.0.0.1:7860/?seed=5", "sec_fetch_site": "same-origin"}, {"sec_fetch_site": "none"},
    {"origin": "http://localhost:7860", "sec_fetch_site": "cross-site"},  # as 127.0.0.1 is another name
])  # fmt: skip
def test_the_page_itself_and_programs_on_this_machine_may_ask(headers):
    for path, method in ((JOIN, "POST"), ("/gradio_api/cancel", "POST"), ("/config", "GET"), ("/", "GET")):
        assert asked(path, method, **headers) == (200, "")


FOREIGN = [
    {"origin": ELSEWHERE}, {"origin": "null"}, {"referer": f"{ELSEWHERE}/a/page"}, {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"},
    {"origin": "http://127.0.0.1:8080"}, {"origin": "http://127.0.0.1"}, {"origin": "https://127.0.0.1:7860"},
    {"origin": "http://127.0.0.1:78600"}, {"referer": "http://127.0.0.1:7860.elsewhere.example/"},
    {"origin": "http://localhost.elsewhere.example:7860"}, {"origin": ""},
    {"origin": ELSEWHERE, "referer": "http://127.0.0.1:7860/"}, {"origin": "http://127.0.0.1:7860", "referer": "x"},
]  # fmt: skip


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_another_sites_page_is_refused_with_a_sentence(headers):
    for path, method in ((JOIN, "POST"), (JOIN, "OPTIONS"), ("/", "POST"), ("/gradio_api/file=a.png", "GET")):
        status, text = asked(path, method, **headers)
        assert status == 403 and text.startswith("Another site")
        assert "only the page itself may; open http://127.0.0.1:7860/" in text


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_link_on_another_site_opens_the_page(headers):
    assert asked("/", "GET", **headers) == asked("/", "HEAD", **headers) == (200, "")


def test_a_websocket_of_another_sites_page_is_closed():
    assert asked(kind="websocket", origin=ELSEWHERE)[0] == 403
    assert asked(kind="websocket", origin="http://127.0.0.1:7860") == (200, "")


@pytest.mark.parametrize("length", [str(LARGEST + 1), "9" * 400, "-1", "much"])
def test_what_is_too_large_is_told_the_limit(length):
    status, text = asked(content_length=length, content_type=JSON)
    assert status == 413 and f"send at most {LARGEST} (1 MB)" in text and length[:20] in text
    assert asked(content_length=str(LARGEST), content_type=JSON) == (200, "")


@pytest.mark.parametrize("kind", [
    "multipart/form-data; boundary=application/json", "application/x-www-form-urlencoded", "text/plain", "",
    None,  # a server may take that for JSON
])  # fmt: skip
def test_a_file_is_refused_wherever_it_goes(kind):
    headers = {} if kind is None else {"content_type": kind}
    for path in ("/gradio_api/upload", "/gradio_api/process_recording", JOIN, "/"):
        status, text = asked(path, content_length="5", **headers)
        assert status == 415 and "takes no file" in text and "--model" in text
    assert asked(content_length="0", **headers) == (200, "")
    assert asked(content_length="5", content_type="Application/JSON; charset=utf-8") == (200, "")


def test_a_request_that_hides_its_length_is_refused():
    status, text = asked(transfer_encoding="chunked")
    assert status == 411 and "Content-Length" in text


def test_what_is_no_request_passes():
    async def app(scope, receive, send):
        scope["seen"] = True

    scope = {"type": "lifespan"}
    asyncio.run(page_guards.Own(app)(scope, None, None))
    assert scope["seen"]


def sent(body, parts=1):
    """The answer to a request with this body."""
    scope = {"type": "http", "headers": [(b"content-length", b"%d" % len(body))]}
    return answer(page_guards.Finite, scope, body, parts)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("body", [
    b"", b'{"data": [0.5, -3, 9007199254740992, null, "NaN", "1e400"]}', json.dumps("9" * 5000).encode(),
], ids=range(3))  # fmt: skip
def test_what_a_browser_can_mean_comes_in_as_it_was_sent(body, parts):
    assert sent(body, parts=parts) == (200, body.decode())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e300", "9" * 30, "9" * 5000,
                                    "-9007199254740993"], ids=lambda one: one[:20])  # fmt: skip
def test_what_is_no_number_is_refused_with_a_sentence_wherever_it_stands(number):
    for body in (number, f'{{"data": [0.5, {number}]}}', f'{{"fn_index": {number}}}'):
        status, text = sent(body.encode(), parts=2)
        assert status == 400 and text.startswith(f"{number[:40]} is no number that the page takes; give one from ")


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b"\xff\xfe\xfd", b"[1,]"], ids=lambda one: repr(one[:8]))
def test_what_is_no_json_is_told_so(body):
    status, text = sent(body)
    assert status == 400 and text.startswith("A request that cannot be read as JSON")
