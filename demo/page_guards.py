"""What stands before the page's server: no other site's page may use it, and no files come in, nor what is no number.

Nor may the page load anything from elsewhere. ASGI classes, without gradio, whose own check hides the answers from
other sites, but does what they ask; and it takes files from anyone, though no part of this page has a use for one.
"""

from __future__ import annotations

import json

NAMES = ("127.0.0.1", "localhost")  # the page's hosts, as a browser has them
_LARGEST_NUMBER = 2**53  # to which a browser counts
_DIGITS = 20
LARGEST = 2**20  # bytes of a request; the page's own are far smaller
# Gradio's page is all in its package; should a part of it ever ask another machine, the browser refuses.
OWN = b"default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'"


class _Guard:
    def __init__(self, app) -> None:
        self.app = app


class Closed(_Guard):
    """Every answer tells the browser to load nothing from elsewhere."""

    async def __call__(self, scope, receive, send) -> None:
        async def tell(message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"content-security-policy", OWN)]
            await send(message)

        await self.app(scope, receive, tell)


class Own(_Guard):
    """Refuses what another site's page asks for, files, and what is too large; a link on another site opens the page.

    A browser says who asks. What does not say it is no browser, but a program on this machine.
    """

    async def __call__(self, scope, receive, send) -> None:
        problem = refusal(scope) if scope["type"] in ("http", "websocket") else None
        if problem is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": problem[1][:123]})
        else:
            await _answer(send, *problem)


class Finite(_Guard):
    """Refuses what is no JSON, and numbers in it that nobody means: NaN, infinities, what a browser cannot count to.

    Python reads such numbers, and whatever gets them then fails in a way of its own.
    """

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or not _has_body(scope["headers"]):
            await self.app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):  # to the end of the body, which `Own` has seen the length of
            messages.append(await receive())
        body = b"".join(one.get("body", b"") for one in messages)
        gone = messages[-1]["type"] == "http.disconnect"
        problem = unreadable(body) if body and not gone else None
        if problem is not None:
            await _answer(send, 400, problem)
            return

        async def again():
            return messages.pop(0) if messages else await receive()

        await self.app(scope, again, send)


async def _answer(send, status: int, sentence: str) -> None:
    text = f"{sentence}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def unreadable(body: bytes) -> str | None:
    """The sentence for a JSON text that the page does not take, else None."""
    def whole(text: str) -> None:
        if len(text) > _DIGITS or abs(int(text)) > _LARGEST_NUMBER:
            raise OverflowError(text)

    def real(text: str) -> None:
        if not abs(float(text)) <= _LARGEST_NUMBER:  # as NaN is not
            raise OverflowError(text)

    try:
        json.loads(body, parse_int=whole, parse_float=real, parse_constant=real)
    except OverflowError as wrong:
        return (f"{str(wrong)[:40]} is no number that the page takes; give one from {-_LARGEST_NUMBER} to "
                f"{_LARGEST_NUMBER}.")  # fmt: skip
    except (ValueError, RecursionError) as error:
        return f"A request that cannot be read as JSON: {str(error)[:200]}."
    return None


def refusal(scope) -> tuple[int, str] | None:
    """The status and the sentence for a request that is not answered, else None."""
    said = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    host = next((value for name, value in said if name == "host"), NAMES[0])
    asker = _another_site(said, host)
    opens_the_page = scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] == "/"
    if asker is not None and not opens_the_page:
        return 403, f"{asker} asks for this, which only the page itself may; open http://{host}/ and ask from there."
    if any(name == "transfer-encoding" for name, _ in said):
        return 411, "A request has to say how long it is; send it with a Content-Length."
    lengths = [value for name, value in said if name == "content-length"]
    if not all(one.isdecimal() and len(one) < 16 and int(one) <= LARGEST for one in lengths):
        return 413, f"A request of {lengths[0][:20]} bytes is too large; send at most {LARGEST} ({LARGEST >> 20} MB)."
    kinds = [value.partition(";")[0].strip().lower() for name, value in said if name == "content-type"]
    if _has_body(scope["headers"]) and set(kinds) != {"application/json"}:
        return 415, ("The page takes no file, and nothing but application/json; a model of your own is given where it "
                     "is started, with --model.")  # fmt: skip
    return None


def _has_body(headers) -> bool:
    """By the length that is told; without one there is none."""
    return any(name == b"content-length" and value != b"0" for name, value in headers)


def _another_site(said: list[tuple[str, str]], host: str) -> str | None:
    """Whose page asks, where it is not ours; another port of this machine's is another site."""
    port = "".join(host.partition(":")[1:])
    own = [f"http://{name}{port}" for name in NAMES]
    askers = [value for name, value in said if name in ("origin", "referer")]
    for asker in askers:
        if not any(asker == one or asker.startswith(f"{one}/") for one in own):
            return f"Another site ({asker[:200]})"
    told = [value for name, value in said if name == "sec-fetch-site"]
    return "Another site" if not askers and any(one in ("cross-site", "same-site") for one in told) else None
