"""Matches that serve several steps in compiled models: as without a compiler, and never a step of another sampling."""

from __future__ import annotations

import gc

import diffusers
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tome_core
from tests import pipelines, transformer_pipelines
from tests.compiling import where_compilers_were_tried
from tests.least_unet import FEW, KEPT, TIMES, WAYS, build, call, draw, same
from tests.models import on_small
from tests.samplings import pipeline_of
from tests.thoroughness import some_quick
from tests.tiny_transformers import STRONG
from tome_core import PRESETS, MergeConfig, MergePlan
from tome_core.models import find_models
from tome_core.patching import handle_on

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), where_compilers_were_tried]


def compiled(unet, whole=True, backend="eager"):
    """In place, by its blocks if not whole."""
    for module in [unet] if whole else unet.input_blocks[0][0].transformer_blocks:
        module.compile(backend=backend, fullgraph=True)
    return unet


@pytest.mark.slow
def test_all_marks_at_three_sizes_are_a_graph_for_each_size(work):
    """What matches, what renews and what keeps is one and the same, and so are the settings."""
    backend, plain, model = CompileCounter(), build(1), build(1)
    compiled(model, backend=backend)
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


@pytest.mark.parametrize("whole", some_quick([True, False]))
@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_kept_is_kept_in_graphs(way, whole):
    config, backend, plain = WAYS[way], CompileCounter(), build()
    model = compiled(build(), whole, backend)
    with tome_core.patch(plain, config) as eager, tome_core.patch(model, config) as handle:
        assert same(draw(model, handle), draw(plain, eager))
        assert same(draw(model, handle, name="b"), draw(plain, eager, name="b"))
        assert handle.report() == eager.report()
    assert backend.frame_count == 1, "two blocks that look alike share a graph"


@pytest.mark.parametrize("whole", some_quick([True, False]))
def test_a_picture_does_not_depend_on_the_one_before(whole):
    with tome_core.patch(model := compiled(build(), whole), KEPT) as handle:
        draw(model, handle, (900.0, 280.0), "other")
        second = draw(model, handle, FEW, "this")
        handle.set_time(timestep=280.0)
        unnamed = call(model, seed=9)
    with tome_core.patch(model := build(), KEPT) as handle:
        assert same(draw(model, handle, FEW, "this"), second)
        handle.set_time(timestep=280.0)
        assert torch.equal(call(model, seed=9), unnamed)


def test_the_calls_of_one_time_keep_apart(work):
    def tiles(unet, handle, seeds):
        found = []
        for time in (900.0, 850.0):
            for seed in seeds:
                handle.set_time(timestep=time, sampling="tiles")
                found.append(call(unet, seed=seed))
        return found[seeds.index(2) :: len(seeds)]

    with tome_core.patch(model := compiled(build()), KEPT) as handle:
        together = tiles(model, handle, (1, 2, 3))
    assert work == ["match"] * 3 * 2
    with tome_core.patch(model := build(), KEPT) as handle:
        assert same(tiles(model, handle, (2,)), together)


@pytest.mark.parametrize("whole", some_quick([True, False]))
def test_both_halves_of_guidance_have_one_match(whole):
    plain, model = build(), compiled(build(), whole)
    with tome_core.patch(plain, KEPT) as eager, tome_core.patch(model, KEPT) as handle:
        guided = draw(model, handle, pictures=1, copies=2)
        assert same(guided, draw(plain, eager, pictures=1, copies=2))
        assert not same(guided, draw(plain, eager, name="b", copies=2)), "a match can be seen"


def _plans() -> int:
    gc.collect()
    return sum(isinstance(one, MergePlan) for one in gc.get_objects())


