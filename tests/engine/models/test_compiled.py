"""Compiled UNets: nothing breaks a graph, time makes no new ones, and a report says what was compiled."""

from __future__ import annotations

import logging

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import tome_core
from tests.compiling import SMALL, TIMES, compiled, for_inductor, many_blocks, skip_where_unpatched_fails
from tests.models import BY_NAME, call_case
from tests.traces import traces
from tome_core import MergeConfig, MergeRule

pytestmark = pytest.mark.usefixtures("fresh_compiler")

EVERYTHING = {"max_downsample": 8, "merge_crossattn": True, "merge_mlp": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, patch_first",
    [("sd15", True), ("sd15", False), ("one_level_ldm", False), ("comfy_double_with_patches", True)],
)
def test_one_graph_serves_twenty_times_however_it_was_made(name: str, patch_first: bool):
    case, settings = BY_NAME[name], EVERYTHING if name == "sd15" else {}
    skip_where_unpatched_fails(case)
    model, plain = case.build(), tome_core.apply_patch(case.build(), **settings)
    backend = CompileCounter()
    if not patch_first:
        model = compiled(model, backend)
        call_case(case, model)  # so that there is a graph without merging already
    tome_core.apply_patch(model, **settings)
    if patch_first:
        model = compiled(model, backend)
    call_case(case, model, timestep=TIMES[0])
    graphs = backend.frame_count
    assert graphs == (1 if patch_first else 2)
    for time in TIMES:
        assert torch.equal(call_case(case, model, timestep=time), call_case(case, plain, timestep=time))
    assert backend.frame_count == graphs
    tome_core.remove_patch(model)
    assert torch.equal(call_case(case, model), call_case(case, case.build()))


@pytest.mark.slow
@pytest.mark.parametrize("name, config", [
    *((name, MergeConfig(proportional=False)) for name in ("sdxl", "ip_adapter_masks")),
    *(("one_level", MergeConfig(method=method, max_downsample=8)) for method in ("downsample", "cluster")),
    ("one_level", MergeConfig(side="kv", ratio=0.9375, sx=4, sy=4, query_ratio=0.25, refine=1)),
])  # fmt: skip
def test_other_families_methods_and_refined_matches_compile_whole_as_well(name: str, config: MergeConfig):
    case, backend = BY_NAME.get(name, SMALL), CompileCounter()
    skip_where_unpatched_fails(case)
    plain, model = case.build(), case.build()
    with tome_core.patch(plain, config), tome_core.patch(model, config):
        whole = compiled(model, backend)
        for time in TIMES[:3]:
            assert torch.equal(call_case(case, whole, timestep=time), call_case(case, plain, timestep=time))
    assert backend.frame_count == 1


@pytest.mark.slow
def test_compiling_in_place_is_the_same():
    model, plain = SMALL.build(), tome_core.apply_patch(SMALL.build())
    before, backend = traces(model), CompileCounter()
    model.compile(backend=backend, fullgraph=True)
    tome_core.apply_patch(model)
    for time in TIMES[:3]:
        assert torch.equal(call_case(SMALL, model, timestep=time), call_case(SMALL, plain, timestep=time))
    assert backend.frame_count == 1
    tome_core.remove_patch(model)
    assert torch.equal(call_case(SMALL, model), call_case(SMALL, SMALL.build()))
    del model._compiled_call_impl
    assert traces(model) == before


@pytest.mark.slow
@pytest.mark.parametrize("backend, config", [
    ("aot_eager", MergeConfig(proportional=False, **EVERYTHING)),
    *(pytest.param("inductor", config, marks=for_inductor)
      for config in (MergeConfig(proportional=False), MergeConfig(), MergeConfig(side="kv"))),
])  # fmt: skip
def test_compilers_that_rewrite_give_the_same_picture(backend: str, config: MergeConfig):
    """The whole UNet; by inductor, which takes long, one block of it."""
    counter, plain, model = CompileCounterWithBackend(backend), SMALL.build(), SMALL.build()
    with tome_core.patch(plain, config), tome_core.patch(model, config):
        part = model if backend == "aot_eager" else model.down_blocks[0].attentions[0].transformer_blocks[0]
        part.compile(backend=counter, fullgraph=True)
        for time in TIMES[:2]:
            difference = call_case(SMALL, model, timestep=time) - call_case(SMALL, plain, timestep=time)
            assert difference.abs().max() < 1e-4
    assert counter.frame_count == 1


