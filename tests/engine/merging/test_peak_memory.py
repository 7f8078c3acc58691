"""The most memory that is held at once: a merged block's is never more than the unmerged one's, a match's is small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tomesd.merge import bipartite_soft_matching_random2d

import tome_core
from benchmarks.sd_block import CHANNELS, HEADS, make_block, make_inputs
from tests.peak_memory import peak_bytes
from tome_core import PRESETS, MergeConfig
from tome_core.attention import merged
from tome_core.merging.grid import Grid
from tome_core.merging.methods import METHODS, MatchOptions

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_preset_holds_more_than_the_block_itself(dtype, monkeypatch):
    """Of 4,096 tokens; pieces are a quarter as large, as if there were 16,384."""
    side = 64
    monkeypatch.setattr(merged, "_HELD", merged._HELD // 4)
    block, inputs = make_block("cpu", dtype), make_inputs(side, 1, "cpu", dtype)
    # what outlives the attention: the group of each token, of keys and of queries, what widens one query and value, and
    # the correction of each head
    maps = 4 * 8 * side * side + 2 * 8 * dtype.itemsize + (2 * CHANNELS // HEADS + 1) * CHANNELS * dtype.itemsize
    with torch.inference_mode():
        block(*inputs)  # what libraries allocate once
        vanilla = peak_bytes(lambda: block(*inputs))
        for settings in (*PRESETS, MergeConfig(ratio=0.5)):
            for timestep in (900, 100) if settings in PRESETS else (100,):
                with tome_core.patch(block, settings, host_clock=True) as handle:
                    handle.set_time(timestep=timestep, sampling="a")
                    peak = peak_bytes(lambda: block(*inputs))
                    assert handle.report().levels[0].tokens
                assert peak <= vanilla + maps, (settings, timestep, peak / vanilla)


@pytest.mark.slow
@torch.inference_mode()
def test_16384_tokens_need_at_most_a_quarter_of_what_tomesd_needs():
    side = 128
    x = torch.randn(2, side * side, 320, generator=torch.Generator().manual_seed(0))

    def ours() -> None:
        plan = METHODS["bipartite"].match(x, Grid(side, side), MatchOptions(0.5, 2, 2))
        plan.unmerge(plan.merge(x))

    def tomesds() -> None:
        merge, unmerge = bipartite_soft_matching_random2d(x, side, side, 2, 2, side * side // 2, no_rand=True)
        unmerge(merge(x))

    assert x.nbytes < peak_bytes(ours) <= peak_bytes(tomesds) / 4


# By how much a call raises the most that its process has held: memory that an allocator leaves torn counts too
ALONE = """
import resource, sys, torch
from tome_core.merging.grid import Grid
from tome_core.merging.methods import METHODS, MatchOptions

def merge_once(x, side):
    plan = METHODS["bipartite"].match(x, Grid(side, side), MatchOptions(0.5, 2, 2))
    plan.unmerge(plan.merge(x))

def held():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)

torch.set_num_threads(1)
with torch.inference_mode():
    x = torch.randn(2, 256 * 256, 320)
    merge_once(x[:, :256].contiguous(), 16)  # what libraries allocate once
    before, ballast = held(), []
    while held() - before < 1:  # importing peaked higher than the memory in use now: fill up to that mark
        ballast.append(b"1" * 2**20)
    before = held()
    merge_once(x, 256)
    print(held() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="peak memory of a process is not to be had on Windows")
def test_65536_tokens_need_less_than_300_mib_beyond_their_inputs():
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, check=True, capture_output=True, text=True)
    assert 40 < float(done.stdout) < 300  # 40 MiB of destinations alone: less would mean that nothing was measured
