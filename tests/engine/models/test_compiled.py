"""Under a compiler models merge as they do without it: whole, by their blocks, in any order, whatever they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_processor
from diffusers.models.attention_processor import AttnProcessor
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import tome_core
from benchmarks.sd_block import BasicTransformerBlock, SpatialTransformer, UNet
from tests import least_unet, tiny_transformers
from tests.compiling import (
    COMPILED,
    LEAST,
    MANY,
    TIMES,
    WITH_BREAKS,
    Way,
    by_attentions,
    by_blocks,
    for_inductor,
    in_place,
    where_compilers_were_tried,
    whole,
)  # fmt: skip
from tests.conformance import with_xformers
from tests.families import Family
from tests.thoroughness import some_quick
from tests.threads import at_once
from tests.tiny_transformers import STRONG, distance
from tests.traces import traces
from tome_core import MergeConfig, MergeRule
from tome_core.models import compiled as operators
from tome_core.models import transformer

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), where_compilers_were_tried]
OTHER = STRONG | {"ratio": 0.5, "metric": "input", "side": "qkv", "use_rand": True}
_QUICK = (LEAST.name, "Flux", "SD3.5")
_UNETS = ("sd15", "sdxl", "ip_adapter_masks", "lora", "gligen", "motion")
NAMES = (LEAST.name, MANY.name, *_UNETS, *tiny_transformers.PRESENT)


def _all(names) -> Any:
    return pytest.mark.parametrize(
        "one", [pytest.param(COMPILED[name], marks=[pytest.mark.slow] * (name not in _QUICK)) for name in names],
        ids=lambda one: one.name,
    )  # fmt: skip


# attentions are called alike in both ways: where a compiler takes a model as a whole, that has its blocks in it
_BOTH = (*_QUICK, MANY.name, *WITH_BREAKS)
every = pytest.mark.parametrize("one, way", [
    pytest.param(COMPILED[name], way, marks=[pytest.mark.slow] * (name not in _QUICK), id=f"{name}-{way.__name__}")
    for name in NAMES for way in ((whole, by_blocks) if name in _BOTH else (whole,))])  # fmt: skip
either = _all((LEAST.name, "Flux"))
ways = pytest.mark.parametrize("way", [whole, by_blocks], ids=lambda way: way.__name__)
a_quick_way = pytest.mark.parametrize("way", some_quick([whole, by_blocks]), ids=lambda way: way.__name__)


def merged_eagerly(one: Family, settings: dict[str, Any], times=TIMES[:1]) -> list[torch.Tensor]:
    with tome_core.patch(model := one.build(), **settings):
        return [one.call(model, timestep=time) for time in times]


# --- as without a compiler --------------------------------------------------------------------------------------------


@every
def test_merges_and_counts_as_without_a_compiler_in_one_graph_for_all_times(one: Family, way: Way):
    """Compiled before it is patched; off again it leaves the same bits."""
    times = TIMES if one.name in (LEAST.name, "Flux") else TIMES[:3]
    eager, model, backend, graphs = one.build(), one.build(), CompileCounter(), []
    plain = one.call(model, timestep=times[0])  # Z-Image makes its frequencies once, as no compiler can
    compiled = way(one, model, backend)
    assert torch.equal(one.call(compiled, timestep=times[0]), plain)
    unpatched = backend.frame_count
    with tome_core.patch(eager, **STRONG) as wanted, tome_core.patch(compiled, **STRONG) as handle:
        for time in times:
            merged = one.call(compiled, timestep=time)
            assert torch.equal(merged, one.call(eager, timestep=time))
            graphs.append(backend.frame_count)
        assert handle.report() == wanted.report() and handle.report().calls == len(times)
        assert handle.report().merged_anything and not handle.report().reasons
    assert graphs[0] == graphs[-1] <= 2 * unpatched, "time makes no graph anew"
    assert torch.equal(one.call(compiled, timestep=times[0]), plain) and backend.frame_count == graphs[-1]


@pytest.mark.parametrize("way", [whole, in_place, by_blocks, by_attentions], ids=lambda way: way.__name__)
@either
def test_patched_first_taken_off_and_patched_otherwise(one: Family, way: Way):
    """Other settings need no other graph: nothing of them is in it."""
    (first,), (other,) = (merged_eagerly(one, settings) for settings in (STRONG, OTHER))
    model, unpatched, backend = one.build(), one.build(), CompileCounter()
    plain = one.call(model, timestep=TIMES[0])
    way(one, unpatched)
    tome_core.patch(model, **STRONG)
    compiled = way(one, model, backend)
    assert torch.equal(one.call(compiled, timestep=TIMES[0]), first)
    graphs = backend.frame_count
    tome_core.patch(compiled, **OTHER)
    assert torch.equal(one.call(compiled, timestep=TIMES[0]), other)
    assert backend.frame_count == graphs
    tome_core.remove_patch(compiled)
    assert torch.equal(one.call(compiled, timestep=TIMES[0]), plain)
    for number in range(3):
        for settings, wanted in ((STRONG, first), (OTHER, other)):
            with tome_core.patch(compiled, **settings):
                assert torch.equal(one.call(compiled, timestep=TIMES[0]), wanted)
            assert torch.equal(one.call(compiled, timestep=TIMES[0]), plain)
        if number == 0:
            again = backend.frame_count
    assert backend.frame_count == again <= 3 * graphs and traces(model) == traces(unpatched)


@pytest.mark.slow
@ways
def test_blocks_share_their_graphs_although_each_has_a_number_of_its_own(way: Way):
    """With fullgraph, a compiler that makes more than eight graphs for one place raises."""
    counts = []
    for settings in ({"ratio": 0.0}, STRONG):
        torch._dynamo.reset()
        backend = CompileCounter()
        with tome_core.patch(model := MANY.build(), max_downsample=8, **settings):
            MANY.call(way(MANY, model, backend), timestep=TIMES[0])
        counts.append(backend.frame_count)
    assert counts[0] == counts[1] < 8


@pytest.mark.slow
@either
@ways
def test_another_size_is_no_more_graphs_than_without_a_patch(one: Family, way: Way):
    def sizes(model) -> list[torch.Tensor]:
        if one is LEAST:
            return [LEAST.call(model, batch, height, timestep=TIMES[0]) for height, batch in ((16, 2), (24, 1))]
        given = tiny_transformers.arguments_of("Flux")
        small = {"hidden_states": given["hidden_states"][:, :256], "img_ids": tiny_transformers.flux_ids(16, 16)}
        return [tiny_transformers.call(model, one) for one in (given, given | small)]

    backend, plain, counts = CompileCounter(), one.build(), []
    with tome_core.patch(plain, **STRONG):
        expected = sizes(plain)
    for settings in (None, STRONG):
        torch._dynamo.reset()
        backend, model = CompileCounter(), one.build()
        if settings:
            tome_core.patch(model, **settings)
        found = sizes(way(one, model, backend))
        counts.append(backend.frame_count)
    assert all(map(torch.equal, found, expected)) and counts[1] <= counts[0]


@pytest.mark.parametrize("kind", some_quick([int, float]))
@pytest.mark.parametrize("way", some_quick([by_blocks, whole]), ids=lambda way: way.__name__)
def test_a_python_number_is_a_time_too(kind: type, way: Way):
    settings, counts = OTHER | {"keep": 60.0}, []
    expected = merged_eagerly(LEAST, settings, TIMES[:3])
    for patched in (False, True):
        torch._dynamo.reset()
        model, backend = LEAST.build(), CompileCounter()
        if patched:
            tome_core.patch(model, **settings)
        compiled = way(LEAST, model, backend)
        found = [LEAST.call(compiled, timestep=kind(time)) for time in TIMES[:3]]
        counts.append(backend.frame_count)
    assert all(map(torch.equal, found, expected)) and counts[0] == counts[1]


@either
def test_rules_that_hold_for_a_time_are_one_graph(one: Family):
    early, late = MergeRule(ratio=0.75, min_timestep=600), MergeRule(ratio=0.25, min_timestep=300)
    config, backend = MergeConfig(rules=(early, late)), CompileCounter()
    eager, model = one.build(), one.build()
    with tome_core.patch(eager, config) as wanted, tome_core.patch(whole(one, model, backend), config) as handle:
        for time in TIMES[::3]:
            assert torch.equal(one.call(model, timestep=time), one.call(eager, timestep=time))
    assert handle.report() == wanted.report()
    assert "outside the rules' time range" in str(handle.report()) and backend.frame_count <= 1


@ways
@either
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, for_inductor])])
def test_a_compiler_that_rewrites_changes_a_merged_picture_no_more_than_an_unmerged_one(one, backend, way: Way):
    (expected,) = merged_eagerly(one, STRONG)
    model = one.build()
    plain = one.call(model, timestep=TIMES[0])
    compiled = way(one, model, CompileCounterWithBackend(backend))
    changed = distance(one.call(compiled, timestep=TIMES[0]), plain)
    with tome_core.patch(compiled, **STRONG) as handle:
        merged = one.call(compiled, timestep=TIMES[0])
        assert not handle.report().reasons and handle.report().merged_anything
    assert distance(merged, expected) <= max(4 * changed, 1e-6) < distance(merged, plain)


@pytest.mark.parametrize("whole_unet", [True, False])
def test_blocks_that_checkpoint_themselves_compile_in_pieces_and_merge(whole_unet: bool):
    """torch's checkpoint is one operator to the compiler, into which nothing may be handed on the side."""

    class Block(BasicTransformerBlock):
        def forward(self, x, context=None):
            return checkpoint(self._forward, x, context, use_reentrant=False)

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            transformer = SpatialTransformer(16, 2, 24)
            transformer.transformer_blocks = nn.ModuleList([Block(16, 2, 24)])
            return UNet([[transformer]]).eval()

    with tome_core.patch(eager := build(), **STRONG) as wanted, tome_core.patch(model := build(), **STRONG) as handle:
        (model if whole_unet else model.input_blocks[0][0].transformer_blocks[0]).compile(backend="aot_eager")
        for seed in (1, 2):
            torch.testing.assert_close(least_unet.call(model, seed=seed), least_unet.call(eager, seed=seed))
        assert handle.report() == wanted.report() and handle.report().merged_anything


