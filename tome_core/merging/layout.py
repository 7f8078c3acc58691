"""Where a picture's tokens lie in the sequence of an attention, and the windows in which they are matched.

A UNet's tokens are the picture's alone. A transformer's sequence also has text, references and registers, before or
behind the picture's; these are never merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .grid import Grid

WINDOW = 4096  # tokens, as a picture of 1024 px has them: what a match of one piece costs there is a tenth of attention
_ROWS = 8  # bands of a picture are whole cells high


class Layout(NamedTuple):
    """Where in a sequence the picture's tokens lie: from token ``first`` on, row by row, frame by frame."""

    grid: Grid
    first: int = 0


def tokens_in(layout: Layout) -> int:
    """How many tokens of the sequence are the picture's."""
    return layout.grid.height * layout.grid.width


def windows(grid: Grid) -> Iterator[tuple[int, Grid]]:
    """First token and grid of each window: equal runs of frames, or bands of rows, of `WINDOW` tokens or fewer.

    A single frame, or a band as high as a cell, is a window though it has more.
    """
    frames, height, width = grid.frames, grid.height // grid.frames, grid.width
    frame = height * width
    if frame <= WINDOW:
        for start, stop in _runs(frames, WINDOW // frame):
            yield start * frame, Grid((stop - start) * height, width, stop - start)
        return
    bands = list(_runs(-(-height // _ROWS), max(1, WINDOW // (_ROWS * width))))
    for number in range(frames):
        for start, stop in bands:
            first, last = start * _ROWS, min(stop * _ROWS, height)
            yield number * frame + first * width, Grid(last - first, width)


def _runs(count: int, most: int) -> Iterator[tuple[int, int]]:
    """As few equal runs of ``count`` things as have ``most`` of them or fewer."""
    runs = -(-count // most)
    for number in range(runs):
        yield number * count // runs, (number + 1) * count // runs


def cell_of(sy: int, sx: int, frames: int) -> tuple[int, int, int]:
    """Frames, height and width of a cell of ``sy * sx`` tokens: as near to a cube as halves make it.

    So many frames as fit without a rest.

    >>> cell_of(8, 8, 1), cell_of(8, 8, 4), cell_of(4, 4, 6)
    ((1, 8, 8), (4, 4, 4), (2, 2, 4))
    """
    st = 1
    while frames % (st * 2) == 0 and st * 2 <= max(sy, sx) // 2:
        st, sy, sx = (st * 2, sy // 2, sx) if sy >= sx else (st * 2, sy, sx // 2)
    return st, sy, sx
