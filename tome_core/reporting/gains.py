"""Measured gains of merging, kept in this process and, if a file is given, for later processes.

Gains are measured on request only (`Patch.measure`), so no timing changes a picture unasked.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)
MARGIN = 0.02  # merging pays if it gains this or more: medians on a quiet machine differ by 1 % between measurements
PIXELS = 8  # pixels per latent cell, along a side
_LEAST, _MOST, _CASES = 3, 12, 300  # fewest pictures of a case that are shown, most that are kept; most cases
_SPREAD = 0.25  # the spread of both kinds of times may be this share of their difference
_ALIKE = 0.15  # saved shares may differ by this much: samplers place their steps differently


class Gain(NamedTuple):
    """The measured time of unmerged and merged calls, and everything on which it depends.

    Args:
        model: the class of the model, with a hash of its shape, see `measuring.pays.about`.
        rules: a hash of the settings.
        attention: the names of the attention's processor and functions.
        torch, tome_core: their versions.
        device, dtype: the device's name, see `measuring.pays.device_of`, and the model's dtype, such as ``float16``.
        height, width: of the latent; a picture has `PIXELS` times as many pixels.
        batch: number of samples in a call.
        unmerged, merged: seconds of an unmerged call, and of a merged one in the mean over a picture's steps.
        saved: the share of self-attention work that was saved, 0 to 1; None if it is not known.
    """

    model: str
    rules: str
    attention: str
    torch: str
    tome_core: str
    device: str
    dtype: str
    height: int
    width: int
    batch: int
    unmerged: float
    merged: float
    saved: float | None = None

    @property
    def case(self) -> tuple:
        """All fields but `unmerged`, `merged` and `saved`, which identify the measured case."""
        return self[:-3]

    @property
    def ratio(self) -> float:
        """The speed of merged calls, relative to unmerged ones: above 1 if merged calls are faster."""
        return self.unmerged / self.merged

    @property
    def pays(self) -> bool:
        """True if merging is at least 1 + `MARGIN` times as fast."""
        return self.ratio >= 1 + MARGIN

    def fits_share(self, saved: float | None) -> bool:
        """Tell whether a share differs from the gain's `saved` by at most 15 % of that; False if either is None."""
        return self.saved is not None and saved is not None and abs(saved - self.saved) <= _ALIKE * self.saved

    @property
    def size(self) -> str:
        """The picture's size, as ``1024x1536``, width first."""
        return f"{self.width * PIXELS}x{self.height * PIXELS}"

    @property
    def speed(self) -> str:
        """The gain, as ``about 1.3x faster``, below 1.1 ``about 1.05x faster``, below 1 + `MARGIN` ``no faster``."""
        return _speed(self.ratio)

    @property
    def line(self) -> str:
        """Size and gain, as ``1024x1536: about 1.3x faster`` or ``512x512: no faster``."""
        return f"{self.size}: {self.speed}"

    @property
    def why_not(self) -> str:
        """The reason, for the report, if not `pays`: a merged call's time over an unmerged one's, and the size."""
        times = self.merged / self.unmerged
        return f"measured: a merged call took {times:.2f} times as long as an unmerged call at {self.size}"

    def __str__(self) -> str:
        where = f"{self.size}, batch {self.batch}, {self.dtype}, {self.device}"
        return f"{self.ratio:.2f} times as fast as unmerged ({where})"