# --- left alone, and said ---------------------------------------------------------------------------------------------


@a_quick_way
@either
def test_where_nothing_ever_merges_the_graph_is_the_models_own(one: Family, way: Way):
    model = one.build()
    compiled = way(one, model, "aot_eager")
    plain = one.call(compiled, timestep=TIMES[0])
    with tome_core.patch(compiled, **(STRONG | {"ratio": 0.0})) as handle:
        assert torch.equal(one.call(compiled, timestep=TIMES[0]), plain)
        assert not handle.report().merged_anything


@a_quick_way
@either
def test_what_cannot_merge_under_a_compiler_is_left_alone_and_told(one: Family, way: Way, monkeypatch):
    model = one.build()
    compiled = way(one, model)
    plain = one.call(compiled, timestep=TIMES[0])

    def told(changed: Callable[[], torch.Tensor]) -> str:
        with tome_core.patch(compiled, **STRONG) as handle:
            torch.testing.assert_close(changed(), plain, rtol=0.1, atol=0.1)
        return str(handle.report())

    def with_gradients() -> torch.Tensor:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "no_grad", torch.enable_grad)
            patched.setattr(tiny_transformers, "call", tiny_transformers.call.__wrapped__)
            out = one.call(compiled, timestep=TIMES[0])
        assert out.requires_grad
        out.sum().backward()
        assert all(torch.isfinite(one.grad).all() for one in model.parameters() if one.grad is not None)
        return out.detach()

    def under_autocast() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return one.call(compiled, timestep=TIMES[0]).float()

    assert "a backward pass may follow a compiled call" in told(with_gradients)
    assert "autocast ends before what a compiled call asks for" in told(under_autocast)
    torch._dynamo.reset()
    monkeypatch.setattr(operators, "_TRIED", False)
    assert "this torch's compiler was not tried with it" in told(lambda: one.call(compiled, timestep=TIMES[0]))


