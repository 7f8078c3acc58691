"""The page's entry: `python install.py page`. It listens on this machine alone and asks nobody else for anything."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

if not __package__:
    # Started as a file, its own folder is on the path; the package around it is wanted instead.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from demo import command

HOST = "127.0.0.1"
QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
         "NO_PROXY": HOST, "no_proxy": HOST}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The options; `install.py page` passes everything on to them."""
    made = argparse.ArgumentParser(
        prog="page", description="A page in the browser: the same picture without merging and with it, side by side."
    )
    add = made.add_argument
    add("--strength", type=command.strength, default=command.BALANCED, metavar="S",
        help="what the page starts with, from 0, which is off, to 1 (default %(default)s)")
    command.add_model(made)
    add("--port", type=command.number("port", 1, 65535, "such as 7870"), metavar="N",
        help="the page's port (default: the first free one from 7860 on)")
    add("--no-browser", action="store_true", help="only print the address")
    return made


def make_page(options: argparse.Namespace):
    """The page for the model that the options ask for. Raises ValueError or OSError with the sentence to read."""
    user = command.check_model(options)
    source = command.source_of(options, user)
    from demo.page_code import Wanted
    from demo.page_events import Events
    from demo.page_layout import Page
    from demo.page_run import Studio
    from tome_core.patching import layout_of

    start = Wanted.of_strength(source.prompts[0], 0, 20, options.strength, layout_of(source.target))
    own = str(options.model) if user and not user.is_embedded else None
    return Page(Events(Studio(source), start, own))


def serve(page, options: argparse.Namespace) -> None:
    """Serve the page until an interrupt; then nothing of it runs any more. Raises OSError where the port is taken."""
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from demo import page_guards as guards
    from demo.page_layout import CSS, THEME

    # another site's page cannot reach this one under a name of its own that leads here, nor by this one's own
    stacked = [Middleware(guards.Closed), Middleware(TrustedHostMiddleware, allowed_hosts=list(guards.NAMES)),
               Middleware(guards.Own), Middleware(guards.Finite)]  # fmt: skip
    try:
        page.blocks.launch(
            server_name=HOST, server_port=options.port, share=False, inbrowser=not options.no_browser, ssr_mode=False,
            theme=THEME, css=CSS, footer_links=[], run_history=False, enable_monitoring=False, mcp_server=False,
            pwa=False, app_kwargs={"middleware": stacked}, prevent_thread_lock=True,
            num_workers=0,  # of gradio's, which would take uploads at ports of their own, from any site
        )  # fmt: skip
        while page.blocks.is_running:
            time.sleep(0.1)
    finally:
        page.events.end()  # first, because the server waits a while for those who wait for a picture
        page.blocks.close(verbose=False)


def end_in_order() -> None:
    """SIGTERM interrupts as Ctrl-C does. Once: what is then put in order is not interrupted again."""
    signals = (signal.SIGINT, signal.SIGTERM)

    def interrupt(*_) -> None:
        for one in signals:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    for one in signals:
        signal.signal(one, interrupt)


def main(arguments: list[str] | None = None) -> int:
    """Gives the exit code: 0 stopped by Ctrl-C or SIGTERM, 2 wrong options (one sentence says which)."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    os.environ.update(QUIET)
    options = parser().parse_args(arguments)
    try:
        end_in_order()
        with tempfile.TemporaryDirectory(prefix="tome_page_") as folder:
            os.environ["GRADIO_TEMP_DIR"] = folder  # its pictures go with it
            serve(make_page(options), options)
    except KeyboardInterrupt:
        print("page: stopped.", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"page: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
