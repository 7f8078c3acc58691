"""The grid of the picture's tokens: its place in a sequence, its windows, its cells, and the draw of destinations."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_MASK = 0x7FFFFFFF  # 31 bits: a product with a 31-bit constant then fits int64 on every device
# The most tokens of a window: a picture of 1024 px. Matching so many tokens takes a tenth of the time of attention.
WINDOW = 4096
_ROWS = 8  # height of a band is a multiple of this, so that bands hold whole cells


# No properties or methods on the named tuples of this package: the compiler of torch 2.4 supports only their fields.
class Grid(NamedTuple):
    """The size of a picture or a film in tokens; token ``(row, column)`` has the number ``row * width + column``.

    Frames lie below each other. `height` counts the rows of all `frames`, so a frame has ``height / frames`` rows.
    """

    height: int
    width: int
    frames: int = 1


class Layout(NamedTuple):
    """The place of the picture's tokens in a sequence: one run of tokens, row by row, frame by frame.

    A transformer's tokens of text, references and registers, before or after the run, never merge. A UNet has none.
    """

    grid: Grid
    first: int = 0  # number of the run's first token


class Cells(NamedTuple):
    """The tokens of a grid, cut into cells of equal size. Numbers of tokens are those of `Grid`."""

    members: Tensor  # the numbers of each cell's tokens, ascending, int64 (cells, cell_size)
    uncovered: Tensor  # the numbers of the tokens that no whole cell holds, int64 (others,)


class Draw(NamedTuple):
    """The inputs of a pseudo-random choice, see `draw_choices`. Equal inputs give equal choices."""

    seed: int
    level: int  # the down-sampling level of the tokens, 0 for the finest
    time: Tensor | None = None  # timesteps, float (1,) or (batch,); None counts as 0
    known: dict[tuple, tuple[Tensor, Tensor]] | None = None  # `split_grid` keeps its results here; None: it keeps none


def tokens_in(layout: Layout) -> int:
    """Return the number of tokens in the layout's grid, whose height has all frames, without those around it."""
    return layout.grid.height * layout.grid.width


def windows(grid: Grid) -> Iterator[tuple[int, Grid]]:
    """Yield (the number in `grid` of the first token, the grid) of each window, in order; windows leave no gaps.

    Windows are matched separately. If a frame has at most `WINDOW` (4,096) tokens, a window is a run of whole frames,
    otherwise a band of rows of one frame. The height of a band is a multiple of 8; only a frame's last band may have
    another. Windows are of nearly equal size and have at most `WINDOW` tokens; only a band of 8 rows may have more.
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
    """Cut `count` items into the fewest runs of at most `most` items, of nearly equal length; yield (start, stop)."""
    runs = -(-count // most)
    for number in range(runs):
        yield number * count // runs, (number + 1) * count // runs


def cell_of(sy: int, sx: int, frames: int) -> tuple[int, int, int]:
    """Return frames, height and width of a cell of ``sy * sx`` tokens, as close to a cube as halving allows.

    A step halves the longer side (of equal sides, the height) and doubles the cell's frames. Steps go on as long as the
    film's `frames` are a multiple of the doubled number, and this number is at most half the longer side.

    >>> cell_of(8, 8, 1), cell_of(8, 8, 4), cell_of(4, 4, 6)
    ((1, 8, 8), (4, 4, 4), (2, 2, 4))
    """
    st = 1
    while frames % (st * 2) == 0 and st * 2 <= max(sy, sx) // 2:
        st, sy, sx = (st * 2, sy // 2, sx) if sy >= sx else (st * 2, sy, sx // 2)
    return st, sy, sx


def cells(grid: Grid, sy: int, sx: int, device: torch.device, st: int = 1) -> Cells:
    """Cut a grid into cells of at most `st` frames, `sy` rows and `sx` columns, ordered by frame, row and column."""
    frames, height, width = grid.frames, grid.height // grid.frames, grid.width
    st, sy, sx = min(st, frames), min(sy, height), min(sx, width)
    times, rows, columns = frames // st, height // sy, width // sx
    index = torch.arange(grid.height * width, device=device).view(frames, height, width)
    whole = index[: times * st]
    inner = whole[:, : rows * sy, : columns * sx].reshape(times, st, rows, sy, columns, sx)
    members = inner.permute(0, 2, 4, 1, 3, 5).reshape(times * rows * columns, st * sy * sx)
    right, below, after = whole[:, : rows * sy, columns * sx :], whole[:, rows * sy :], index[times * st :]
    return Cells(members, torch.cat([right.reshape(-1), below.reshape(-1), after.reshape(-1)]))


def split_cells(parts: Cells, draw: Draw | None) -> tuple[Tensor, Tensor]:
    """Split tokens into destinations, one for each cell, and sources: the other tokens, cell by cell, then uncovered.

    Both are int64, ``(times, cells)`` in the order of the cells, and ``(times, tokens - cells)``: a row for each
    timestep of `draw`, which picks the destinations; None gives one row, of the first token of each cell.
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
    return destinations, torch.cat([sources.reshape(samples, -1), parts.uncovered.expand(samples, -1)], 1)