def _graphs_of_repeated_blocks(model, patch_first=True, **settings) -> list[int]:
    """After each call; settings: of a patch, if there is to be one."""
    backend, counts = CompileCounter(), []
    if settings and patch_first:
        tome_core.apply_patch(model, **settings)
    model.compile_repeated_blocks(backend=backend, fullgraph=True)
    if settings and not patch_first:
        tome_core.apply_patch(model, **settings)
    for time in TIMES:
        call_case(SMALL, model, timestep=time)
        counts.append(backend.frame_count)
    return counts


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(UNet2DConditionModel, "compile_repeated_blocks"), reason="this diffusers cannot do it")
@pytest.mark.parametrize("patch_first", [True, False])
def test_repeated_blocks_share_their_graphs(patch_first: bool):
    vanilla = _graphs_of_repeated_blocks(many_blocks())
    torch._dynamo.reset()
    plain, model = tome_core.apply_patch(many_blocks(), max_downsample=8), many_blocks()
    counts = _graphs_of_repeated_blocks(model, patch_first, max_downsample=8)
    assert counts == vanilla and counts[0] == counts[-1] < 8
    assert torch.equal(call_case(SMALL, model, timestep=TIMES[0]), call_case(SMALL, plain, timestep=TIMES[0]))
    report = tome_core.report(model)
    assert report.calls == len(TIMES) + 1
    assert ("attn", 256, 128, 128) in report.levels[0].traced_merges


@pytest.mark.slow
def test_a_second_size_is_one_more_graph_or_two():
    """With sizes left open, tracing a tiny UNet took over a minute."""
    backend = CompileCounter()
    plain = tome_core.apply_patch(SMALL.build(), **EVERYTHING)
    model = compiled(tome_core.apply_patch(SMALL.build(), **EVERYTHING), backend)
    for number, (height, batch) in enumerate([(16, 2), (24, 2), (24, 1), (16, 2)]):
        picture = call_case(SMALL, model, height=height, batch=batch, timestep=TIMES[0])
        assert torch.equal(picture, call_case(SMALL, plain, height=height, batch=batch, timestep=TIMES[0]))
        assert backend.frame_count <= number + 1


@pytest.mark.slow
def test_rules_limited_in_time_need_one_graph_for_each_rule():
    early, late = MergeRule(ratio=0.75, min_timestep=600, merge_mlp=True), MergeRule(ratio=0.25, min_timestep=300)
    config, backend = MergeConfig(rules=(early, late)), CompileCounter()
    plain, model = SMALL.build(), SMALL.build()
    whole = compiled(model, backend)
    with tome_core.patch(plain, config), tome_core.patch(model, config) as handle:
        for time in TIMES:
            handle.set_time(timestep=float(time))
            assert torch.equal(call_case(SMALL, whole, timestep=time), call_case(SMALL, plain, timestep=time))
        assert backend.frame_count <= 3
        handle.set_time()
        assert ("mlp", 256, 64, 0) in handle.report().levels[0].traced_merges


def test_a_clock_that_was_not_set_is_said_and_reported(caplog):
    config = MergeConfig(max_timestep=700)
    with tome_core.patch(SMALL.build(), config) as handle, caplog.at_level(logging.WARNING):
        whole = compiled(handle.unet, CompileCounter())
        for time in TIMES[:3]:
            call_case(SMALL, whole, timestep=time)
    assert len(caplog.records) == 1 and "set_time" in caplog.text
    assert handle.report().levels[0].traced_reasons == ("block: the time is not known",)
    assert "the time is not known" in str(handle.report()) and not handle.report().merged_anything


def test_a_report_of_a_compiled_unet_says_what_was_compiled():
    whole = compiled(tome_core.apply_patch(SMALL.build(), merge_mlp=True), CompileCounter())
    assert "no call counted yet" in str(tome_core.report(whole))
    call_case(SMALL, whole)
    report = tome_core.report(whole)
    assert report.levels[0].traced_merges == (("attn", 256, 128, 128), ("mlp", 256, 128, 0))
    assert report.merged_anything and "256 tokens -> 128" in str(report)


@pytest.mark.slow
def test_a_patch_that_is_taken_off_and_put_back_reuses_its_graph():
    backend = CompileCounter()
    model = SMALL.build()
    whole = compiled(model, backend)
    handle = tome_core.patch(model, MergeConfig())
    merged = call_case(SMALL, whole)
    handle.uninstall()
    vanilla = call_case(SMALL, whole)
    for _ in range(3):
        handle.install()
        assert torch.equal(call_case(SMALL, whole), merged)
        handle.uninstall()
        assert torch.equal(call_case(SMALL, whole), vanilla)
    assert backend.frame_count == 2


def test_blocks_that_checkpoint_themselves_compile_in_pieces():
    """torch's checkpoint is one operator to the compiler, into which nothing may be handed on the side."""
    case = BY_NAME["sgm_double"]
    plain, model = tome_core.apply_patch(case.build()), tome_core.apply_patch(case.build())
    model.model.diffusion_model.input_blocks[1].compile(backend="eager")
    assert torch.equal(call_case(case, model), call_case(case, plain))
