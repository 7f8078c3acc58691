"""Size-aware keys in compiled UNets: one graph, no breaks, and no way taken that was not tried out."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import tome_core
from tests.models import CASES, call_case
from tests.sized_attention import wide_heads  # noqa: F401
from tests.test_compile import BY_NAME as NAMED
from tests.test_compile import SMALL, TIMES, compiled, fresh_compiler, skip_where_unpatched_fails  # noqa: F401
from tome_core import MergeConfig

BY_NAME = {**{case.name: case for case in CASES}, **NAMED}
SIDES = pytest.mark.parametrize("side", ["qkv", "kv"])


@SIDES
@pytest.mark.parametrize("way", ["folded", "mask"])
@pytest.mark.parametrize("name", ["one_level", "sdxl", "ip_adapter_masks", "lora", "comfy_double_with_patches"])
def test_one_graph_serves_all_times(name: str, way: str, side: str, request):
    if way == "folded":
        request.getfixturevalue("wide_heads")
    case, config = BY_NAME.get(name, SMALL), MergeConfig(side=side)
    skip_where_unpatched_fails(case)
    backend = CompileCounter()
    plain, model = case.build(), case.build()
    with tome_core.patch(plain, config), tome_core.patch(model, config) as handle:
        whole = compiled(model, backend)
        for time in TIMES[:4]:
            assert torch.equal(call_case(case, whole, timestep=time), call_case(case, plain, timestep=time))
        assert backend.frame_count == 1
        assert handle.report().levels[0].traced_routes == (way,)
        assert f"compiled with size-aware keys: {way}" in str(handle.report())


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
@SIDES
def test_inductor_builds_a_sized_block(side: str):
    model, plain = SMALL.build(), SMALL.build()
    backend, config = CompileCounterWithBackend("inductor"), MergeConfig(side=side)
    with tome_core.patch(plain, config), tome_core.patch(model, config):
        model.down_blocks[0].attentions[0].transformer_blocks[0].compile(backend=backend, fullgraph=True)
        for time in TIMES[:2]:
            difference = call_case(SMALL, model, timestep=time) - call_case(SMALL, plain, timestep=time)
            assert difference.abs().max() < 1e-4
    assert backend.frame_count == 1


@pytest.mark.parametrize("name, way", [
    ("small", "mask"), ("ldm_sd1", "without, because its projections were changed before it was compiled"),
])  # fmt: skip
def test_projections_that_change_after_the_patch_are_traced_without_wider_heads(name: str, way: str):
    case = BY_NAME.get(name, SMALL)
    model = case.build()
    with tome_core.patch(model, MergeConfig(side="kv", ratio=0.75)) as handle:
        for attention in (b.attn1 for b in handle.unet.modules() if hasattr(b, "attn1")):
            forward = attention.to_q.forward
            attention.to_q.forward = lambda x, _forward=forward: _forward(x)
        whole = compiled(model, CompileCounter())
        assert call_case(case, whole, timestep=TIMES[0]).isfinite().all()
        assert handle.report().levels[0].traced_routes == (way,)


def test_shared_windowed_and_refined_matches_compile_whole():
    config = MergeConfig(side="kv", ratio=0.9375, sx=4, sy=4, query_ratio=0.25, share="call", window=8, refine=1)
    plain, model, backend = SMALL.build(), SMALL.build(), CompileCounter()
    with tome_core.patch(plain, config), tome_core.patch(model, config):
        whole = compiled(model, backend)
        for time in TIMES[:3]:
            assert torch.equal(call_case(SMALL, whole, timestep=time), call_case(SMALL, plain, timestep=time))
    assert backend.frame_count == 1
