"""HyperTile in the speed benchmark: its own tiles, each attended to by itself."""

from __future__ import annotations

import pytest
import torch

from benchmarks.speed_variants import in_tiles, tiles_a_side


@pytest.mark.parametrize(("side", "tiles"), [(16, 1), (32, 1), (63, 1), (64, 2), (72, 2), (96, 3), (128, 4), (256, 8)])
def test_tiles_are_those_that_hypertile_chooses(side, tiles):
    assert tiles_a_side(side) == tiles


def test_attention_in_tiles_sees_each_tile_alone():
    seen = []

    def attention(x, **_):
        seen.append(x)
        return x

    x = torch.arange(64.0**2).reshape(1, -1, 1)
    assert torch.equal(in_tiles(attention, x), x)
    assert seen[0].shape == (4, 32**2, 1) and seen[0][1, 0] == 32, "the upper right tile begins in the first row"
