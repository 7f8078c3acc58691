"""Two webuis that differ only by us, and the law that holds between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.hosts.webui.running import Webui, serve


class Twins(NamedTuple):
    """Two servers with the same options and other extensions; ``webui`` has us as well."""

    without: Webui
    webui: Webui

    def law(self, *args: Any, merges: bool = True, **job: Any) -> str:
        """What holds in every situation; gives our line on the picture that had us on, with ``args``.

        On differs where it merges; off, right afterwards, is the webui without us; and nothing of ours stays.
        """
        expected = self.without.draw_once(**job)
        start = len(self.webui.said())
        on = self.webui.draw(*args, **job)
        assert (on.pixels != expected.pixels) is merges
        told = self.webui.told(start)
        assert self.webui.draw(**job).all == expected.all, "off is not the webui without us"
        assert self.webui.state()["patched"] == 0
        assert "Error running" not in self.webui.said(start)
        return told[-1]


@contextlib.contextmanager
def serve_twins(
    checkout: Path, checkpoints: Path, folder: Path, *options: str, extensions: Sequence[Path] = ()
) -> Iterator[Twins]:
    """The same server without us and with us."""
    with contextlib.ExitStack() as both:
        yield Twins(*(
            both.enter_context(serve(checkout, checkpoints, folder / name, has_us, *options, extensions=extensions))
            for name, has_us in (("without", False), ("with", True))
        ))  # fmt: skip
