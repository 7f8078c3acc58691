"""The page's entry: `python install.py page`. It listens on this machine alone and asks nobody else for anything."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path

if not __package__:
    # Started as a file, its own folder is on the path; the package around it is wanted instead.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from demo import command, cores, prompt

HOST = "127.0.0.1"
# Gradio's page is all in its package; should a part of it ever ask another machine, the browser refuses.
OWN = b"default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'"
QUIET = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "NO_PROXY": HOST,
    "no_proxy": HOST,
}


class Closed:
    """ASGI: every answer tells the browser to load nothing from elsewhere."""

    def __init__(self, app) -> None:
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        async def tell(message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"content-security-policy", OWN)]
            await send(message)

        await self.app(scope, receive, tell)


def parser() -> argparse.ArgumentParser:
    """The options; `install.py page` passes everything on to them."""
    made = argparse.ArgumentParser(
        prog="page", description="A page in the browser: the same picture without merging and with it, side by side."
    )
    add = made.add_argument
    add("--model", type=Path, metavar="DIR_OR_FILE",
        help="your own model: a diffusers folder or a single .safetensors file (pickled checkpoints are refused)")
    add("--config", type=Path, metavar="DIR",
        help="with a single-file --model: a local diffusers folder with its configuration and tokenizer")
    add("--device", metavar="NAME", help="cpu, cuda, mps, ... (default: an accelerator if torch sees one, else cpu)")
    add("--port", type=command.number("port", 1, 65535, "such as 7870"), metavar="N",
        help="the page's port (default: the first free one from 7860 on)")
    add("--no-browser", action="store_true", help="only print the address")
    return made


def made_page(options: argparse.Namespace):
    """The page for the model that the options ask for. Raises ValueError or OSError with the sentence to read."""
    user = command.checked_model(options)
    cores.wait_passively()
    print("Loading the model ...", file=sys.stderr)
    source = command.source_of(options, user)
    from demo import source as sources
    from demo.page_code import Wanted
    from demo.page_events import Events
    from demo.page_layout import Page
    from demo.page_run import Studio
    from tome_core import presets

    text = sources.LONG_PROMPTS[0] if user else prompt.PROMPTS[0]
    start = Wanted(text, 0, 20, presets.preset(presets.DEFAULT))
    return Page(Events(Studio(source), start, str(options.model) if user else None))


def serve(page, options: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C. Raises OSError where the port is taken."""
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from demo.page_layout import CSS, THEME

    # another site's page cannot reach this one under a name of its own that leads here
    guards = [Middleware(Closed), Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])]
    page.blocks.launch(
        server_name=HOST, server_port=options.port, share=False, inbrowser=not options.no_browser, ssr_mode=False,
        theme=THEME, css=CSS, footer_links=[], run_history=False, enable_monitoring=False, mcp_server=False, pwa=False,
        app_kwargs={"middleware": guards},
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Gives the exit code: 0 stopped by Ctrl-C, 2 wrong options (one sentence says which)."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    os.environ.update(QUIET)
    options = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tome_page_") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # its pictures go with it
        try:
            serve(made_page(options), options)
        except (ValueError, OSError) as error:
            print(f"page: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
