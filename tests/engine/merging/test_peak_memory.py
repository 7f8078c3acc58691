"""A merged block never holds more than the unmerged one does: counted in bytes of tensors, which do not vary."""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests.peak_memory import peak_bytes
from tome_core import PRESETS, MergeConfig
from tome_core.bench.sd_block import CHANNELS, HEADS, make_block, make_inputs


def test_the_count_sees_what_is_held():
    def run():
        kept = torch.empty(3 * 2**20, dtype=torch.uint8)
        for _ in range(5):
            torch.empty(2**20, dtype=torch.uint8)
        return kept

    assert peak_bytes(run) == 4 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_preset_holds_more_than_the_block_itself(side, dtype):
    block, inputs = make_block("cpu", dtype), make_inputs(side, 1, "cpu", dtype)
    # what outlives the attention: the group of each token, of keys and of queries, what widens one query and value, and
    # the correction of each head
    maps = 4 * 8 * side * side + 2 * 8 * dtype.itemsize + (2 * CHANNELS // HEADS + 1) * CHANNELS * dtype.itemsize
    with torch.inference_mode():
        block(*inputs)  # what libraries allocate once
        vanilla = peak_bytes(lambda: block(*inputs))
        for settings in (*PRESETS, MergeConfig(ratio=0.5), MergeConfig(ratio=0.75)):
            for timestep in (900, 100):
                with tome_core.patch(block, settings, host_clock=True) as handle:
                    handle.set_time(timestep=timestep, sampling="a")
                    peak = peak_bytes(lambda: block(*inputs))
                    assert handle.report().levels[0].tokens
                assert peak <= vanilla + maps, (settings, timestep, peak / vanilla)
