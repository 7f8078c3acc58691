"""The times of the user's own pictures, kept in this process and, if a file is given, for later processes.

From them comes the gain of merging, which is reported and decides nothing.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
_MARGIN = 0.02  # a smaller gain is told as none: medians on a quiet machine differ by 1 % between measurements
_LEAST, _MOST, _CASES = 3, 12, 300  # fewest pictures of a case that are shown, most that are kept; most cases
_SPREAD = 0.25  # the spread of both kinds of times may be this share of their difference


class Gains:
    """All known times, and the file in which they are kept, if there is one.

    `pictures` has for each case, the latest last, a tuple of seconds per model call in the user's own pictures. A case
    is four texts: hashes of model and size, of other conditions and of the rules, and the saved share; the last two are
    "" for unmerged pictures.
    """

    def __init__(self) -> None:
        self.pictures: dict[tuple[str, ...], tuple[float, ...]] = {}
        self._path: Path | None = None

    def load(self, path: str | os.PathLike | None) -> None:
        """Read times from a file, which need not exist, and append new times to it from now on, one line of JSON each.

        A host calls this once, before it patches a model; None changes nothing. The file's folder is made with the
        first line. Lines that cannot be read are ignored, with one warning. Of equal cases the last line counts.
        """
        if path is None:
            return
        self._path = Path(path).absolute()
        lines = _lines_of(self._path)
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError):
                _warn_once(f"{path} has lines that are no times of pictures; they are ignored. Delete the file to end "
                           "this warning.")
        if len(lines) > _CASES + 2 * len(self.pictures):  # most were replaced by later ones
            self._write([*self.pictures.items()], whole=True)

    def _take(self, line: Any) -> None:
        """Keep a decoded line, [key of `pictures`, times], or raise a ValueError or a TypeError if it is none."""
        (where, how, rules, saved), times = line
        if not (times and all(isinstance(seconds, float) and seconds > 0 for seconds in times)):
            raise ValueError("it has times that are none")
        self.pictures.pop((where, how, rules, saved), None)  # so that the latest case is the last
        self.pictures[where, how, rules, saved] = tuple(times)

    def add_picture(self, case: tuple[str, ...], seconds: float) -> None:
        """Keep a picture's seconds per model call under a key of `pictures`, and in the file; the latest are kept."""
        seen = {other: times for other, times in self.pictures.items() if other != case}
        seen[case] = (*self.pictures.get(case, ()), seconds)[-_MOST:]
        self.pictures = dict(list(seen.items())[-_CASES:])
        self._write([(case, seen[case])])

    def of_pictures(self, where: str, *rules: str) -> str:
        """Return the gain in the user's pictures as text, in the latest case of `where` and `rules`.

        `where` is the first text of the case's key, `rules` the third and optionally the fourth, without which any
        fits. The text is ``1.5x faster in your pictures (9 with merging, 12 without)``; "" with fewer than
        three pictures of either kind under equal other conditions, or if their times vary too much.
        """
        latest = [case for case in self.pictures if case[0] == where and case[2:][: len(rules)] == rules][-1:]
        kinds = [self.pictures.get(key, ()) for case in latest for key in ((*case[:2], "", ""), case)] or [()]
        if min(map(len, kinds)) < _LEAST:
            return ""
        quarters = [statistics.quantiles(times, method="inclusive") for times in kinds]
        plain, merged = (middle for _, middle, _ in quarters)
        if sum(last - first for first, _, last in quarters) > _SPREAD * abs(plain - merged):
            return ""
        without, within = map(len, kinds)
        return f"{_speed(plain / merged)} in your pictures ({within} with merging, {without} without)"

    def forget(self) -> None:
        """Drop all times, and stop using the file, which stays."""
        self.pictures, self._path = {}, None

    def _write(self, lines: Sequence[Any], whole: bool = False) -> None:
        """Append items as lines of JSON to the file, if there is one, or replace it if `whole`; warn if this fails."""
        if self._path is None:
            return
        path = self._path.with_name(f"{self._path.name}.new") if whole else self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w" if whole else "a", encoding="utf-8") as file:  # another process may have written since
                file.write("".join(f"\n{json.dumps(line)}" for line in lines))
            if whole:
                path.replace(self._path)
        except OSError as error:
            _warn_once(f"Times of pictures could not be kept in {self._path} ({error}). They are known until this "
                       "program ends.")


def _speed(ratio: float) -> str:
    """Format a ratio: ``1.3x faster``, below 1.1 ``1.05x faster``, below 1 + `_MARGIN` ``no faster``."""
    return f"{ratio:.{1 if ratio >= 1.1 else 2}f}x faster" if ratio >= 1 + _MARGIN else "no faster"


def _lines_of(path: Path) -> list[str]:
    """Return a file's lines that are not blank, bad UTF-8 replaced; [] without a file; [error's text] if unreadable."""
    try:
        return [*filter(str.strip, path.read_text(encoding="utf-8", errors="replace").split("\n"))]
    except OSError as error:
        return [] if isinstance(error, FileNotFoundError) else [str(error)]


@cache
def _warn_once(text: str) -> None:
    """Log a warning, if this process has not logged it yet."""
    logger.warning("%s", text)


KNOWN = Gains()  # of this process
load = KNOWN.load
