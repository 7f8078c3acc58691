"""What merging was measured to gain: kept in this process and, where somebody names a file, for those after it.

A gain is made on request alone (`Patch.measure`), so no clock decides about a picture in silence.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)
MARGIN = 0.02  # merging pays from so much on: medians of a quiet machine differ by 1 % from one measurement to the next
PIXELS = 8  # of a picture for each side of a latent's token
_UNEVEN = 0.1
_ALIKE = 0.15  # by so much may shares differ: samplers place their steps otherwise, which moves the late ones


class Gain(NamedTuple):
    """Seconds of an unmerged call, and of a merged one on the average of a picture's steps, and all that decides them.

    model, rules, attention: see `measuring.pays.about`. height, width: of the latent. spread: of the unmerged calls,
    the slowest less the fastest, as a share of their median. saved: the share of self-attention that was left out.
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
    spread: float = 0.0
    saved: float | None = None

    @property
    def case(self) -> tuple:
        """What it is a gain of: all but the seconds."""
        return self[:-4]

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
        return f"about {self.ratio:.{1 if self.ratio >= 1.1 else 2}f}x faster" if self.pays else "no faster"

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
        busy = ", measured while the machine was busy with something else" if self.spread > _UNEVEN else ""
        return f"{self.ratio:.2f} times as fast as unmerged ({where}){busy}"


class Gains:
    """What is known, and the file where it is kept, if any."""

    def __init__(self) -> None:
        self._known: dict[tuple, Gain] = {}
        self._path: Path | None = None

    def load(self, path: str | os.PathLike | None) -> None:
        """From now on keep gains in this file, a line of JSON each, and know those that it holds. None: there is none.

        A host does it once, before it patches anything. The file's folder is made with the first gain. What cannot be
        read is passed over and said once.
        """
        if path is None:
            return
        self._path = Path(path).absolute()
        self._known = {**self._known, **_read(self._path)}

    def remember(self, gain: Gain) -> None:
        """Keep it, in the file as well where there is one. Never fails: what cannot be written is said once."""
        self._known = {**self._known, gain.case: gain}  # another thread may go through the old one
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:  # another process may have written since
                file.write(f"\n{json.dumps(gain._asdict())}")
        except OSError as error:
            _warn_once(f"The measured gain could not be kept in {self._path} ({error}); it holds until this process "
                       "ends.")

    def of(self, about: tuple[str, ...]) -> tuple[Gain, ...]:
        """All of one model, set of rules, attention and versions: their first fields."""
        return tuple(gain for case, gain in self._known.items() if case[: len(about)] == about)

    def forget(self) -> None:
        """Know nothing, and keep nothing in any file from now on."""
        self._known, self._path = {}, None

    def __bool__(self) -> bool:
        return bool(self._known)


def _read(path: Path) -> dict[tuple, Gain]:
    """The gains of a file, of several of one case the latest."""
    found: dict[tuple, Gain] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        lines = [] if isinstance(error, FileNotFoundError) else [str(error)]
    for line in filter(str.strip, lines):
        try:
            gain = Gain(**json.loads(line))
            if not (gain.unmerged > 0 and gain.merged > 0):
                raise ValueError("it has times that are none")
            found[gain.case] = gain
        except (ValueError, TypeError):
            _warn_once(f"Not all of {path} is used: not all of it are measured gains. Delete it.")
    return found


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
