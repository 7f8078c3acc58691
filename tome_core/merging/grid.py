"""The token grid: where it lies in a sequence, its windows, its cells, and the draw that picks one token of each cell.

A UNet's tokens are the picture's alone. A transformer's sequence also has text, references and registers, before or
behind the picture's; these are never merged. Tokens are matched in windows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import torch

_MASK = 0x7FFFFFFF  # 31 bits: a product with a 31-bit constant then fits int64 on every device
WINDOW = 4096  # tokens, as a picture of 1024 px has them: what a match of one piece costs there is a tenth of attention
_ROWS = 8  # bands of a picture are whole cells high


# No properties or methods on the tuples of this package: the compiler of torch 2.4 follows their fields only.
class Grid(NamedTuple):
    """Height and width in tokens; token ``(row, column)`` is number ``row * width + column``.

    frames: of a film, which lie one below the other: each has ``height / frames`` rows.
    """

    height: int
    width: int
    frames: int = 1


class Layout(NamedTuple):
    """Where in a sequence the picture's tokens lie: from token ``first`` on, row by row, frame by frame."""

    grid: Grid
    first: int = 0


class Cells(NamedTuple):
    """``members``: int64 ``[K, S]``, the tokens of each cell; ``rest``: int64 ``[R]``, those in no whole cell."""

    members: torch.Tensor
    rest: torch.Tensor


class Draw(NamedTuple):
    """What a random choice depends on, and nothing else does: seed, level and the time of each sample.

    ``time``: float ``[1]`` or ``[B]`` tensor of timesteps, or None (counts as 0).
    """

    seed: int
    level: int
    time: torch.Tensor | None = None


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


def cells(grid: Grid, sy: int, sx: int, device: torch.device, st: int = 1) -> Cells:
    """Cut the grid into ``sy x sx`` cells, row by row, of ``st`` frames.

    Tokens beyond the last whole cell go to ``rest``. A side that is smaller than a cell's is one cell, so there is one.
    """
    frames, height, width = grid.frames, grid.height // grid.frames, grid.width
    st, sy, sx = min(st, frames), min(sy, height), min(sx, width)
    times, rows, columns = frames // st, height // sy, width // sx
    index = torch.arange(grid.height * width, device=device).view(frames, height, width)
    whole = index[: times * st]
    inner = whole[:, : rows * sy, : columns * sx].reshape(times, st, rows, sy, columns, sx)
    members = inner.permute(0, 2, 4, 1, 3, 5).reshape(times * rows * columns, st * sy * sx)
    right, below, after = whole[:, : rows * sy, columns * sx :], whole[:, rows * sy :], index[times * st :]
    return Cells(members, torch.cat([right.reshape(-1), below.reshape(-1), after.reshape(-1)]))


def split_cells(parts: Cells, draw: Draw | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One destination per cell, and the sources: all the others.

    draw: decides which token of the cell; None takes the first (top left).
    Returns int64 ``[T, K]`` and ``[T, N - K]``; T is 1, or B where samples differ in time.
    """
    count, size = parts.members.shape
    device = parts.members.device
    if draw is None:
        chosen = torch.zeros(1, count, dtype=torch.int64, device=device)
    else:
        chosen = draw_choices(draw, count, size, device)
    samples = chosen.shape[0]
    members = parts.members.expand(samples, -1, -1)
    destinations = members.gather(2, chosen[..., None])[..., 0]
    slot = torch.arange(size - 1, device=device).expand(samples, count, -1)
    sources = members.gather(2, slot + (slot >= chosen[..., None]))
    return destinations, torch.cat([sources.reshape(samples, -1), parts.rest.expand(samples, -1)], 1)


_FIXED: OrderedDict[tuple, tuple[torch.Tensor, ...]] = OrderedDict()
_MOST = 64  # of what is remembered


def reuse(make: Callable[..., tuple[torch.Tensor, ...]], x: torch.Tensor, *args: Hashable) -> tuple[torch.Tensor, ...]:
    """``make(*args, device of x)``, remembered, but not what a CUDA graph or a tracer makes."""
    plain = type(x) is torch.Tensor and not x.is_meta
    if not plain or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return make(*args, x.device)
    key = (make, *args, x.device)
    found = _FIXED.get(key)
    if found is None:
        with torch.inference_mode(False):  # what is made in it may not be saved for a backward pass
            found = make(*args, x.device)
        if len(_FIXED) >= _MOST:
            _FIXED.popitem(last=False)
        if all(type(one) is torch.Tensor for one in found):
            _FIXED[key] = found
    return found


def split_grid(
    grid: Grid, sy: int, sx: int, draw: Draw | None, x: torch.Tensor, st: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """`split_cells` of the grid's `cells`, on the device of ``x``."""
    if draw is None:
        return reuse(_split_first, x, grid, sy, sx, st)
    return split_cells(cells(grid, sy, sx, x.device, st), draw)


def _split_first(grid: Grid, sy: int, sx: int, st: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return split_cells(cells(grid, sy, sx, device, st), None)


def draw_choices(draw: Draw, count: int, choices: int, device: torch.device) -> torch.Tensor:
    """``count`` numbers in ``0..choices-1`` for each time in the draw: int64 ``[T, count]``.

    A hash of (seed, level, round(time), position), so no generator is touched, a conditional and an
    unconditional pass agree even when they run apart, and every device gives the same numbers.
    """
    # to float32 before it moves: MPS takes no float64
    time = torch.zeros(1, device=device) if draw.time is None else draw.time.float()
    stamp = time.to(device).reshape(-1).round().to(torch.int64) & _MASK
    key = scramble(scramble(draw.seed & _MASK) ^ (draw.level & _MASK))
    place = scramble(torch.arange(count, device=device) + 1)
    mixed = scramble(scramble(stamp ^ key)[:, None] ^ place[None])
    return mixed // 2**7 % choices


def scramble(value):
    """Mix the 31 bits of an int or an int64 tensor; every product is cut back to 31 bits. DirectML cannot shift."""
    value = ((value ^ value // 2**16) * 0x45D9F3B) & _MASK
    value = ((value ^ value // 2**15) * 0x2C1B3C6D) & _MASK
    return value ^ value // 2**16
