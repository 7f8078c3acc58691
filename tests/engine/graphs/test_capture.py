"""Replayed calls are the calls: equal bits, equal counts, one graph for each kind of call, and nothing left behind.

On a CPU, by a stand-in for CUDA graphs that is as blind as they are (`recorded_operators`). `test_on_cuda` has a GPU's.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import tome_core
from tests.families import families_in_time
from tests.least_unet import FEW, KEPT, TIMES, WAYS, build, call, draw, same
from tests.models import call_case, on_small
from tests.recorded_operators import counts, first_block, kinds, recorded
from tests.samplings import pipeline_of
from tests.thoroughness import some_quick
from tome_core import PRESETS, MergeConfig

SIDES = (8, 16, 24)


def state_of(model):
    """All attributes of all modules, and what their containers hold."""
    return [
        {name: dict(one) if isinstance(one, dict) else one for name, one in vars(module).items()}
        for module in model.modules()
    ]


# --- one graph for each kind of call, and its bits --------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_twenty_steps_at_three_sizes_are_those_that_nobody_captured(name, work):
    """One graph for what each phase does at each size, all of them recorded in the first picture."""

    def picture(unet, handle, sampling, wanted=None):
        found = []
        for number, time in enumerate(TIMES):
            for side in SIDES:
                handle.set_time(timestep=time, sampling=sampling)
                work.clear()
                found.append(call(unet, side, seed=number))
                if wanted is not None:
                    wanted.add((side, id(handle.run.now), tuple(work)))
        return found

    plain, model, wanted, config = build(1), build(1), set(), on_small(name)
    with tome_core.patch(plain, config) as eager, tome_core.patch(model, config) as handle, recorded(model) as graphs:
        for sampling in ("a", "b"):
            assert same(picture(model, handle, sampling), picture(plain, eager, sampling, wanted))
            assert len(graphs.graphs) == graphs.backend.recorded == len(wanted)
        assert counts(handle) == counts(eager)
        assert graphs.backend.replays == 2 * len(TIMES) * len(SIDES) and not graphs.plain_calls
    assert len(wanted) == len(SIDES) * {"max": 3}.get(name, 5)


@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_kept_is_kept_in_graphs(way, work):
    plain, model = build(), build()
    eager, handle = tome_core.patch(plain, WAYS[way]), tome_core.patch(model, WAYS[way])
    with recorded(model) as graphs:
        for name in ("a", "b"):
            assert same(draw(model, handle, name=name), draw(plain, eager, name=name))
        assert counts(handle) == counts(eager) and not graphs.plain_calls
        work.clear()
        draw(model, handle, name="c")
        assert not work, "nothing is done by Python any more"


@pytest.mark.parametrize("keep", [0.0, 100.0])
def test_outside_of_a_sampling_every_call_matches_anew(keep):
    config, plain, model = MergeConfig(side="kv", ratio=0.75, keep=keep), build(), build()
    with tome_core.patch(plain, config) as eager, tome_core.patch(model, config) as handle, recorded(model) as graphs:
        assert same(draw(model, handle, name=None), draw(plain, eager, name=None))
        assert kinds(graphs) == ["merged"]


def test_a_model_that_nobody_patched_is_served_too():
    plain, model = build(), build()
    with recorded(model) as graphs:
        for _ in range(2):
            for side in SIDES:
                for seed in range(3):
                    assert torch.equal(call(model, side, seed), call(plain, side, seed))
        assert graphs.graphs == tuple(("plain", (1, 16, side, side)) for side in SIDES)
        assert graphs.backend.replays == 2 * 3 * 3


@pytest.mark.parametrize("split", [False, True])
def test_both_halves_of_guidance_have_one_match(split):
    """In one batch, or in two calls of which the second uses what the first has found."""

    def guided(unet, handle, name):
        if split:
            return called(unet, handle, TIMES[:8], (1, 1), name, pictures=1)
        return draw(unet, handle, TIMES[:8], name=name, pictures=1, copies=2)

    plain, model = build(), build()
    with tome_core.patch(plain, KEPT) as eager, tome_core.patch(model, KEPT) as handle, recorded(model) as graphs:
        for name in ("a", "b"):
            assert same(guided(model, handle, name), guided(plain, eager, name))
        assert set(kinds(graphs)) == {"new", "renewed", "kept"} and not graphs.plain_calls
        assert len(graphs.graphs) == (5 if split else 3), "what takes over another's match is a kind of its own"


def called(unet, handle, times, seeds, name, **more):
    """Calls of these seeds at each of these times."""
    found = []
    for time in times:
        for seed in seeds:
            handle.set_time(timestep=time, sampling=name, **more)
            found.append(call(unet, seed=seed))
    return found


def test_the_calls_of_one_time_keep_apart_and_share_graphs():
    """Tiles of one size: each finds its own match again, in buffers that they use in turns."""
    plain, model = build(), build()
    with tome_core.patch(plain, KEPT) as eager, tome_core.patch(model, KEPT) as handle, recorded(model) as graphs:
        for tiles in (((1, 2, 3), "a"), ((3, 1), "b")):
            found, expected = (called(*one, (900.0, 850.0, 700.0, 650.0), *tiles)
                               for one in ((model, handle), (plain, eager)))  # fmt: skip
            assert same(found, expected)
        assert kinds(graphs) == ["new", "kept", "renewed"]


def test_a_sampling_inside_of_another_is_one_of_its_own():
    def pictures(unet, handle):
        with handle.sampling():
            found = [call(unet, time=900.0, seed=1), call(unet, time=850.0, seed=2)]
            with handle.sampling():
                found += [call(unet, time=880.0, seed=3), call(unet, time=840.0, seed=4)]
            return [*found, call(unet, time=830.0, seed=5), call(unet, time=820.0, seed=6)]

    plain, model = build(), build()
    with tome_core.patch(plain, KEPT) as eager, tome_core.patch(model, KEPT) as handle, recorded(model):
        assert same(pictures(model, handle), pictures(plain, eager))
        assert counts(handle) == counts(eager)


def test_calls_with_and_without_graphs_use_each_others_matches():
    plain, model = build(), build()
    with tome_core.patch(plain, KEPT) as eager, tome_core.patch(model, KEPT) as handle, recorded(model) as graphs:
        expected, found = draw(plain, eager, TIMES), []
        for number, time in enumerate(TIMES):
            handle.keep_maps(number % 3 == 1)
            handle.set_time(timestep=time, sampling="a")
            found.append(call(model, seed=number))
        assert same(found, expected)
        assert graphs.plain_calls == Counter({"maps of what merges are kept": 7})


@families_in_time("controlnet")
@pytest.mark.parametrize("merged", some_quick([True, False]))
def test_every_family_of_models_with_whatever_arguments_it_is_called(case, merged):
    """Tuples of a ControlNet's, dicts of SDXL's, results of diffusers' own classes."""
    plain, model = case.build(), case.build()
    if case.name.startswith("ada_norm"):  # a hook of the test's own tells their blocks what they want to know
        with pytest.raises(ValueError, match="hook"):
            recorded(model)
        return
    if merged:
        for one in (plain, model):
            tome_core.patch(one, MergeConfig(ratio=0.75, use_rand=True, merge_crossattn=True, merge_mlp=True))
    with recorded(model) as graphs:
        for seed, batch in ((1, 2), (2, 2), (1, 1), (3, 2)):
            expected = call_case(case, plain, batch, timestep=100 * seed, seed=seed)
            assert torch.equal(call_case(case, model, batch, timestep=100 * seed, seed=seed), expected)
        assert not graphs.plain_calls and len(graphs.graphs) == 2 and graphs.backend.replays == 4
        assert tome_core.report(model).levels == tome_core.report(plain).levels