@pytest.mark.parametrize("whole", some_quick([True, False]))
def test_a_loop_of_ones_own_is_a_sampling_too_of_which_nothing_is_held_when_it_is_done(work, whole):
    with tome_core.patch(model := compiled(build(), whole), KEPT) as handle:
        before = _plans()
        for _ in range(2):
            with handle.sampling():
                call(model, time=900.0), call(model, time=850.0)
                assert _plans() == before + 2
            assert _plans() == before
        assert work == ["match"] * 2 * 2, "for each of two blocks in each of two samplings"
        call(model, time=840.0)
        assert work == ["match"] * 3 * 2


def drawn(make, compiles: bool, work):
    pipe, draw = make(compiles)
    work.clear()
    with tome_core.patch(pipe, **(STRONG | {"keep": 900.0})) as handle:
        pictures = [draw(), draw()]
        return pictures, list(work), handle.report()


def _unet(folder):
    def make(compiles):
        pipe = pipeline_of(folder)
        if compiles:
            pipe.unet.compile(backend="eager", fullgraph=True)
        return pipe, lambda: torch.as_tensor(pipe(
            "a", num_inference_steps=5, generator=torch.Generator().manual_seed(1), output_type="latent").images)

    return make


def _transformers(name):
    def make(compiles):
        pipe, asked = transformer_pipelines.make(name)
        for one in transformer_pipelines.transformers_of(pipe) if compiles else ():
            one.compile(backend="eager", fullgraph=True)
        return pipe, lambda: transformer_pipelines.draw(pipe, asked)

    return make


_NAMES = ("UNet", "Flux", "Wan 2.2, of two transformers", "Wan, image to video", "SD3.5")
PIPELINES = [name for name in _NAMES if name in ("UNet", *transformer_pipelines.PRESENT)]


@pytest.mark.parametrize("name", some_quick(PIPELINES, 2))
def test_a_compiled_pipeline_keeps_over_its_steps_what_it_would_keep(name, tiny_folder, work):
    make, before = _unet(tiny_folder) if name == "UNet" else _transformers(name), _plans()
    (eager, wanted, counted), (pictures, done, told) = (drawn(make, compiles, work) for compiles in (False, True))
    assert same(pictures, eager) and done == wanted and told == counted and done
    assert torch.equal(*pictures), "equal seeds, equal pictures"
    assert _plans() == before, "nothing of a picture is held when it is done"


def test_an_engine_reads_the_time_of_compiled_calls_itself(work):
    """Rules that hold for a time need no host's clock."""
    config = MergeConfig(side="kv", ratio=0.75, min_timestep=500.0)
    with tome_core.patch(model := compiled(build()), config) as handle:
        for time in FEW:
            call(model, time=time)
    assert len(work) == 2 * sum(time >= 500 for time in FEW) and handle.report().calls == len(FEW)


# --- one graph for both phases of a preset ----------------------------------------------------------------------------


def _whole(pipe, backend):
    pipe.unet = torch.compile(pipe.unet, backend=backend, fullgraph=True)


def _by_blocks(pipe, backend):
    if not hasattr(pipe.unet, "compile_repeated_blocks"):
        pytest.skip(f"diffusers {diffusers.__version__} has no compile_repeated_blocks")
    pipe.unet.compile_repeated_blocks(backend=backend, fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("compiles, levels", [(_whole, 1), (_by_blocks, 2)])
def test_a_pipeline_that_diffusers_compiles_has_one_graph_for_both_phases(words, patch_first: bool, compiles, levels):
    pipe, backend = pipelines.make(words), CompileCounter()
    plain, merged = pipelines.draw(pipe), pipelines.merged_alone(pipelines.make(words))
    for is_patch in (patch_first, not patch_first):
        tome_core.patch(pipe) if is_patch else compiles(pipe, backend)
    for _ in range(2):
        assert torch.equal(pipelines.draw(pipe), merged)
    assert backend.frame_count == levels
    pipelines.assert_merged(handle_on(find_models(pipe)[0]))
    tome_core.remove_patch(pipe)
    assert torch.equal(pipelines.draw(pipe), plain)
