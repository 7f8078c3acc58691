"""Tests that need a CUDA device: equal bits, no waiting for the device, half precision, the CPU's destinations."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tome_core
from tests.small_models.sd_block import make_block, make_inputs
from tome_core.merging import kernels
from tome_core.merging.grid import Draw, Grid, draw_choices
from tome_core.merging.methods import METHODS, MatchOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch sees none here")
SETTINGS = (tome_core.MergeConfig(), *tome_core.PRESETS)


@pytest.fixture
def half_block():
    with torch.inference_mode():
        yield make_block("cuda", torch.float16), make_inputs(64, 2, "cuda", torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_merged_block_gives_equal_bits_every_time(dtype):
    block, inputs = make_block("cuda", dtype), make_inputs(64, 2, "cuda", dtype)
    with torch.inference_mode(), tome_core.patch(block, tome_core.MergeConfig()):
        results = [block(*inputs) for _ in range(10)]
    assert torch.isfinite(results[0]).all()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_merged_block_never_waits_for_the_device(method, half_block):
    block, inputs = half_block
    with tome_core.patch(block, tome_core.MergeConfig(method=method)):
        block(*inputs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            block(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.bounded
def test_steps_that_bound_their_own_error_never_wait_for_the_device(half_block):
    block, inputs = half_block
    with tome_core.patch(block, "balanced", only_if_it_pays=False, host_clock=True) as handle:
        for sampling in ("first", "second"):  # the first makes constants
            torch.cuda.set_sync_debug_mode("error" if sampling == "second" else "default")
            try:
                for timestep in (900.0, 800.0, 700.0, 600.0):
                    handle.set_time(timestep=timestep, sampling=sampling)
                    block(*inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert handle.report().levels[0].fits


def test_destinations_and_the_similarities_found_are_those_of_the_cpu():
    draw = Draw(5, 1, torch.tensor([3.0, 500.0]))
    chosen, expected = (draw_choices(draw, 4096, 4, torch.device(name)) for name in ("cuda", "cpu"))
    assert torch.equal(chosen.cpu(), expected)
    for dtype in (torch.float32, torch.float16):
        x, errors = torch.randn(2, 1024, 320, generator=torch.Generator().manual_seed(0)).to(dtype), []
        for place in (x, x.cuda()):
            plan = METHODS["bipartite"].match(place, Grid(32, 32), MatchOptions(0.5, 2, 2))
            errors.append((plan.unmerge(plan.merge(place)) - place).float().norm().item())
        assert errors[0] == pytest.approx(errors[1], rel=1e-3), dtype


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_block_gives_its_own_bits_again_and_keeps_its_match_as_the_plain_one(mode, half_block):
    """The same holds in CUDA graphs."""
    block, inputs = half_block
    for settings in SETTINGS:
        with tome_core.patch(block, settings, host_clock=True) as handle:
            compiled, results = torch.compile(block, fullgraph=True, mode=mode), []
            handle.set_time(timestep=500.0, sampling="equal")
            equal = [compiled(*inputs).clone() for _ in range(6)]
            for name, run in (("plain", block), ("compiled", compiled)):
                for timestep in (950.0, 900.0, 880.0, 300.0, 250.0, 200.0):
                    handle.set_time(timestep=timestep, sampling=name)
                    results.append(run(*inputs).clone())
        assert all(torch.equal(result, equal[0]) for result in equal), settings
        for eager, by_compiler in zip(results[:6], results[6:], strict=True):
            assert (by_compiler - eager).float().norm() < 0.01 * eager.float().norm(), settings


def test_the_kernels_keep_their_laws_on_this_gpu():
    if not kernels.ready(torch.zeros(1, device="cuda")):
        pytest.skip("no Triton kernels here: Triton is missing, or the GPU is older than Ampere")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/laws.py"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stdout[-8000:]
