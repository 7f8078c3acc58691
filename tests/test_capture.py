"""Replayed calls are the calls: equal bits, equal counts, one graph for each kind of call, and nothing left behind.

On a CPU, by a stand-in for CUDA graphs that is as blind as they are (`recorded_operators`). `test_cuda` has a GPU's.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter

import diffusers
import pytest
import torch

import tome_core
from tests.models import CASES, call_case, on_small
from tests.recorded_operators import RecordedOperators
from tests.test_compile_keep import FEW, KEPT, TIMES, WAYS, build, call, draw, same, work  # noqa: F401
from tests.tiny_pipeline import write_folder
from tome_core import PRESETS, MergeConfig, gate, latch
from tome_core.diffusers_hooks import TokenMergingConfig, apply_token_merging
from tome_core.graphs.handle import capture_by
from tome_core.graphs.model_state import WRAPPED

SIDES = (8, 16, 24)


def recorded(model, **more):
    """Captured by the stand-in, which is at ``backend``."""
    backend = RecordedOperators()
    handle = capture_by(model, backend, **more)
    handle.backend = backend
    return handle


def kinds(graphs) -> list[str]:
    return [kind for kind, _ in graphs.graphs]


def counts(handle):
    report = handle.report()
    return report.calls, report.levels


def state_of(model):
    """All attributes of all modules, and what their containers hold."""
    return [
        {name: dict(one) if isinstance(one, dict) else one for name, one in vars(module).items()}
        for module in model.modules()
    ]


# --- one graph for each kind of call, and its bits --------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_twenty_steps_at_three_sizes_are_those_that_nobody_captured(name, work):  # noqa: F811
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
def test_whatever_is_kept_is_kept_in_graphs(way, work):  # noqa: F811
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
    config, plain, model = MergeConfig(side="kv", ratio=0.75, keep=keep, use_rand=True), build(), build()
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
        if not split:
            return draw(unet, handle, TIMES[:8], name=name, pictures=1, copies=2)
        found = []
        for number, time in enumerate(TIMES[:8]):
            for _ in range(2):
                handle.set_time(timestep=time, sampling=name, pictures=1)
                found.append(call(unet, seed=number))
        return found

    plain, model = build(), build()
    with tome_core.patch(plain, KEPT) as eager, tome_core.patch(model, KEPT) as handle, recorded(model) as graphs:
        for name in ("a", "b"):
            assert same(guided(model, handle, name), guided(plain, eager, name))
        assert set(kinds(graphs)) == {"new", "renewed", "kept"} and not graphs.plain_calls
        assert len(graphs.graphs) == (5 if split else 3), "what takes over another's match is a kind of its own"


def test_the_calls_of_one_time_keep_apart_and_share_graphs():
    """Tiles of one size: each finds its own match again, in buffers that they use in turns."""

    def tiles(unet, handle, seeds, name):
        found = []
        for time in (900.0, 850.0, 700.0, 650.0):
            for seed in seeds:
                handle.set_time(timestep=time, sampling=name)
                found.append(call(unet, seed=seed))
        return found

    plain, model = build(), build()
    with tome_core.patch(plain, KEPT) as eager, tome_core.patch(model, KEPT) as handle, recorded(model) as graphs:
        for seeds, name in (((1, 2, 3), "a"), ((3, 1), "b")):
            assert same(tiles(model, handle, seeds, name), tiles(plain, eager, seeds, name))
        assert kinds(graphs) == ["new", "kept", "renewed"]


def test_a_sampling_inside_of_another_is_one_of_its_own():
    def pictures(unet, handle):
        found = []
        with handle.sampling():
            found += [call(unet, time=900.0, seed=1), call(unet, time=850.0, seed=2)]
            with handle.sampling():
                found += [call(unet, time=880.0, seed=3), call(unet, time=840.0, seed=4)]
            found += [call(unet, time=830.0, seed=5), call(unet, time=820.0, seed=6)]
        return found

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
            if number % 3 != 1:
                handle.run.maps = None
            handle.set_time(timestep=time, sampling="a")
            found.append(call(model, seed=number))
        assert same(found, expected)
        assert graphs.plain_calls == Counter({"maps of what merges are kept": 7})


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.parametrize("merged", [False, True])
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


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("name", [None, "balanced"])
def test_a_pipelines_pictures_are_those_without(tmp_path_factory, name, returns):
    folder = write_folder(tmp_path_factory.mktemp("pipeline"))
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    config = None if name is None else on_small(name)

    def picture(seed, guidance=5.0):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            pipe.unet(torch.randn(1, 4, 8, 8, generator=generator), 5, torch.zeros(1, 3, 32), return_dict=returns)
        return pipe(
            "a", num_inference_steps=6, generator=generator, output_type="latent", guidance_scale=guidance
        ).images  # fmt: skip

    def pictures():
        if config is None:
            return [picture(1), picture(2), picture(3, 1.0)], None
        with tome_core.patch(pipe, config) as handle:
            return [picture(1), picture(2), picture(3, 1.0)], counts(handle)

    expected = pictures()
    with recorded(pipe) as graphs:
        found = pictures()
        assert same(found[0], expected[0]) and found[1] == expected[1]
        assert not graphs.plain_calls and graphs.backend.replays == 3 * 7


# --- nothing left behind, and nothing that is out of date -------------------------------------------------------------


def test_a_removed_capture_leaves_the_model_as_it_was():
    model = build()
    before, seen = state_of(model), call(model)
    for order in range(2):
        first = tome_core.patch(model, KEPT) if order else recorded(model)
        second = recorded(model) if order else tome_core.patch(model, KEPT)
        draw(model, second if order == 0 else first)
        for handle in (first, second):
            handle.remove()
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


def first_block(model):
    return model.input_blocks[0][0].transformer_blocks[0]


def _weights_in_place(model):
    first_block(model).attn1.to_q.weight.data.mul_(1.5)


def _weights_moved(model):
    linear = first_block(model).attn1.to_q
    linear.weight.data = linear.weight.data * 1.5


def _weights_exchanged(model):
    linear = first_block(model).attn1.to_q
    linear.weight = torch.nn.Parameter(linear.weight * 1.5, requires_grad=False)


def _module_exchanged(model):
    torch.manual_seed(3)
    first_block(model).attn1.to_q = torch.nn.Linear(16, 16, bias=False).requires_grad_(False)


def _attribute(model):
    first_block(model).attn1.heads = 4


@pytest.mark.parametrize(
    "change, again",
    [(_weights_in_place, False), (_weights_moved, True), (_weights_exchanged, True), (_module_exchanged, True),
     (_attribute, True)],
)  # fmt: skip
@pytest.mark.parametrize("merged", [True, False])
def test_a_model_that_was_changed_is_recorded_anew_where_it_has_to_be(change, again, merged):
    plain, model = build(), build()
    eager, handle = (tome_core.patch(one, KEPT if merged else MergeConfig(ratio=0)) for one in (plain, model))
    with recorded(model) as graphs:
        draw(model, handle)
        before, seen = graphs.backend.recorded, draw(plain, eager, name="b")
        for one in (plain, model):
            change(one)
        assert same(found := draw(model, handle, name="b"), draw(plain, eager, name="c")) and not same(found, seen)
        assert (graphs.backend.recorded > before) == again and not graphs.plain_calls


def test_what_a_container_holds_is_looked_at_too():
    """An adapter's strength lies in a dict that is changed in place."""
    model = build()
    scaling = first_block(model).attn1.to_q.scaling = {"a": 1.0}
    with recorded(model) as graphs:
        call(model), call(model)
        assert graphs.backend.recorded == 1
        scaling["a"] = 1.0
        call(model)
        assert graphs.backend.recorded == 1
        scaling["a"] = 0.5
        call(model)
        assert graphs.backend.recorded == 2


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