def test_a_timestep_that_is_a_number_is_no_graph_of_its_own():
    plain, model, config = build(), build(), MergeConfig(ratio=0.75, use_rand=True)
    x, text = torch.randn(1, 16, 8, 8), torch.randn(1, 5, 24)
    with tome_core.patch(plain, config), tome_core.patch(model, config), recorded(model) as graphs, torch.no_grad():
        for time in (900, 850, 1):
            assert torch.equal(model(x, time, text), plain(x, time, text))
        assert len(graphs.graphs) == 1


@pytest.mark.parametrize("returns", some_quick([True, False]))
@pytest.mark.parametrize("name", [None, "balanced"])
def test_a_pipelines_pictures_are_those_without(tiny_folder, name, returns):
    pipe = pipeline_of(tiny_folder)
    config = None if name is None else on_small(name)

    def picture(seed, guidance=5.0):
        generator = torch.Generator().manual_seed(seed)
        more = {"generator": generator, "guidance_scale": guidance, "output_type": "latent"}
        with torch.no_grad():
            pipe.unet(torch.randn(1, 4, 8, 8, generator=generator), 5, torch.zeros(1, 3, 32), return_dict=returns)
        return pipe("a", num_inference_steps=6, **more).images

    def pictures():
        with nullcontext() if config is None else tome_core.patch(pipe, config) as handle:
            return [picture(1), picture(2), picture(3, 1.0)], handle and counts(handle)

    expected = pictures()
    with recorded(pipe) as graphs:
        found = pictures()
        assert same(found[0], expected[0]) and found[1] == expected[1]
        assert not graphs.plain_calls and graphs.backend.replays == 3 * 7