class Gains:
    """All known gains, and the file in which they are kept, if there is one. ``bool()`` is True if a `Gain` is known.

    `pictures` has for each case, the latest last, a tuple of seconds per model call in the user's own pictures. A case
    is four texts: hashes of model and size, of other conditions and of the rules, and the saved share; the last two are
    "" for unmerged pictures.
    """

    def __init__(self) -> None:
        self._known: dict[tuple, Gain] = {}
        self.pictures: dict[tuple[str, ...], tuple[float, ...]] = {}
        self._path: Path | None = None

    def load(self, path: str | os.PathLike | None) -> None:
        """Read gains from a file, which need not exist, and append new gains to it from now on, one line of JSON each.

        A host calls this once, before it patches a model; None changes nothing. The file's folder is created with the
        first gain. Lines that cannot be read are ignored, with one warning. Of equal cases the last line counts; a file
        that is mostly replaced lines is written anew.
        """
        if path is None:
            return
        self._path = Path(path).absolute()
        lines = _lines_of(self._path)
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError):
                _warn_once(f"{path} has lines that are no measured gains; they are ignored. Delete the file to end "
                           "this warning.")
        if len(lines) > _CASES + 2 * (len(self._known) + len(self.pictures)):  # most were replaced by later ones
            self._write([*(gain._asdict() for gain in self._known.values()), *self.pictures.items()], whole=True)

    def _take(self, line: Any) -> None:
        """Keep the gain or times of a decoded line. Raises ValueError or TypeError for other lines, or times <= 0.

        A dict has the fields of a `Gain`; a list has a key of `pictures` and the times, which replace all of that case.
        """
        if isinstance(line, list):
            (where, how, rules, saved), times = line
            if not (times and all(isinstance(seconds, float) and seconds > 0 for seconds in times)):
                raise ValueError("it has times that are none")
            self.pictures.pop((where, how, rules, saved), None)  # so that the latest case is the last
            self.pictures[where, how, rules, saved] = tuple(times)
            return
        gain = Gain(**line)
        if not (gain.unmerged > 0 and gain.merged > 0):
            raise ValueError("it has times that are none")
        self._known[gain.case] = gain

    def remember(self, gain: Gain) -> None:
        """Keep a gain in place of its `case`'s, also in the file. If that cannot be written, one warning says so."""
        self._known = {**self._known, gain.case: gain}  # another thread may iterate over the old dict
        self._write([gain._asdict()])

    def add_picture(self, case: tuple[str, ...], seconds: float) -> None:
        """Keep a picture's seconds per model call in `pictures` and in the file.

        `case` is a key of `pictures`, which keeps the latest 12 times of a case, and the latest 300 cases.
        """
        seen = {other: times for other, times in self.pictures.items() if other != case}
        seen[case] = (*self.pictures.get(case, ()), seconds)[-_MOST:]
        self.pictures = dict(list(seen.items())[-_CASES:])
        self._write([(case, seen[case])])

    def of_pictures(self, where: str, *rules: str) -> str:
        """Return the gain in the user's pictures as text, in the latest case of `where` and `rules`.

        `where` is the first text of the case's key (a hash of model and size), `rules` the third and optionally the
        fourth, the saved share, without which any fits. The text is ``about 1.5x faster, from your own pictures (9 with
        merging, 12 without)``; "" if there are fewer than three pictures of either kind with equal other conditions, or
        if their times vary too much.
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
        return f"{_speed(plain / merged)}, from your own pictures ({within} with merging, {without} without)"

    def of(self, about: tuple[str, ...]) -> tuple[Gain, ...]:
        """Return the gains whose first five fields, from `model` to `tome_core`, are these."""
        return tuple(gain for case, gain in self._known.items() if case[: len(about)] == about)

    def forget(self) -> None:
        """Drop all gains and times of pictures, and stop using the file, which stays."""
        self._known, self.pictures, self._path = {}, {}, None

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
            _warn_once(f"The gain could not be kept in {self._path} ({error}). It is known until this program ends.")

    def __bool__(self) -> bool:
        return bool(self._known)


def _speed(ratio: float) -> str:
    """Format a ratio: ``about 1.3x faster``, below 1.1 ``about 1.05x faster``, below 1 + `MARGIN` ``no faster``."""
    return f"about {ratio:.{1 if ratio >= 1.1 else 2}f}x faster" if ratio >= 1 + MARGIN else "no faster"


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


def nearest(gains: Iterable[Gain], device: str, dtype: str, height: int, width: int, batch: int) -> Gain | None:
    """Return the gain of this case with the nearest batch, or the smaller of two equally near; None without one."""
    case = (device, dtype, height, width)  # no batch: hosts split it by free memory, on which no picture may depend
    fitting = [gain for gain in gains if (gain.device, gain.dtype, gain.height, gain.width) == case]
    return min(fitting, key=lambda gain: (abs(gain.batch - batch), gain.batch), default=None)