def test_arguments_that_no_graph_can_be_given_are_left_alone_and_told(monkeypatch):
    one = COMPILED["Flux"]
    model, arguments = tiny_transformers.make("Flux")
    plain, compiled = tiny_transformers.call(model, arguments), whole(one, model)
    monkeypatch.setattr(transformer, "_READERS", {("img_ids", "joint_attention_kwargs"): None})
    handle = tome_core.patch(compiled, **STRONG)
    given = arguments | {"joint_attention_kwargs": {}}
    assert torch.equal(tiny_transformers.call(compiled, given), plain)
    assert "a compiled call cannot be told such arguments" in str(handle.report())


@_all((LEAST.name, "PixArt"))
def test_an_exported_model_asks_nobody(one: Family):
    class Exported:
        """Called as the model is."""

        def __call__(self, *args, **kwargs):
            made = torch.export.export(model, args, kwargs)
            return made.module()(*args, **kwargs)

    model = one.build()
    plain = one.call(model, timestep=TIMES[0])
    with tome_core.patch(model, **STRONG) as handle:
        torch.testing.assert_close(one.call(Exported(), timestep=TIMES[0]), plain)
        assert "an exported model would need it wherever it runs" in str(handle.report())
        assert not handle.report().merged_anything


def attentions_of(model) -> list[nn.Module]:
    """Those that are merged."""
    return [one for name, one in model.named_modules() if hasattr(one, "to_q") and not name.endswith("attn2")]