# --- nothing left behind, and nothing that is out of date -------------------------------------------------------------


def test_a_removed_capture_leaves_the_model_as_it_was():
    model = build()
    before, seen = state_of(model), call(model)
    for turn in (1, -1):
        handles = [make() for make in (partial(tome_core.patch, model, KEPT), partial(recorded, model))[::turn]]
        draw(model, handles[::turn][0])
        for handle in (*handles, *handles):
            handle.remove()
        assert state_of(model) == before and torch.equal(call(model), seen)


def test_nobody_keeps_a_captured_model_alive():
    model = build()
    graphs = recorded(model)
    call(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and graphs.unet is None
    graphs.remove()


@pytest.mark.parametrize("captured_first", [True, False])
def test_a_patch_comes_and_goes_in_either_order(captured_first):
    plain, model = build(), build()
    if captured_first:
        graphs = recorded(model)
    for config in (KEPT, on_small("max"), KEPT):
        with tome_core.patch(plain, config) as eager:
            expected, counted = draw(plain, eager), counts(eager)
        with tome_core.patch(model, config) as handle:
            if not captured_first:
                graphs = recorded(model)
            assert same(draw(model, handle), expected) and counts(handle) == counted
        assert torch.equal(call(model, seed=3), call(plain, seed=3))
        assert kinds(graphs) == ["plain"], "those of the patch are let go of"
        assert not graphs.plain_calls


def test_calls_that_are_named_for_a_time_are_theirs():
    plain, model = build(), build()
    found = []
    for unet in (plain, model):
        handle = tome_core.patch(unet, KEPT)
        handle.uninstall(), handle.attach()
        graphs = recorded(unet) if unet is model else None
        for number in range(4):
            handle.set_time(timestep=900.0 - number, sampling="a")
            with handle.merging() if number % 2 else handle.unmerged():
                found.append(call(unet, seed=number))
    assert same(found[4:], found[:4])
    assert kinds(graphs) == ["plain", "new", "kept"]


def _module_exchanged(attention):
    torch.manual_seed(3)
    attention.to_q = torch.nn.Linear(16, 16, bias=False).requires_grad_(False)


CHANGES = {
    "weights in place": lambda attention: attention.to_q.weight.data.mul_(1.5),
    "weights moved": lambda attention: setattr(attention.to_q.weight, "data", attention.to_q.weight.data * 1.5),
    "weights exchanged": lambda attention: setattr(
        attention.to_q, "weight", torch.nn.Parameter(attention.to_q.weight * 1.5, requires_grad=False)),
    "module exchanged": _module_exchanged,
    "attribute": lambda attention: setattr(attention, "heads", 4),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("merged", [True, False])
def test_a_model_that_was_changed_is_recorded_anew_where_it_has_to_be(change, merged):
    plain, model = build(), build()
    eager, handle = (tome_core.patch(one, KEPT if merged else MergeConfig(ratio=0)) for one in (plain, model))
    with recorded(model) as graphs:
        draw(model, handle)
        before, seen = graphs.backend.recorded, draw(plain, eager, name="b")
        for one in (plain, model):
            CHANGES[change](first_block(one).attn1)
        assert same(found := draw(model, handle, name="b"), draw(plain, eager, name="c")) and not same(found, seen)
        assert (graphs.backend.recorded > before) == (change != "weights in place") and not graphs.plain_calls


def test_what_a_container_holds_is_looked_at_too():
    """An adapter's strength lies in a dict that is changed in place."""
    model = build()
    scaling = first_block(model).attn1.to_q.scaling = {"a": 1.0}
    with recorded(model) as graphs:
        for strength, count in ((1.0, 1), (1.0, 1), (0.5, 2)):
            scaling["a"] = strength
            call(model)
            assert graphs.backend.recorded == count


def test_a_copy_records_for_itself():
    model = build()
    with tome_core.patch(model, KEPT) as handle, recorded(model) as graphs:
        draw(model, handle)
        before, replays = graphs.graphs, graphs.backend.replays
        other = copy.deepcopy(model)
        copied = vars(other)["_tome_core_patch"].merging
        assert same(draw(other, copied, name="b"), draw(model, handle, name="b"))
        assert graphs.graphs == before and graphs.backend.replays == replays + len(FEW)
        theirs = vars(other)["_tome_core_capture"]
        assert theirs.owner is not graphs and theirs.owner.plain_calls, "the stand-in is not copied, and this is a CPU"
        theirs.owner.remove()
        assert "_tome_core_capture" not in vars(other) and "_tome_core_capture" in vars(model)