# --- what no graph can hold -------------------------------------------------------------------------------------------


def test_on_a_cpu_calls_are_made_as_they_are_and_it_is_said_once(caplog):
    plain, model = build(), build()
    eager, handle = tome_core.patch(plain, KEPT), tome_core.patch(model, KEPT)
    with tome_core.capture(model) as graphs:
        assert same(draw(model, handle), draw(plain, eager)) and counts(handle) == counts(eager)
        assert not graphs.graphs and sum(graphs.plain_calls.values()) == len(FEW)
    said = [one.getMessage() for one in caplog.records]
    assert said == [
        "tome_core.capture: the UNet is called without a graph: its latents are on cpu, and graphs are CUDA's; move it "
        "to a CUDA device."
    ]


def test_what_may_change_unseen_is_not_recorded():
    class Stranger:
        pass

    model = build()
    x, text = torch.randn(1, 16, 8, 8), torch.randn(1, 5, 24)
    with recorded(model) as graphs:
        with torch.no_grad(), pytest.raises(TypeError):
            model(x, torch.tensor([5.0]), text, stranger=Stranger())
        assert list(graphs.plain_calls) == [
            "a Stranger is among its arguments or results, which may change unseen"
        ]


def test_calls_that_no_graph_fits_are_made_as_they_are():
    model, x, text = build(), torch.randn(1, 16, 8, 8), torch.randn(1, 5, 24)
    expected = model(x, torch.tensor([5.0]), text)
    with recorded(model) as graphs:
        assert torch.equal(model(x, torch.tensor([5.0]), text), expected)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(x, torch.tensor([5.0]), text)
        assert [why.split(";")[0] for why in graphs.plain_calls] == ["a backward pass may follow", "autocast is on"]
        assert not graphs.graphs


def test_a_model_that_asks_its_host_is_called_as_it_is(caplog):
    class Asks(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1.0 if float(x.sum()) > 0 else 0.5)

    plain, model = build(), build()
    for one in (plain, model):
        torch.manual_seed(0)
        first_block(one).attn1.to_q = Asks(16, 16).requires_grad_(False)
    with recorded(model) as graphs:
        for seed in range(6):
            assert torch.equal(call(model, seed=seed), call(plain, seed=seed))
        (why,) = graphs.plain_calls
        assert "_local_scalar_dense waits for the device" in why and not graphs.graphs
    assert len(caplog.records) == 1


