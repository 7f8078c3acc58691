"""Token down-sampling (Smith et al., ToDo, arXiv 2402.13573): keys and values on a coarser grid.

Every query is kept, so nothing is unmerged, and there is nothing to match: the coarse grid's token is the
cell's top left one, which is the paper's nearest-neighbour sampling. Where the grid does not divide, the
paper's code cuts the border off; here it gets smaller cells of its own.
"""

from __future__ import annotations

import torch

from ..grid import Grid
from ..plan import MergePlan
from .base import MatchOptions, Method


def match(x: torch.Tensor, grid: Grid, options: MatchOptions) -> MergePlan | None:
    """Group the tokens of each ``sy x sx`` cell; the ratio follows from the cell size.

    x: ``[B, N, C]``, only its device matters. Returns a plan of one row for the whole batch, or None where
    a cell is a single token.
    """
    sy, sx = min(options.sy, grid.height), min(options.sx, grid.width)
    if sy * sx == 1:
        return None
    columns = -(-grid.width // sx)
    row = torch.arange(grid.height, device=x.device)
    column = torch.arange(grid.width, device=x.device)
    group = (row // sy)[:, None] * columns + (column // sx)[None]
    first = row[::sy, None] * grid.width + column[None, ::sx]
    return MergePlan(group.reshape(1, -1), first.numel(), first.reshape(1, -1))


METHOD = Method(
    "downsample", "keys and values on a coarser grid, sx times sy fewer (ToDo, arXiv 2402.13573)", match,
    sides=("kv",), mode="pick", uses_ratio=False, keeps_cells=True,
)  # fmt: skip
