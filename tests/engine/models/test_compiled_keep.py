"""Matches that serve several steps in compiled models: as without a compiler, and never a step of another sampling."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tome_core
from tests import pipelines, transformer_pipelines
from tests.compiling import LEAST, TINY, by_blocks, in_place, where_compilers_were_tried
from tests.least_unet import FEW, KEPT, TIMES, WAYS, build, call, draw, same
from tests.models import on_small
from tests.thoroughness import some_quick
from tests.tiny_transformers import STRONG
from tome_core import PRESETS, MergeConfig, MergePlan

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), where_compilers_were_tried]
ways = pytest.mark.parametrize("way", some_quick([in_place, by_blocks]), ids=lambda way: way.__name__)


@pytest.mark.slow
def test_all_marks_at_three_sizes_are_a_graph_for_each_size(work):
    """What matches, what renews and what keeps is one and the same, and so are the settings."""
    backend, plain = CompileCounter(), build(1)
    model = in_place(TINY, build(1), backend)
    for name in PRESETS:
        config = on_small(name)
        with tome_core.patch(plain, config) as eager, tome_core.patch(model, config) as handle:
            for side in (8, 16, 24):
                expected, wanted = draw(plain, eager, TIMES, side, side=side), list(work)
                work.clear()
                assert same(draw(model, handle, TIMES, side, side=side), expected)
                assert work == wanted and len(work) < len(TIMES)
                work.clear()
    assert backend.frame_count <= 3


@ways
def test_what_is_kept_over_steps_is_kept_in_graphs_and_never_for_another_sampling(way):
    backend, plain = CompileCounter(), build()
    model = way(TINY, build(), backend)
    for config in WAYS.values():
        with tome_core.patch(plain, config) as eager, tome_core.patch(model, config) as handle:
            for name in ("a", "b"):
                assert same(draw(model, handle, name=name), draw(plain, eager, name=name))
            guided = draw(model, handle, name="c", pictures=1, copies=2)  # whose halves have one match
            assert same(guided, draw(plain, eager, name="c", pictures=1, copies=2))
            for one in (eager, handle):
                one.set_time(timestep=280.0)
            assert torch.equal(call(model, seed=9), call(plain, seed=9)), "a call without a name"
            assert handle.report() == eager.report()
    assert backend.frame_count <= 3, "two blocks that look alike share a graph, for one picture and for two"


def test_the_calls_of_one_time_keep_apart(work):
    def tiles(unet, handle, seeds):
        pictures = []
        for time in (900.0, 850.0):
            for seed in seeds:
                handle.set_time(timestep=time, sampling="tiles")
                pictures.append(call(unet, seed=seed))
        return pictures[seeds.index(2) :: len(seeds)]

    with tome_core.patch(model := in_place(TINY, build()), KEPT) as handle:
        together = tiles(model, handle, (1, 2, 3))
    assert work == ["match"] * 3 * 2
    with tome_core.patch(model := build(), KEPT) as handle:
        assert same(tiles(model, handle, (2,)), together)


def _plans() -> int:
    gc.collect()
    return sum(isinstance(one, MergePlan) for one in gc.get_objects())


@ways
def test_a_loop_of_ones_own_is_a_sampling_too_of_which_nothing_is_held_when_it_is_done(work, way):
    with tome_core.patch(model := way(TINY, build()), KEPT) as handle:
        before = _plans()
        for _ in range(2):
            with handle.sampling():
                call(model, time=900.0)
                call(model, time=850.0)
                assert _plans() == before + 2
            assert _plans() == before
        assert work == ["match"] * 2 * 2, "for each of two blocks in each of two samplings"
        call(model, time=840.0)
        assert work == ["match"] * 3 * 2


def test_an_engine_reads_the_time_of_compiled_calls_itself(work):
    """Rules that hold for a time need no host's clock."""
    config = MergeConfig(side="kv", ratio=0.75, min_timestep=500.0)
    with tome_core.patch(model := in_place(TINY, build()), config) as handle:
        for time in FEW:
            call(model, time=time)
    assert len(work) == 2 * sum(time >= 500 for time in FEW) and handle.report().calls == len(FEW)


# --- pipelines --------------------------------------------------------------------------------------------------------


def drawn(name: str, words: Any, work: list[str], way: Any) -> tuple[list[torch.Tensor], list[str], tome_core.Report]:
    if name == "UNet":
        pipe = pipelines.make(words)
        networks, draw = [pipe.unet], lambda: pipelines.draw(pipe)
    else:
        pipe, asked = transformer_pipelines.make(name)
        networks, draw = transformer_pipelines.transformers_of(pipe), lambda: transformer_pipelines.draw(pipe, asked)
    for network in networks if way else ():
        way(LEAST, network)
    work.clear()
    with tome_core.patch(pipe, **STRONG, keep=900.0) as handle:
        return [draw(), draw()], list(work), handle.report()


@pytest.mark.parametrize("name", some_quick(["Flux", "UNet", "Wan 2.2, of two transformers"]))
def test_a_compiled_pipeline_keeps_over_its_steps_what_it_would_keep(name, words, work):
    if name not in ("UNet", *transformer_pipelines.PRESENT):
        pytest.skip("this diffusers has no such pipeline")
    before = _plans()
    way = by_blocks if name == "UNet" else in_place
    (eager, wanted, counted), (pictures, done, report) = (drawn(name, words, work, way) for way in (None, way))
    assert same(pictures, eager) and done == wanted and report == counted and done
    assert torch.equal(*pictures), "equal seeds, equal pictures"
    assert _plans() == before, "nothing of a picture is held when it is done"


@pytest.mark.slow
def test_a_pipeline_that_diffusers_compiles_has_one_graph_for_both_phases(words):
    pipe, backend = pipelines.make(words), CompileCounter()
    plain, merged = pipelines.draw(pipe), pipelines.merged_alone(pipelines.make(words))
    tome_core.patch(pipe)
    pipe.unet = torch.compile(pipe.unet, backend=backend, fullgraph=True)
    for _ in range(2):
        assert torch.equal(pipelines.draw(pipe), merged)
    assert backend.frame_count == 1
    tome_core.remove_patch(pipe)
    assert torch.equal(pipelines.draw(pipe), plain)