_CACHE: OrderedDict[tuple, tuple[Tensor, ...]] = OrderedDict()  # the cache of `cached_result`
_MOST = 64  # entries of that cache


def cached_result(make: Callable[..., tuple[Tensor, ...]], x: Tensor, *args: Hashable) -> tuple[Tensor, ...]:
    """Return ``make(*args, x.device)``, from a cache if possible. Callers must not change the result's tensors.

    The result of `make` must depend on nothing but its arguments. During the capture of a CUDA graph, on the meta
    device, and for a tracer's tensor subclass, the cache is neither read nor filled.
    """
    plain = type(x) is torch.Tensor and not x.is_meta
    if not plain or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return make(*args, x.device)
    key = (make, *args, x.device)
    tensors = _CACHE.get(key)
    if tensors is None:
        with torch.inference_mode(False):  # autograd refuses to save inference tensors for a backward pass
            tensors = make(*args, x.device)
        if len(_CACHE) >= _MOST:
            _CACHE.popitem(last=False)
        if all(type(tensor) is torch.Tensor for tensor in tensors):
            _CACHE[key] = tensors
    return tensors


def split_grid(grid: Grid, sy: int, sx: int, draw: Draw | None, x: Tensor, st: int = 1) -> tuple[Tensor, Tensor]:
    """Return `split_cells` of a grid's `cells`: destinations and sources. Of `x` only the device is used.

    Without a draw the results come from a cache, and with one from its `known`: they must not be changed.
    """
    if draw is None:
        return cached_result(_split_first, x, grid, sy, sx, st)
    key, known = (grid, sy, sx, st, x.device), {} if draw.known is None else draw.known
    if key not in known:
        known[key] = split_cells(cells(grid, sy, sx, x.device, st), draw)
    return known[key]


def _split_first(grid: Grid, sy: int, sx: int, st: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each cell's first token, and the others, cell by cell, then uncovered: `split_cells` without a draw."""
    return split_cells(cells(grid, sy, sx, device, st), None)


def draw_choices(draw: Draw, count: int, choices: int, device: torch.device) -> Tensor:
    """Return pseudo-random integers from 0 to ``choices - 1``, int64 ``(times, count)``: a row for each timestep.

    A number is a hash of seed, level, time (rounded) and position in the row. So no random generator changes, and each
    half of classifier-free guidance, even in a separate call, and each device get the same numbers.
    """
    # to float32 before the tensor moves, because MPS has no float64
    time = torch.zeros(1, device=device) if draw.time is None else draw.time.float()
    stamp = time.to(device).reshape(-1).round().to(torch.int64) & _MASK
    key = hash_31_bits(hash_31_bits(draw.seed & _MASK) ^ (draw.level & _MASK))
    place = hash_31_bits(torch.arange(count, device=device) + 1)
    mixed = hash_31_bits(hash_31_bits(stamp ^ key)[:, None] ^ place[None])
    return mixed // 2**7 % choices


def hash_31_bits(value):
    """Return a hash of 31 bits of a number of 31 bits, an int or an int64 tensor."""
    # divisions, because DirectML does not support shifts
    value = ((value ^ value // 2**16) * 0x45D9F3B) & _MASK
    value = ((value ^ value // 2**15) * 0x2C1B3C6D) & _MASK
    return value ^ value // 2**16