@a_quick_way
@either
def test_an_attention_beneath_somebodys_wrapper_and_one_by_hand_are_left_alone_and_told(one: Family, way: Way):
    def build() -> nn.Module:
        model = one.build()
        first, second, *_ = attentions_of(model)
        own = first.forward
        first.forward = lambda *args, **kwargs: _doubled(own(*args, **kwargs))
        if one is LEAST:
            second.set_processor(AttnProcessor())
        return model

    with tome_core.patch(model := build(), **STRONG) as handle:
        eager = one.call(model, timestep=TIMES[0])
        assert not handle.report().reasons, "without a compiler both merge"
    with tome_core.patch(compiled := way(one, build()), **STRONG) as handle:
        assert 0 < distance(one.call(compiled, timestep=TIMES[0]), eager) < 0.3
        (level,) = handle.report().levels
        assert 0 < level.calls_merged == level.blocks - (2 if one is LEAST else 1)
        assert "its function is not known in a compiled model" in str(handle.report())


@pytest.mark.parametrize("way", some_quick([whole, by_blocks]), ids=lambda way: way.__name__)
def test_an_attention_by_xformers_is_left_alone_and_told(way: Way, monkeypatch):
    """The operator knows the arguments of torch's function; this one's are called otherwise."""
    with_xformers(monkeypatch, attention_processor)
    model = LEAST.build()
    for one in attentions_of(model):
        one.set_processor(attention_processor.XFormersAttnProcessor())
    plain = LEAST.call(model, timestep=TIMES[0])
    with tome_core.patch(model, **STRONG) as handle:
        assert not torch.equal(LEAST.call(model, timestep=TIMES[0]), plain)
    with tome_core.patch(compiled := way(LEAST, model), **STRONG) as handle:
        assert torch.equal(LEAST.call(compiled, timestep=TIMES[0]), plain)
        assert "its function is not known in a compiled model" in str(handle.report())


def _doubled(out: Any) -> Any:
    return 2 * out if torch.is_tensor(out) else tuple(2 * one for one in out)


@either
def test_a_processor_of_somebody_elses_class_merges_by_the_function_it_calls(one: Family):
    def build() -> nn.Module:
        model = one.build()
        first = attentions_of(model)[0]
        first.processor = type("Mine", (type(first.processor),), {})()
        return model

    with tome_core.patch(eager := build(), **STRONG) as wanted:
        expected = one.call(eager, timestep=TIMES[0])
        with tome_core.patch(model := build(), **STRONG) as handle:
            assert torch.equal(one.call(whole(one, model), timestep=TIMES[0]), expected)
            assert handle.report() == wanted.report() and not handle.report().reasons


@_all((LEAST.name, "PixArt"))
def test_a_processor_that_is_exchanged_later_is_another_graph(one: Family):
    model = one.build()
    compiled = whole(one, model)
    with tome_core.patch(compiled, **STRONG) as handle:
        merged = one.call(compiled, timestep=TIMES[0])
        model.fuse_qkv_projections()
        torch.testing.assert_close(one.call(compiled, timestep=TIMES[0]), merged, rtol=1e-4, atol=1e-5)
        assert not handle.report().reasons and handle.report().calls == 2


def test_ip_adapters_processors_of_transformers_merge_compiled_too():
    model, arguments = tiny_transformers.make("Flux")
    kind = diffusers.models.transformers.transformer_flux.FluxIPAdapterAttnProcessor
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model.transformer_blocks[0].attn.processor = kind(32, 32, num_tokens=(4,), scale=[0.5])
        arguments["joint_attention_kwargs"] = {"ip_hidden_states": [torch.randn(1, 4, 32)]}
    with tome_core.patch(model, **STRONG) as handle:
        expected = tiny_transformers.call(model, arguments)
        assert torch.equal(tiny_transformers.call(whole(COMPILED["Flux"], model), arguments), expected)
        assert not handle.report().reasons and handle.report().work_saved > 0.8


