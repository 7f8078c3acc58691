"""Matches that serve several steps in compiled UNets: no graph of their own, and never a step of another sampling."""

from __future__ import annotations

import copy
import importlib.util
import sys

import pytest
import torch
from diffusers import UNet2DConditionModel
from tome_core.running.operators import Operators
from tome_core.unet import in_graph
from tome_core.unet.sites import BlockSite
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import tome_core
from tests.compiling import SMALL, compiled, for_inductor, many_blocks
from tests.families import largest_difference
from tests.least_unet import FEW, KEPT, TIMES, WAYS, build, call, draw, same
from tests.models import BY_NAME, call_case, on_small
from tests.samplings import pipeline_of
from tests.thoroughness import some_quick
from tome_core import PRESETS, MergeConfig
from tome_core.settings.phases import plain_rules

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_twenty_steps_at_three_sizes_are_a_graph_for_each_phase_and_size(name, work):
    """What matches, what renews and what keeps is one and the same; with fullgraph a limit would raise."""
    config, backend, plain, model = on_small(name), CompileCounter(), build(1), build(1)
    whole = torch.compile(model, backend=backend, fullgraph=True)
    with tome_core.patch(plain, config) as eager, tome_core.patch(model, config) as handle:
        for side in (8, 16, 24):
            expected, wanted = draw(plain, eager, TIMES, side, side=side), list(work)
            work.clear()
            assert same(draw(whole, handle, TIMES, side, side=side), expected)
            assert work == wanted and len(work) < len(TIMES)
            work.clear()
    assert backend.frame_count == 3 * len(plain_rules(config, [1]))


@pytest.mark.slow
def test_all_marks_on_one_model_stay_below_the_compilers_limit():
    """Eight graphs of one place. The early phases of three marks are one graph."""
    backend, plain, model = CompileCounter(), build(1), build(1)
    whole = torch.compile(model, backend=backend, fullgraph=True)
    for name in PRESETS:
        with tome_core.patch(plain, on_small(name)) as eager, tome_core.patch(model, on_small(name)) as handle:
            assert same(draw(whole, handle), draw(plain, eager))
    assert backend.frame_count == 5


def steps(case, model, handle, times):
    for time in times:
        handle.set_time(timestep=time, sampling="one")
        yield call_case(case, model, timestep=torch.tensor(time))


@pytest.mark.slow
@pytest.mark.parametrize("name, backend, most", [
    ("sdxl", "eager", 0), ("one_level_ldm", "eager", 0),
    pytest.param("one_level", "inductor", 1e-4, marks=for_inductor)])  # fmt: skip
