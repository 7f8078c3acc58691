"""What only a CUDA device can tell: equal bits, no waiting for the device, half precision, the CPU's destinations."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import tome_core
from benchmarks.sd_block import make_block, make_inputs
from tome_core import MergePlan
from tome_core.merging import kernels
from tome_core.merging.grid import Draw, Grid, cells, draw_choices, split_cells
from tome_core.merging.methods import METHODS, MatchOptions
from tome_core.merging.methods.base import best_keys

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch sees none here")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def no_waiting():
    """While in here it is an error to wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_merged_block_gives_equal_bits_every_time(dtype):
    block, inputs = make_block("cuda", dtype), make_inputs(64, 2, "cuda", dtype)
    with torch.inference_mode(), tome_core.patch(block, tome_core.MergeConfig()):
        results = [block(*inputs) for _ in range(10)]
    assert torch.isfinite(results[0]).all()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_merged_block_never_waits_for_the_device(method):
    block, inputs = make_block("cuda", torch.float16), make_inputs(64, 2, "cuda", torch.float16)
    with torch.inference_mode(), tome_core.patch(block, tome_core.MergeConfig(method=method)):
        block(*inputs)
        with no_waiting():
            block(*inputs)


def test_destinations_are_those_of_the_cpu():
    draw = Draw(5, 1, torch.tensor([3.0, 500.0]))
    on_gpu = draw_choices(draw, 4096, 4, torch.device("cuda"))
    assert torch.equal(on_gpu.cpu(), draw_choices(draw, 4096, 4, torch.device("cpu")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matching_finds_the_similarities_of_the_cpu(dtype):
    x = torch.randn(2, 1024, 320, generator=torch.Generator().manual_seed(0)).to(dtype)
    options = MatchOptions(0.5, 2, 2)
    plans = [METHODS["bipartite"].match(place, Grid(32, 32), options) for place in (x, x.cuda())]
    pairs = zip(plans, (x, x.cuda()), strict=True)
    errors = [(plan.unmerge(plan.merge(place)) - place).float().norm() for plan, place in pairs]
    assert errors[0].item() == pytest.approx(errors[1].item(), rel=1e-3)


@pytest.mark.parametrize("name, mode", [(None, None), *((name, "reduce-overhead") for name in tome_core.PRESETS)])
def test_a_compiled_block_gives_the_bits_of_its_own_earlier_runs_in_cuda_graphs_too(name, mode):
    block, inputs = make_block("cuda", torch.float16), make_inputs(64, 2, "cuda", torch.float16)
    config = tome_core.MergeConfig() if name is None else name
    with torch.inference_mode(), tome_core.patch(block, config, host_clock=True) as handle:
        handle.set_time(timestep=500.0, sampling="a")
        compiled = torch.compile(block, fullgraph=True, mode=mode)
        results = [compiled(*inputs).clone() for _ in range(6)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", [None, *tome_core.PRESETS])
def test_a_block_recorded_into_a_cuda_graph_gives_what_it_gives_without(name):
    block, inputs = make_block("cuda", torch.float16), make_inputs(64, 2, "cuda", torch.float16)
    other = tuple(None if one is None else torch.randn_like(one) for one in inputs)
    config = tome_core.MergeConfig() if name is None else name
    with torch.inference_mode(), tome_core.patch(block, config, host_clock=True) as handle:
        handle.set_time(timestep=500.0)
        expected = [block(*given) for given in (inputs, other)]
        graph, held = torch.cuda.CUDAGraph(), tuple(None if one is None else one.clone() for one in inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            block(*held)
        torch.cuda.current_stream().wait_stream(stream)
        handle.set_time(timestep=500.0, sampling="kept")
        with torch.cuda.graph(graph):
            out = block(*held)
        for given, wanted in zip((inputs, other, inputs), (*expected, expected[0]), strict=True):
            for place, value in zip(held, given, strict=True):
                if place is not None:
                    place.copy_(value)
            graph.replay()
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("name", tome_core.PRESETS)
def test_a_compiled_block_keeps_its_match_as_one_that_is_not_compiled(name, mode):
    block, inputs = make_block("cuda", torch.float16), make_inputs(64, 2, "cuda", torch.float16)
    with torch.inference_mode(), tome_core.patch(block, name, host_clock=True) as handle:
        compiled, results = torch.compile(block, fullgraph=True, mode=mode), []
        for number, run in enumerate((block, compiled)):
            for timestep in (950.0, 900.0, 880.0, 300.0, 250.0, 200.0):
                handle.set_time(timestep=timestep, sampling=number)
                results.append(run(*inputs).clone())
    for eager, found in zip(results[:6], results[6:], strict=True):
        assert (found - eager).float().norm() < 0.01 * eager.float().norm()


def skip_without_kernels():
    if not kernels.ready(torch.zeros(1, device="cuda")):
        pytest.skip("no Triton kernels here: Triton is missing, or the GPU is older than Ampere")


def test_the_kernels_keep_their_laws_on_this_gpu():
    skip_without_kernels()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/kernel_laws.py", "tests/kernel_laws_correction.py", "tests/kernel_faults.py"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_give_equal_bits_every_time_and_never_wait_for_the_device(dtype):
    skip_without_kernels()
    x = torch.randn(2, 4096, 320, device="cuda", dtype=dtype)
    keys = torch.randn(2, 1024, 320, device="cuda")
    group = torch.randint(1500, (2, 4096), device="cuda")
    best_keys(x, None, keys), MergePlan(group, 1500).merge(x)  # compiled now
    with no_waiting():
        found = [best_keys(x, None, keys) for _ in range(10)]
        means = [MergePlan(group, 1500).merge(x) for _ in range(10)]
    assert all(all(map(torch.equal, one, found[0])) for one in found)
    assert all(torch.equal(one, means[0]) for one in means)
    assert kernels.ready(x), "a kernel could not run: see the debug log"


def test_the_kernel_takes_no_memory_for_scores():
    skip_without_kernels()
    x = torch.randn(2, 16384, 320, device="cuda", dtype=torch.float16)
    destinations, sources = split_cells(cells(Grid(128, 128), 2, 2, x.device), None)
    keys = x[:, destinations[0]].float()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    best_keys(x, sources, keys)
    assert torch.cuda.max_memory_allocated() - before < 2**20  # the results are 288 KiB, the scores 384 MiB
