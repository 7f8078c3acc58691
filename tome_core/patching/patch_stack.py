"""Patches on one model, one inside the other: leaving a ``with`` brings back what was in force before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from ..engine.time import ModelTime
from ..models.wrap import Wrap

Own = TypeVar("Own", bound="Nested")


class Nested:
    """A handle that knows what it took the place of. Its class has `install`, `uninstall` and `_in_force`."""

    time: ModelTime
    _outside: list[Wrap]  # of a pipeline and its scheduler; they hold no module
    _previous: Nested | None = None
    _removed = False
    _entered = False

    def _in_force(self) -> Nested | None:
        """The handle that merges on this one's model now."""
        raise NotImplementedError

    def remove(self) -> None:
        """Take it off for good. Idempotent; never fails."""
        self._removed = True
        self.uninstall()
        self.time.forget()

    def _put_on_outside(self) -> None:
        self._outside = [wrap.install() for wrap in self._outside if wrap.wrapped() is not None]

    def _take_off_outside(self) -> None:
        for wrap in self._outside:
            if wrap.target is not None:
                wrap.uninstall()

    def take_the_place_of(self, current: Nested | None) -> None:
        """Remember what leaving this one brings back."""
        self._previous = current
        if current is not None and not current._entered:
            current._previous = None  # nobody will leave it for what was before it; without this, the chain would grow

    def __enter__(self: Own) -> Own:
        self._entered = True
        return self.install()

    def __exit__(self, *error: object) -> None:
        self._entered = False
        # patches put on inside this `with` end with it
        later = list(back_from(self._in_force()))
        if self not in later:
            self.remove()
            return
        for one in later[: later.index(self) + 1]:
            one.remove()
        before = next((one for one in back_from(self._previous) if not one._removed), None)
        if before is not None:
            before.install()


def back_from(handle: Nested | None) -> Iterator[Nested]:
    """A handle and those it took the place of, the latest first."""
    while handle is not None:
        yield handle
        handle = handle._previous