def test_a_model_that_counts_its_calls_is_called_as_it_is():
    class Counts(torch.nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    plain, model = build(), build()
    for one in (plain, model):
        torch.manual_seed(0)
        first_block(one).attn1.to_q = Counts(16, 16).requires_grad_(False)
        first_block(one).attn1.to_q.calls = 0
    with recorded(model) as graphs:
        call(model)  # made thrice
        assert first_block(model).attn1.to_q.calls == 3 and not graphs.graphs
        first_block(plain).attn1.to_q.calls = 3
        for seed in range(3):
            assert torch.equal(call(model, seed=seed), call(plain, seed=seed))
        assert graphs.plain_calls == {"its calls change attributes of its modules, which replayed ones would not": 4}
        assert graphs.backend.recorded == 1


def _compiled(model):
    model.compile(backend="eager")


def _offloaded(model):
    first_block(model)._hf_hook = object()


def _hooked(model):
    first_block(model).register_forward_hook(lambda *_: None)


def _wrapped(model):
    first_block(model).forward = lambda *args, **kwargs: None


@pytest.mark.parametrize(
    "change, says",
    [(_compiled, 'torch.compile(mode="reduce-overhead") records graphs by itself'), (_offloaded, "accelerate moves"),
     (_hooked, "somebody's hook lies on a BasicTransformerBlock"),
     (_wrapped, "somebody's wrapper lies on a BasicTransformerBlock")],
)  # fmt: skip
def test_models_that_no_graph_can_hold_are_refused_and_later_left_alone(change, says):
    model = build()
    with recorded(model) as graphs:
        call(model)
        change(model)
        if change not in (_wrapped, _compiled):
            call(model)
            assert len(graphs.plain_calls) == 1 and says in next(iter(graphs.plain_calls))
            assert not graphs.graphs
    with pytest.raises(ValueError, match="cannot be captured") as refused:
        tome_core.capture(model)
    assert says in str(refused.value)
    assert "_tome_core_capture" not in vars(model)


def test_what_is_put_on_above_decides_at_each_call_and_what_lies_beneath_is_not_recorded():
    plain, model = build(), build()
    seen, pictures = [], []

    def wrap(unet, forward):
        def above(x, *args, **kwargs):
            seen.append(unet)
            return forward(x * (len(seen) % 3), *args, **kwargs)

        unet.forward = above

    with recorded(model) as graphs:
        for one in (model, plain):
            seen.clear()
            wrap(one, one.forward)
            pictures.append([call(one, seed=seed) for seed in range(4)])
            assert len(seen) == 4
        assert same(*pictures)
        assert graphs.backend.recorded == 1 and graphs.backend.replays == 4 and not graphs.plain_calls
        with tome_core.patch(model, KEPT) as handle:  # on top of that wrapper, which so lies beneath
            call(model)
            assert handle.report().merged_anything
            assert graphs.plain_calls == {WRAPPED: 1}


def test_a_hook_of_diffusers_lies_above_a_capture():
    settings = TokenMergingConfig(settings={"ratio": 0.5, "side": "kv", "keep": 100.0})
    plain, model, found = build(), build(), []
    with recorded(model) as graphs:
        for one in (plain, model):
            apply_token_merging(one, settings)
            found.append([call(one, seed=int(time), time=time) for time in TIMES])
        assert same(*found) and not graphs.plain_calls and {"new", "kept"} <= set(kinds(graphs))


def test_a_compiled_wrapper_is_refused_and_so_is_a_limit_that_is_none():
    with pytest.raises(ValueError, match="reduce-overhead"):
        tome_core.capture(torch.compile(build(), backend="eager"))
    for limit in (0, True, 2.0):
        with pytest.raises(ValueError, match="no number of graphs"):
            tome_core.capture(build(), limit=limit)
    with pytest.raises(TypeError):
        tome_core.capture(3)


def test_no_more_graphs_are_held_than_were_asked_for(caplog):
    plain, model = build(), build()
    eager, handle = tome_core.patch(plain, KEPT), tome_core.patch(model, KEPT)
    with recorded(model, limit=2) as graphs:
        for name in ("a", "b"):
            assert same(draw(model, handle, name=name), draw(plain, eager, name=name))
            assert len(graphs.graphs) == 2
        assert graphs.backend.recorded > 3
    assert [one.getMessage()[:40] for one in caplog.records] == ["tome_core.capture: 2 graphs are held, th"]


# --- whether it pays --------------------------------------------------------------------------------------------------


def test_a_card_that_waits_for_its_host_in_eager_calls_merges_in_replayed_ones(monkeypatch):
    monkeypatch.setattr(latch, "is_host_bound", lambda *_: True)
    monkeypatch.setitem(gate._LEAST, "cpu", 1)
    config = MergeConfig(side="kv", ratio=0.75, only_if_it_pays=True, keep=100.0)
    model = build()
    with tome_core.patch(model, config) as handle:
        draw(model, handle)
        assert not handle.report().merged_anything
        with recorded(model):
            draw(model, handle)
            assert handle.report().merged_anything
            handle.set_time()
            with pytest.raises(RuntimeError, match="the UNet is captured"):
                handle.measure(64, 64)
