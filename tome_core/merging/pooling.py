"""Pooling: the tokens of each cell merge, alike or not, so there is nothing to match.

In a noisy step a picture's tokens are noise for the most part, so those that lie side by side are as good a group as
those that a match finds.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .grid import Grid, Layout, tokens_in
from .plan import MergePlan


@lru_cache(maxsize=32)
def pool(layout: Layout, tokens: int, sy: int, sx: int, ratio: float, device: torch.device) -> MergePlan | None:
    """Return the plan of a sequence of `tokens`, for every sample, in which cells of the picture merge as a whole.

    Cells are of one frame, `sy` x `sx` tokens, smaller at its right and lower edge. As many of them merge, evenly
    spread, as remove the share `ratio` of the tokens; all from ``1 - 1/(sx*sy)`` on. Each token around the picture is a
    group by itself. None if no token merges.
    """
    group = torch.arange(tokens)
    group[layout.first : layout.first + tokens_in(layout)] = layout.first + _first_of_cell(layout.grid, sy, sx, ratio)
    kept, group = group.unique(return_inverse=True)  # ascending: the order of the tokens is kept
    if len(kept) == tokens:
        return None
    with torch.inference_mode(False):  # for a kept plan outside of inference mode
        return MergePlan(group[None].to(device, copy=True), len(kept))


def _first_of_cell(grid: Grid, sy: int, sx: int, ratio: float) -> Tensor:
    """Return for each token of a grid the first token of its cell, or itself if the cell does not merge, int64."""
    number = torch.arange(grid.height * grid.width)
    row, column, per_frame = number // grid.width, number % grid.width, grid.height // grid.frames
    down, right = row % per_frame % sy, column % sx
    cell = (row - down) * grid.width + (column - right)
    cells, place = cell.unique(return_inverse=True)
    merging = min(1.0, ratio / max(1 - 1 / (sy * sx), 1e-9))
    steps = (torch.arange(len(cells) + 1, dtype=torch.float64) * merging + 1e-9).floor()
    return torch.where(steps.diff()[place] > 0, cell, number)