def test_other_families_and_inductor_compile_the_balanced_preset_whole(name, backend, most):
    case, config, counter = BY_NAME.get(name, SMALL), on_small("balanced"), CompileCounterWithBackend(backend)
    plain, model = case.build(), case.build()
    with tome_core.patch(plain, config) as eager, tome_core.patch(model, config) as handle:
        both = steps(case, compiled(model, counter), handle, (100, 60, 0)), steps(case, plain, eager, (100, 60, 0))
        assert all(largest_difference(*pair) <= most for pair in zip(*both, strict=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize("whole", some_quick([True, False]))
@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_kept_is_kept_in_graphs(way, whole):
    config, backend, plain, model = WAYS[way], CompileCounter(), build(), build()
    with tome_core.patch(plain, config) as eager, tome_core.patch(model, config) as handle:
        if whole:
            model.compile(backend=backend, fullgraph=True)
        else:
            for block in model.input_blocks[0][0].transformer_blocks:
                block.compile(backend=backend, fullgraph=True)
        assert same(draw(model, handle), draw(plain, eager))
        assert same(draw(model, handle, name="b"), draw(plain, eager, name="b"))
    assert backend.frame_count == 1, "two blocks that look alike share a graph"


@pytest.mark.skipif(not hasattr(UNet2DConditionModel, "compile_repeated_blocks"), reason="this diffusers cannot do it")
def test_repeated_blocks_keep_their_own_matches_in_shared_graphs():
    backend, plain, model = CompileCounter(), many_blocks(), many_blocks()
    with tome_core.patch(plain, KEPT) as eager, tome_core.patch(model, KEPT) as handle:
        model.compile_repeated_blocks(backend=backend, fullgraph=True)
        assert same(*(list(steps(SMALL, *one, FEW[1:4])) for one in ((model, handle), (plain, eager))))
    assert backend.frame_count < 8


def test_a_picture_does_not_depend_on_the_one_before():
    with tome_core.patch(build(), KEPT) as handle:
        whole = torch.compile(handle.unet, backend="eager", fullgraph=True)
        draw(whole, handle, (900.0, 280.0), "other")
        second = draw(whole, handle, FEW, "this")
        handle.set_time(timestep=280.0)
        unnamed = call(whole, seed=9)
    with tome_core.patch(build(), KEPT) as handle:
        assert same(draw(handle.unet, handle, FEW, "this"), second)
        handle.set_time(timestep=280.0)
        assert torch.equal(call(handle.unet, seed=9), unnamed)


def test_the_calls_of_one_time_keep_apart(work):
    def tiles(unet, handle, seeds):
        found = []
        for time in (900.0, 850.0):
            for seed in seeds:
                handle.set_time(timestep=time, sampling="tiles")
                found.append(call(unet, seed=seed))
        return found[seeds.index(2) :: len(seeds)]

    with tome_core.patch(build(), KEPT) as handle:
        together = tiles(torch.compile(handle.unet, backend="eager", fullgraph=True), handle, (1, 2, 3))
    assert work == ["match"] * 3 * 2
    with tome_core.patch(build(), KEPT) as handle:
        assert same(tiles(handle.unet, handle, (2,)), together)


@pytest.mark.parametrize("whole", [True, False])
def test_both_halves_of_guidance_have_one_match(whole):
    plain, model = build(), build()
    with tome_core.patch(plain, KEPT) as eager, tome_core.patch(model, KEPT) as handle:
        if whole:
            model.compile(backend="eager", fullgraph=True)
        else:
            model.input_blocks[0][0].transformer_blocks[0].compile(backend="eager", fullgraph=True)
        guided = draw(model, handle, pictures=1, copies=2)
        assert same(guided, draw(plain, eager, pictures=1, copies=2))
        assert not same(guided, draw(plain, eager, name="b", copies=2)), "a match can be seen"


def test_a_compiler_may_write_over_what_it_was_given(monkeypatch):
    """An operator's results are the graph's own, and memory is used again."""
    given, plain = [], BlockSite.answers
    monkeypatch.setattr(BlockSite, "answers", lambda self, *args: given.append(plain(self, *args)) or given[-1])
    with tome_core.patch(build(), WAYS["keys, drawn"]) as handle:
        expected = draw(handle.unet, handle)
    with tome_core.patch(build(), WAYS["keys, drawn"]) as handle:
        whole, found = torch.compile(handle.unet, backend="eager", fullgraph=True), []
        for number, time in enumerate(FEW):
            handle.set_time(timestep=time, sampling="a")
            found.append(call(whole, seed=number))
            for one in given:
                for tensor in one:
                    tensor.zero_()
            assert given
    assert same(found, expected)


def test_a_loop_of_ones_own_is_a_sampling_too(work):
    with tome_core.patch(build(), KEPT) as handle:
        whole = torch.compile(handle.unet, backend="eager", fullgraph=True)
        for _ in range(2):
            with handle.sampling():
                call(whole, time=900.0), call(whole, time=850.0)
        assert work == ["match"] * 2 * 2, "for each of two blocks in each of two samplings"
        call(whole, time=840.0)
        assert work == ["match"] * 3 * 2 and handle.run.kept_in_graph is None


def test_a_copy_answers_for_itself(work):
    model = build()
    with tome_core.patch(model, KEPT) as handle:
        draw(model, handle, (900.0,))
        other = copy.deepcopy(model)
        copied = vars(other)["_tome_core_patch"].merging
        work.clear()
        other.compile(backend="eager", fullgraph=True)
        draw(other, copied, (900.0, 880.0))
        assert work == ["match"] * 2
        draw(model, handle, (880.0,))
        assert work == ["match"] * 2


@pytest.mark.slow
def test_nothing_is_asked_for_where_a_backward_pass_may_follow_or_under_autocast(monkeypatch):
    asked, plain = [], BlockSite.answers
    monkeypatch.setattr(BlockSite, "answers", lambda self, *args: asked.append(1) or plain(self, *args))
    x, text = torch.randn(1, 16, 8, 8), torch.randn(1, 5, 24)
    with tome_core.patch(build(), KEPT) as handle:
        whole = torch.compile(handle.unet, backend="eager", fullgraph=True)
        handle.set_time(timestep=500.0, sampling="a")
        assert torch.equal(whole(x, None, text), handle.unet(x, None, text)) and not asked
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            whole(x, None, text)
        assert not asked
        call(whole)
        assert len(asked) == 2


def test_a_pipelines_compiled_unet_keeps_what_it_would_keep(tiny_folder, work):
    pipe = pipeline_of(tiny_folder)

    def picture(seed):
        generator = torch.Generator().manual_seed(seed)
        return pipe("a", num_inference_steps=5, generator=generator, output_type="latent").images

    config = MergeConfig(side="kv", ratio=0.75, keep=250.0, use_rand=False, refine=1)
    with tome_core.patch(pipe, config):
        expected, wanted = [picture(1), picture(2)], list(work)
        work.clear()
        pipe.unet.compile(backend="eager", fullgraph=True)
        assert same([picture(1), picture(2)], expected)
        assert work == wanted and "renew" in work


def test_copies_of_the_engine_share_the_operators_and_no_number():
    """As where two hosts in one process bring one each, or a webui reloads it: torch takes a name once."""
    spec = importlib.util.spec_from_file_location("tome_core.unet.another", in_graph.__file__)
    sites, numbers = [torch.nn.Module() for _ in range(2)], []
    for site in sites:
        another = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(another)
        assert not another.OPERATORS.made
        numbers += [int(one.OPERATORS.number_of(site)) for one in (another, in_graph)]
        assert another.OPERATORS.made == in_graph.OPERATORS.made != {}
    assert len(set(numbers)) == 4


def test_where_torch_cannot_be_told_of_the_operators_a_graph_matches_by_itself(monkeypatch):
    """A host's module that raises when torch looks at it: graphs ask from the first site after it is gone."""

    def refuse(*_, **__):
        raise AttributeError("type object '__file__' has no attribute 'endswith'")

    ours = in_graph.OPERATORS
    other = Operators("tome_core_test", ours._without, **ours._operators)
    with monkeypatch.context() as broken:
        broken.setattr(torch.library, "register_fake", refuse)
        other.number_of(torch.nn.Module())
        assert not other.made
    other.number_of(torch.nn.Module())
    assert other.made
    sys.modules.pop(other._place).library._destroy()
