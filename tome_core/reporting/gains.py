"""What merging was measured to gain: kept in this process and, where somebody names a file, for those after it.

A gain is a fact of one `Case`, made on request alone (`Patch.measure`), so no clock decides about a picture in silence.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)
MARGIN = 0.02  # merging pays from so much on: medians of a quiet machine differ by 1 % from one measurement to the next
PIXELS = 8  # of a picture for each side of a latent's token
_UNEVEN = 0.1
_FORMAT = 1
_MOST = 256  # gains in a file, the latest
_LARGEST = 2**20  # bytes of a file that is read


class Case(NamedTuple):
    """All that decides a gain. model, rules, attention: see `fingerprint`; height, width: of the latent."""

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


class Gain(NamedTuple):
    """Seconds of an unmerged call, and of a merged one on the average of a picture's steps.

    spread: of the unmerged calls, the slowest less the fastest, as a share of their median.
    """

    case: Case
    unmerged: float
    merged: float
    spread: float = 0.0

    @property
    def ratio(self) -> float:
        """Speed of a merged call, of an unmerged one 1."""
        return self.unmerged / self.merged

    @property
    def pays(self) -> bool:
        """Is merging faster by more than `MARGIN`?"""
        return self.ratio >= 1 + MARGIN

    @property
    def size(self) -> str:
        """``1024x1536``, of a picture, width first."""
        return f"{self.case.width * PIXELS}x{self.case.height * PIXELS}"

    @property
    def line(self) -> str:
        """``1024x1536: 1.31 times as fast`` or ``512x512: no gain here``."""
        found = f"{self.ratio:.2f} times as fast" if self.pays else "no gain here"
        return f"{self.size}: {found}"

    @property
    def why_not(self) -> str:
        """Why merging is off where it does not pay."""
        return (
            f"measured: a merged call took {self.merged / self.unmerged:.2f} times an unmerged one at "
            f"{self.case.width}x{self.case.height}"
        )

    def __str__(self) -> str:
        case = self.case
        text = f"{self.ratio:.2f} times as fast as unmerged ({case.width}x{case.height}, batch {case.batch}, " \
            f"{case.dtype}, {case.device})"  # fmt: skip
        return text + (", measured while the machine was busy with something else" if self.spread > _UNEVEN else "")

    def as_data(self) -> dict[str, Any]:
        """Everything, for JSON; `from_data` takes it back."""
        return {**self.case._asdict(), "unmerged": self.unmerged, "merged": self.merged, "spread": self.spread}


def from_data(data: Any) -> Gain:
    """The inverse of `Gain.as_data`. Raises ValueError where it is none."""
    try:
        values = {name: data[name] for name in (*Case._fields, *Gain._fields[1:])}
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"no gain: {error!r}") from None
    for name, value in values.items():
        kind = int if name in ("height", "width", "batch") else (int, float) if name in Gain._fields else str
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{name}={value!r} is {type(value).__name__}")
        if kind is not str and not (0 < value < math.inf or (name == "spread" and value == 0)):
            raise ValueError(f"{name}={value!r} is out of range")
    return Gain(Case(**{name: values[name] for name in Case._fields}), *(values[name] for name in Gain._fields[1:]))


class Gains:
    """What is known, and the file where it is kept, if any."""

    def __init__(self) -> None:
        self._known: dict[Case, Gain] = {}
        self._path: str | None = None
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def load(self, path: str | os.PathLike) -> None:
        """From now on keep gains in this JSON file, and know those that it holds already.

        Its folder is made with the first gain. A file that cannot be read, or is of another version, is taken for an
        empty one and said so once.
        """
        path = os.path.abspath(os.fspath(path))
        found = self._read(path)
        with self._lock:
            self._path = path
            self._known.update(found)

    def remember(self, gain: Gain) -> None:
        """Keep it, in the file as well where there is one. Never fails: what cannot be written is said once."""
        with self._lock:
            self._known.pop(gain.case, None)  # so that the latest comes last
            self._known[gain.case] = gain
            if self._path is not None:
                self._write(self._path, gain)

    def of(self, about: tuple[str, ...]) -> tuple[Gain, ...]:
        """All of one model, set of rules, attention and versions: the first fields of their cases."""
        with self._lock:
            return tuple(gain for case, gain in self._known.items() if case[: len(about)] == about)

    def forget(self) -> None:
        """Know nothing, and keep nothing in any file from now on."""
        with self._lock:
            self._known, self._path, self._told = {}, None, set()

    def __bool__(self) -> bool:
        return bool(self._known)

    def _read(self, path: str) -> dict[Case, Gain]:
        try:
            with open(path, "rb") as file:
                data = json.loads(file.read(_LARGEST))
            if not isinstance(data, dict) or data.get("format") != _FORMAT:
                raise ValueError("it is of another version")
            gains = [from_data(one) for one in data["gains"]]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._tell(f"The measured gains in {path} are not used ({error}); they will be measured anew on request.")
            return {}
        return {gain.case: gain for gain in gains}

    def _write(self, path: str, gain: Gain) -> None:
        """What the file holds by now, and this: another process may have written since. Replaced as a whole."""
        known = {case: one for case, one in self._read(path).items() if case != gain.case}
        kept = [*known.values(), gain][-_MOST:]
        text = json.dumps({"format": _FORMAT, "gains": [one.as_data() for one in kept]}, indent=1)
        temporary = ""
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=os.path.dirname(path), delete=False) as file:
                temporary = file.name
                file.write(text)
            os.replace(temporary, path)
        except OSError as error:
            self._tell(f"The measured gain could not be kept in {path} ({error}); it holds until this process ends.")
            if temporary and os.path.exists(temporary):
                os.unlink(temporary)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning("%s", text)


KNOWN = Gains()


def load(path: str | os.PathLike | None) -> None:
    """`Gains.load` of what this process knows: a host does it once, before it patches anything. None: no file."""
    if path is not None:
        KNOWN.load(path)


def nearest(gains: Iterable[Gain], device: str, dtype: str, height: int, width: int, batch: int) -> Gain | None:
    """The gain of a call, by the batch that is nearest to its own, the smaller of two; None where none was measured.

    Hosts cut a batch by the memory that happens to be free, on which a picture must not depend.
    """
    fitting = [gain for gain in gains if gain.case[-5:-1] == (device, dtype, height, width)]
    return min(fitting, key=lambda gain: (abs(gain.case.batch - batch), gain.case.batch), default=None)
