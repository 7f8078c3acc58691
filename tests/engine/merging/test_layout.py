"""Where a sequence's tokens lie: windows cover the picture once, and a film's cells are near in time too."""

from __future__ import annotations

import pytest
import torch

from tome_core.merging.grid import WINDOW, Grid, cell_of, cells, windows


@pytest.mark.parametrize("grid", [
    Grid(64, 64), Grid(256, 256), Grid(67, 131), Grid(21 * 45, 80, 21), Grid(13 * 30, 52, 13), Grid(5 * 90, 160, 5),
    Grid(3, 5), Grid(3 * 128, 128, 3),
])  # fmt: skip
def test_windows_cover_the_grid_once(grid):
    frame, end = grid.height // grid.frames * grid.width, 0
    for start, one in windows(grid):
        assert start == end and one.width == grid.width and one.height * one.width <= WINDOW
        whole = one.height * one.width % frame == 0 and one.frames == one.height * one.width // frame
        assert whole or one.frames == 1
        end += one.height * one.width
    assert end == grid.height * grid.width


def test_a_films_cells_hold_tokens_that_are_near_in_time_too():
    grid, device = Grid(4 * 6, 8, frames=4), torch.device("cpu")
    members, rest = cells(grid, 2, 4, device, st=2)
    assert members.shape == (4 * 6 * 8 // 16, 16) and not len(rest)
    assert sorted(members.flatten().tolist()) == list(range(4 * 6 * 8))
    frame, row, column = members // 48, members % 48 // 8, members % 8
    for place, side in ((frame, 2), (row, 2), (column, 4)):
        assert (place.amax(1) - place.amin(1) == side - 1).all()


def test_a_cell_is_near_to_a_cube_and_divides_the_frames():
    found = [cell_of(side, side, frames) for side, frames in ((8, 1), (8, 4), (4, 6), (8, 6), (2, 8))]
    assert found == [(1, 8, 8), (4, 4, 4), (2, 2, 4), (2, 4, 8), (1, 2, 2)]