@a_quick_way
@pytest.mark.parametrize("more", [{"proportional": False}, {"merge_crossattn": True, "merge_mlp": True}], ids=str)
def test_a_compiled_block_merges_in_its_self_attention_alone_and_says_so(way: Way, more):
    """tomesd's rule merges there as many tokens, but those whose keys are alike."""
    settings = {"ratio": 0.5, **more}
    with tome_core.patch(eager := LEAST.build(), **settings) as wanted:
        LEAST.call(eager)
    with tome_core.patch(model := LEAST.build(), **settings) as handle:
        assert LEAST.call(way(LEAST, model)).isfinite().all()
    (level,), (expected,) = handle.report().levels, wanted.report().levels
    assert level.tokens == expected.tokens and level.work_saved == expected.work_saved
    said = "its parts merge by a rule that compiled blocks do not follow"
    assert not level.mlp_tokens and (said in level.traced) == ("merge_mlp" in more)


# --- copies, threads --------------------------------------------------------------------------------------------------


@a_quick_way
@either
def test_a_copy_of_a_patched_model_merges_nothing_until_it_is_patched_and_answers_for_itself(one: Family, way: Way):
    (wanted,) = merged_eagerly(one, OTHER)
    model = one.build()
    plain = one.call(model, timestep=TIMES[0])
    with tome_core.patch(model, **STRONG) as handle:
        copied = copy.deepcopy(model)
        other = way(one, copied)
        assert torch.equal(one.call(other, timestep=TIMES[0]), plain)
        with tome_core.patch(copied, **OTHER):
            assert torch.equal(one.call(other, timestep=TIMES[0]), wanted)
        assert handle.report().calls == 0
        assert not torch.equal(one.call(way(one, model), timestep=TIMES[0]), plain)


@a_quick_way
def test_each_thread_has_its_own_call_of_a_transformer(way: Way):
    """Two sizes at once through one compiled model: none takes the other's grid."""
    model, arguments = tiny_transformers.make("Flux")
    small = arguments | {"hidden_states": arguments["hidden_states"][:, :256],
                         "img_ids": tiny_transformers.flux_ids(16, 16)}  # fmt: skip
    _in_threads(way(COMPILED["Flux"], model), model, [
        lambda one, given=given: tiny_transformers.call(one, given) for given in (arguments, small)])  # fmt: skip


@a_quick_way
def test_each_thread_has_its_own_call_of_a_unet(way: Way):
    model = LEAST.build()
    _in_threads(way(LEAST, model), model, [
        lambda one, height=height, time=time: LEAST.call(one, height=height, timestep=time)
        for height, time in ((16, TIMES[3]), (32, TIMES[9]))])  # fmt: skip


def _in_threads(compiled, model, calls) -> None:
    with tome_core.patch(model, **OTHER) as handle:
        with torch.compiler.set_stance("force_eager"):
            expected = [call(compiled) for call in calls]
        assert not torch.equal(expected[0], expected[1][..., : expected[0].shape[-2], :])
        calls[0](compiled)  # so that one thread compiles anew while the other's graph runs
        found = at_once(*(lambda call=call: [call(compiled) for _ in range(8)] for call in calls))
        for pictures, wanted in zip(found, expected, strict=True):
            assert all(torch.equal(one, wanted) for one in pictures)
        assert not handle.report().reasons


@a_quick_way
@either
def test_the_first_call_may_be_a_threads(one: Family, way: Way):
    """As in a server, each of whose requests has a thread: the graph is good for the next call and the next thread."""
    (expected,) = merged_eagerly(one, STRONG)
    compiled = way(one, one.build())
    with tome_core.patch(compiled, **STRONG):
        for _ in range(2):
            (found,) = at_once(lambda: [one.call(compiled, timestep=TIMES[0]) for _ in range(3)])
            assert all(torch.equal(each, expected) for each in found)


def test_an_attention_that_looks_up_torchs_function_at_each_call_is_asked_at_each_call(monkeypatch):
    """A graph names the site, so a function that a host puts in place of torch's serves compiled models too."""
    seen, plain = [], F.scaled_dot_product_attention

    def noted(*args, **kwargs):
        seen.append(1)
        return plain(*args, **kwargs)

    with tome_core.patch(model := LEAST.build(), **STRONG):
        merged = LEAST.call(compiled := whole(LEAST, model))
        monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
        torch.testing.assert_close(LEAST.call(compiled), merged)
    assert seen
