"""What merging was measured to gain: kept in this process and, where somebody names a file, for those after it.

A gain is made on request alone (`Patch.measure`), so no clock decides about a picture in silence. By the times of
people's own pictures nothing goes: they are only told.
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
MARGIN = 0.02  # merging pays from so much on: medians of a quiet machine differ by 1 % from one measurement to the next
PIXELS = 8  # of a picture for each side of a latent's token
_LEAST, _MOST, _CASES = 3, 12, 300  # pictures of a case that say something, and are kept; cases
_SPREAD = 0.25  # of a gain, by which the middle halves of both kinds may vary
_ALIKE = 0.15  # by so much may shares differ: samplers place their steps otherwise, which moves the late ones


class Gain(NamedTuple):
    """Seconds of an unmerged call, and of a merged one on the average of a picture's steps, and all that decides them.

    model, rules, attention: see `measuring.pays.about`. height, width: of the latent. saved: the share of
    self-attention that was left out.
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
        """What it is a gain of: all but the seconds."""
        return self[:-3]

    @property
    def ratio(self) -> float:
        """Speed of a merged call, of an unmerged one 1."""
        return self.unmerged / self.merged

    @property
    def pays(self) -> bool:
        """Is merging faster by more than `MARGIN`?"""
        return self.ratio >= 1 + MARGIN

    def is_of(self, saved: float | None) -> bool:
        """Can it be told of calls that left out this share? Something else on the model would have changed that."""
        return self.saved is not None and saved is not None and abs(saved - self.saved) <= _ALIKE * self.saved

    @property
    def size(self) -> str:
        """``1024x1536``, of a picture, width first."""
        return f"{self.width * PIXELS}x{self.height * PIXELS}"

    @property
    def speed(self) -> str:
        """``about 1.3x faster`` or ``no faster``."""
        return _speed(self.ratio)

    @property
    def line(self) -> str:
        """``1024x1536: about 1.3x faster`` or ``512x512: no faster``."""
        return f"{self.size}: {self.speed}"

    @property
    def why_not(self) -> str:
        """Why merging is off where it does not pay."""
        times = self.merged / self.unmerged
        return f"measured: a merged call took {times:.2f} times an unmerged one at {self.width}x{self.height}"

    def __str__(self) -> str:
        where = f"{self.width}x{self.height}, batch {self.batch}, {self.dtype}, {self.device}"
        return f"{self.ratio:.2f} times as fast as unmerged ({where})"


class Gains:
    """What is known, and the file where it is kept, if any.

    pictures: seconds of a call in people's own, the latest last, by the case: model and size, what else decides, rules
    and the share that they left out, both "" of unmerged ones.
    """

    def __init__(self) -> None:
        self._known: dict[tuple, Gain] = {}
        self.pictures: dict[tuple[str, ...], tuple[float, ...]] = {}
        self._path: Path | None = None

    def load(self, path: str | os.PathLike | None) -> None:
        """From now on keep gains in this file, a line of JSON each, and know those that it holds. None: there is none.

        A host does it once, before it patches anything. The file's folder is made with the first gain. What cannot be
        read is passed over and said once.
        """
        if path is None:
            return
        self._path = Path(path).absolute()
        lines = _lines_of(self._path)
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError):
                _warn_once(f"Not all of {path} is used: not all of it are measured gains. Delete it.")
        if len(lines) > _CASES + 2 * (len(self._known) + len(self.pictures)):  # most were replaced by later ones
            self._write([*(gain._asdict() for gain in self._known.values()), *self.pictures.items()], whole=True)

    def _take(self, line: Any) -> None:
        if isinstance(line, list):
            (where, how, rules, saved), times = line
            if not (times and all(isinstance(one, float) and one > 0 for one in times)):
                raise ValueError("it has times that are none")
            self.pictures.pop((where, how, rules, saved), None)  # so that the latest is the last
            self.pictures[where, how, rules, saved] = tuple(times)
            return
        gain = Gain(**line)
        if not (gain.unmerged > 0 and gain.merged > 0):
            raise ValueError("it has times that are none")
        self._known[gain.case] = gain

    def remember(self, gain: Gain) -> None:
        """Keep it, in the file as well where there is one. Never fails: what cannot be written is said once."""
        self._known = {**self._known, gain.case: gain}  # another thread may go through the old one
        self._write([gain._asdict()])

    def add_picture(self, case: tuple[str, ...], seconds: float) -> None:
        """Keep the time of one more picture, as `remember` does. Old ones, and the oldest cases, are forgotten."""
        seen = {one: times for one, times in self.pictures.items() if one != case}
        seen[case] = (*self.pictures.get(case, ()), seconds)[-_MOST:]
        self.pictures = dict(list(seen.items())[-_CASES:])
        self._write([(case, seen[case])])

    def told(self, where: str, *rules: str) -> str:
        """``about 1.5x faster, from your own pictures (9 with merging, 12 without)``, by the latest such case.

        "" where one kind alone is known, or too few, or where they vary by more than a part of what there is to tell.
        where, rules: of the case; without a share it is any.
        """
        like = [one for one in self.pictures if one[0] == where and one[2:][: len(rules)] == rules][-1:]
        kinds = [self.pictures.get(case, ()) for one in like for case in ((*one[:2], "", ""), one)] or [()]
        if min(map(len, kinds)) < _LEAST:
            return ""
        quarters = [statistics.quantiles(times, method="inclusive") for times in kinds]
        plain, merged = (middle for _, middle, _ in quarters)
        if sum(last - first for first, _, last in quarters) > _SPREAD * abs(plain - merged):
            return ""
        without, own = map(len, kinds)
        return f"{_speed(plain / merged)}, from your own pictures ({own} with merging, {without} without)"

    def of(self, about: tuple[str, ...]) -> tuple[Gain, ...]:
        """All of one model, set of rules, attention and versions: their first fields."""
        return tuple(gain for case, gain in self._known.items() if case[: len(about)] == about)

    def forget(self) -> None:
        """Know nothing, and keep nothing in any file from now on."""
        self._known, self.pictures, self._path = {}, {}, None

    def _write(self, lines: Sequence[Any], whole: bool = False) -> None:
        """Append lines to the file. whole: they replace it at once, and nothing is lost if they cannot be written."""
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
            _warn_once(f"What was measured could not be kept in {self._path} ({error}); it holds until this process "
                       "ends.")

    def __bool__(self) -> bool:
        return bool(self._known)


def _speed(ratio: float) -> str:
    return f"about {ratio:.{1 if ratio >= 1.1 else 2}f}x faster" if ratio >= 1 + MARGIN else "no faster"


def _lines_of(path: Path) -> list[str]:
    try:
        return [*filter(str.strip, path.read_text(encoding="utf-8", errors="replace").split("\n"))]
    except OSError as error:
        return [] if isinstance(error, FileNotFoundError) else [str(error)]


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


KNOWN = Gains()  # in this process
load = KNOWN.load


def nearest(gains: Iterable[Gain], device: str, dtype: str, height: int, width: int, batch: int) -> Gain | None:
    """The gain of a call, by the batch that is nearest to its own, the smaller of two; None where none was measured.

    Hosts cut a batch by the memory that happens to be free, on which a picture must not depend.
    """
    asked = (device, dtype, height, width)
    fitting = [gain for gain in gains if (gain.device, gain.dtype, gain.height, gain.width) == asked]
    return min(fitting, key=lambda gain: (abs(gain.batch - batch), gain.batch), default=None)
