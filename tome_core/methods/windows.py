"""The best destination inside a window of the grid: cost grows with the tokens, not with their square.

The grid is cut into windows of whole cells. Where it does not divide, the last windows hold fewer cells and the
tokens beyond the last whole cell; every window has the same shape all the same, and what it has too much is its
own last tokens and cells once more: results that nobody asks for, and candidates that are on the grid. (Zeros in
their place would beat every negative similarity.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..grid import Grid
from ..plan import take_rows
from .base import Best, MatchOptions, Rows, best_keys
from .likeness import searched


class Windows(NamedTuple):
    """tokens: int64 ``[W, T]`` of each window; cells: int64 ``[W, K]``, numbered over the whole grid.

    slot: int64 ``[1, N]``, where a token is among the ``W * T``.
    """

    tokens: torch.Tensor
    cells: torch.Tensor
    slot: torch.Tensor


class _Line(NamedTuple):
    """One axis. tokens: ``[W, T]``; cells: ``[W, K]``; window, place: of a token ``[N]``."""

    tokens: torch.Tensor
    cells: torch.Tensor
    window: torch.Tensor
    place: torch.Tensor


def cut(grid: Grid, sy: int, sx: int, window: int, device: torch.device) -> Windows:
    """Windows of at most ``window`` tokens a side, whole cells of ``sy x sx`` each, one cell at least."""
    sy, sx = min(sy, grid.height), min(sx, grid.width)
    down, right = _line(grid.height, sy, window, device), _line(grid.width, sx, window, device)
    columns = grid.width // sx
    tokens = _pairs(down.tokens * grid.width, right.tokens)
    cells = _pairs(down.cells * columns, right.cells)
    count, per_row, per_window = right.tokens.shape[0], right.tokens.shape[1], tokens.shape[1]
    slot = (down.window * count * per_window + down.place * per_row)[:, None] + (
        right.window * per_window + right.place
    )[None]
    return Windows(tokens, cells, slot.reshape(1, -1))


def _line(length: int, cell: int, window: int, device: torch.device) -> _Line:
    cells = length // cell
    per_window = min(max(1, window // cell), cells)
    windows = -(-cells // per_window)
    step = per_window * cell
    size = min(length, step + length - cells * cell)
    start = torch.arange(windows, device=device)[:, None]
    number = start * per_window + torch.arange(per_window, device=device)
    token = torch.arange(length, device=device)
    own = (token // cell).clamp(max=cells - 1) // per_window
    tokens = (start * step + torch.arange(size, device=device)).clamp(max=length - 1)
    return _Line(tokens, number.clamp(max=cells - 1), own, token - own * step)


def _pairs(down: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Sums of ``[V, P]`` and ``[U, Q]`` over all pairs: ``[V * U, P * Q]``."""
    both = down[:, None, :, None] + right[None, :, None, :]
    return both.reshape(down.shape[0] * right.shape[0], -1)


def best_in_window(
    x: torch.Tensor, grid: Grid, options: MatchOptions, sources: torch.Tensor, destinations: torch.Tensor
) -> Best:
    """The most similar destination of each source among those of its window; scores as `likeness.searched` has them.

    x: ``[B, N, C]``; sources ``[B or 1, S]``, destinations ``[B or 1, D]`` (one a cell, in order): int64.
    """
    batch, _, channels = x.shape
    windows = cut(grid, options.sy, options.sx, options.window, x.device)
    count, size = windows.tokens.shape
    keys, bias = searched(take_rows(x, destinations), options.by_distance)
    keys = take_rows(keys, windows.cells.reshape(1, -1)).view(batch * count, -1, channels)
    if bias is not None:
        bias = bias[:, windows.cells].view(batch * count, -1)

    first = torch.arange(batch, device=x.device)[:, None, None] * x.shape[1]
    rows = (windows.tokens + first).view(batch * count, size)
    best = best_keys(Rows(x.reshape(1, -1, channels), rows), size, keys, bias)
    cells = windows.cells.expand(batch, -1, -1).gather(2, best.index.view(batch, count, size))
    place = windows.slot.expand(sources.shape[0], -1).gather(1, sources).expand(batch, -1)
    return Best(best.score.view(batch, -1).gather(1, place), cells.view(batch, -1).gather(1, place))
