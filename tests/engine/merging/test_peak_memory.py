"""Peak memory: a merged block never needs more than the unmerged one, and a match needs little."""

import pytest
import torch
from tomesd.merge import bipartite_soft_matching_random2d

import tome_core
from tests.small_models.sd_block import CHANNELS, HEADS, make_block, make_inputs
from tests.watching.peak_memory import peak_bytes
from tome_core import PRESETS, MergeConfig
from tome_core.attention import merged
from tome_core.merging.grid import Grid
from tome_core.merging.methods import METHODS, MatchOptions

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_preset_holds_more_than_the_block_itself(dtype, monkeypatch):
    """The block has 4,096 tokens; pieces are a quarter as large, as if there were 16,384."""
    side = 64
    monkeypatch.setattr(merged, "_HELD", merged._HELD // 4)
    block, inputs = make_block("cpu", dtype), make_inputs(side, 1, "cpu", dtype)
    # memory that outlives the attention: groups of all tokens, of keys and of queries, one wider query and value, and
    # the correction of each head
    maps = 4 * 8 * side * side + 2 * 8 * dtype.itemsize + (2 * CHANNELS // HEADS + 1) * CHANNELS * dtype.itemsize
    with torch.inference_mode():
        block(*inputs)  # libraries allocate some memory once
        vanilla = peak_bytes(lambda: block(*inputs))
        for settings in (*PRESETS, MergeConfig(ratio=0.5)):
            for timestep in (900, 100) if settings in PRESETS else (100,):
                with tome_core.patch(block, settings, host_clock=True) as handle:
                    handle.set_time(timestep=timestep, sampling="a")
                    peak = peak_bytes(lambda: block(*inputs))
                    assert handle.report().levels[0].tokens
                assert peak <= vanilla + maps, (settings, timestep, peak / vanilla)


@torch.inference_mode()
def test_16384_tokens_need_a_quarter_of_what_tomesd_needs_and_65536_little_more_than_what_they_give():
    def peaks(side: int) -> tuple[torch.Tensor, int]:
        x = torch.randn(2, side * side, 320)

        def merge_once() -> None:
            plan = METHODS["bipartite"].match(x, Grid(side, side), MatchOptions(0.5, 2, 2))
            plan.unmerge(plan.merge(x))

        return x, peak_bytes(merge_once)

    def tomesds() -> None:
        merge, unmerge = bipartite_soft_matching_random2d(x, 128, 128, 2, 2, 128 * 128 // 2, no_rand=True)
        unmerge(merge(x))

    x, most = peaks(128)
    assert x.nbytes < most <= peak_bytes(tomesds) / 4
    x, most = peaks(256)
    assert most < 2 * x.nbytes
