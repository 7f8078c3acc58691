"""The page's plot of error over time saved, as SVG: the measured curve, where the strength is on it, and own pictures.

Text alone, so that it follows the page's colours and width and needs no plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from demo.page_curve import Point, between
from tome_core.settings.presets import MARKS

WIDTH, HEIGHT = 400, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 16, 26, 38  # of the frame, for what is written beside it
_LINES = 6  # of the grid, about, in each direction


def plot(curve: tuple[Point, ...], strength: float | None, runs: Sequence[Point] = ()) -> str:
    """An HTML figure. strength: where the ring is, None for none; runs: the last pictures, as they were measured."""
    now = between(curve, strength) if curve and strength is not None else None
    frame = _Frame((*curve, *runs))
    drawn = [
        *frame.grid(),
        f'<polyline class="curve" points="{" ".join("{:.1f},{:.1f}".format(*frame.at(one)) for one in curve)}"/>',
        *(_dot(frame, one, "mark", 3) for one in curve),
        *(_word(frame, one, name, 15) for name, value in MARKS.items() for one in curve if one.strength == value),
        *([_dot(frame, now, "now", 8)] if now else []),
        *(_dot(frame, one, "run", 5) + _word(frame, one, _name(one), -5) for one in runs),
    ]
    ring = f"Ring: strength {_figures(now)}. " if now else ""
    dots = f"Dots: your last pictures here, {'; '.join(map(_figures, runs))}. " if runs else ""
    said = (f"Line: measured with the small model of this repository. {ring}{dots}Error is how far colours are off, "
            "root mean square.")  # fmt: skip
    return (f'<figure class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">'
            f"{''.join(drawn)}</svg><figcaption>{said}</figcaption></figure>")  # fmt: skip


class _Frame:
    """Where a point is on the plot, for axes that hold all of them."""

    def __init__(self, points: tuple[Point, ...]) -> None:
        saved, errors = [0.0, 0.5, *(one.saved for one in points)], [1.0, *(one.error for one in points)]
        self.across, self.up = _steps(min(saved) * 100, max(saved) * 100), _steps(0, max(errors))

    def at(self, point: Point) -> tuple[float, float]:
        return self._x(point.saved * 100), self._y(point.error)

    def _x(self, value: float) -> float:
        low, high = self.across[0], self.across[-1]
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - value / self.up[-1] * (HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> Iterable[str]:
        left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM
        for value in self.across:
            x = self._x(value)
            yield f'<line class="grid" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{value:g}</text>'
        for value in self.up:
            y = self._y(value)
            yield f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
            yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        yield f'<text x="{left - 28}" y="{top - 12}">error, of 255</text>'
        yield f'<text x="{right}" y="{bottom + 32}" text-anchor="end">time saved, %</text>'


def _steps(low: float, high: float) -> list[float]:
    """Round numbers from low or below to high or above, equally far apart."""
    rough = (high - low) / _LINES
    power = 10 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough)
    return [number * step for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _dot(frame: _Frame, point: Point, kind: str, radius: int) -> str:
    x, y = frame.at(point)
    told = "" if point.strength is None else f' data-strength="{point.strength:g}"'
    return (f'<circle class="{kind}"{told} cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{_figures(point)}</title>'
            "</circle>")  # fmt: skip


def _word(frame: _Frame, point: Point, word: str, down: int) -> str:
    x, y = frame.at(point)
    aside, anchor = (9, "start") if x < WIDTH - 60 else (-9, "end")  # else it would end outside
    return f'<text x="{x + aside:.1f}" y="{y + down:.1f}" text-anchor="{anchor}">{word}</text>'


def _name(point: Point) -> str:
    return "by hand" if point.strength is None else f"{point.strength:g}"


def _figures(point: Point) -> str:
    time = f"{abs(point.saved) * 100:.0f} % {'of the time saved' if point.saved >= 0 else 'longer'}"
    return f"{_name(point)}: {time}, error {point.error:.1f}"
