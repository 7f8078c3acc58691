"""Laws of pooling: which tokens share a group."""

import pytest
import torch

from tome_core.merging.grid import Grid, Layout
from tome_core.merging.pooling import pool

CPU = torch.device("cpu")


def groups(layout: Layout, tokens: int, sy: int, sx: int, ratio: float = 1.0) -> list[set[int]]:
    plan = pool(layout, tokens, sy, sx, ratio, CPU)
    if plan is None:
        return [{number} for number in range(tokens)]
    assert plan.group.shape == (1, tokens)
    found = [{*(plan.group[0] == number).nonzero()[:, 0].tolist()} for number in range(plan.num_groups)]
    assert all(found) and sorted(min(group) for group in found) == [min(group) for group in found]
    return found


@pytest.mark.parametrize("sy, sx", [(1, 2), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("grid", [Grid(6, 6), Grid(5, 7), Grid(12, 6, 2), Grid(9, 5, 3), Grid(1, 8)], ids=str)
@pytest.mark.parametrize("first, after", [(0, 0), (3, 0), (2, 4)])
def test_all_tokens_of_a_cell_of_one_frame_share_a_group_and_others_are_alone(grid, sy, sx, first, after):
    rows = grid.height // grid.frames
    cell_of = {}
    for number in range(grid.height * grid.width):
        row, column = divmod(number, grid.width)
        cell_of[first + number] = (row // rows, row % rows // sy, column // sx)
    tokens = first + grid.height * grid.width + after
    found = groups(Layout(grid, first), tokens, sy, sx)
    for group in found:
        if group <= cell_of.keys():
            (cell,) = {cell_of[number] for number in group}
            assert group == {number for number, other in cell_of.items() if other == cell}
        else:
            assert len(group) == 1


@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5, 0.7])
def test_a_lower_ratio_merges_so_many_cells_evenly_spread(ratio):
    found = groups(Layout(Grid(32, 32)), 1024, 2, 2, ratio)
    assert abs(len(found) - 1024 * (1 - ratio)) <= 3 and {len(group) for group in found} == {1, 4}
    merging = sorted(min(group) // 64 for group in found if len(group) == 4)  # pairs of rows
    per_row = torch.bincount(torch.tensor(merging), minlength=16)
    assert per_row.max() - per_row.min() <= 1


def test_nothing_merges_in_cells_of_one_token_or_at_ratio_0():
    assert pool(Layout(Grid(1, 1)), 1, 2, 2, 0.5, CPU) is None and pool(Layout(Grid(8, 8)), 64, 2, 2, 0.0, CPU) is None
    assert pool(Layout(Grid(8, 8)), 64, 1, 1, 0.0, CPU) is None


def test_a_plan_made_in_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        plan = pool(Layout(Grid(6, 10)), 60, 2, 2, 0.75, CPU)
    x = torch.randn(1, 60, 4, requires_grad=True)
    plan.merge(x).sum().backward()
    assert x.grad is not None and pool(Layout(Grid(6, 10)), 60, 2, 2, 0.75, CPU) is plan
