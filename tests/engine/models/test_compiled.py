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
    TINY,
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
IN_TIME = MergeConfig(rules=tuple(MergeRule(**(STRONG | {"ratio": ratio, "min_timestep": time}))
                                  for ratio, time in ((0.75, 600), (0.5, 300))))  # fmt: skip
FLUX = COMPILED["Flux"]
NOT_KNOWN = "its function is not known in a compiled model"

either = pytest.mark.parametrize("family", [LEAST, FLUX], ids=lambda family: family.name)
ways = pytest.mark.parametrize("way", some_quick([whole, by_blocks]), ids=lambda way: way.__name__)


def quick_and_slow(quick: list[tuple[str, Way]], slow: list[tuple[str, Way]]) -> Any:
    return pytest.mark.parametrize("family, way", [
        pytest.param(COMPILED[name], way, id=f"{name}-{way.__name__}", marks=[pytest.mark.slow] * (place >= len(quick)))
        for place, (name, way) in enumerate([*quick, *slow])])  # fmt: skip


def picture(family: Family, model: Any, time: Any = TIMES[0]) -> torch.Tensor:
    return family.call(model, timestep=time)


def merged_eagerly(family: Family, settings: dict[str, Any], time: Any = TIMES[0]) -> torch.Tensor:
    with tome_core.patch(model := family.build(), **settings):
        return picture(family, model, time)


def attentions_of(model: nn.Module) -> list[nn.Module]:
    """Those that are merged."""
    return [one for name, one in model.named_modules() if hasattr(one, "to_q") and not name.endswith("attn2")]


# --- as without a compiler --------------------------------------------------------------------------------------------


# arguments are nested (Qwen-Image, with a mask), a list (Z-Image, whose heads share keys), or in several graphs
# (Lumina 2), and an image prompt is one more attention
@quick_and_slow([("least", whole), ("Flux", by_blocks)], [
    ("least", by_blocks), ("Flux", whole), ("ip_adapter_masks", whole), ("Qwen-Image, padded", whole),
    ("Z-Image", whole), ("Lumina 2", whole)])  # fmt: skip
def test_compiled_and_then_patched_it_merges_as_without_a_compiler_in_one_graph_for_all_times(family: Family, way: Way):
    eager, model, backend, graphs = family.build(), family.build(), CompileCounter(), []
    plain = picture(family, model)  # Z-Image makes its frequencies once, as no compiler can
    compiled = way(family, model, backend)
    assert torch.equal(picture(family, compiled), plain)
    unpatched = backend.frame_count
    with tome_core.patch(eager, IN_TIME) as wanted, tome_core.patch(compiled, IN_TIME) as handle:
        for time in TIMES[1::4]:
            assert torch.equal(picture(family, compiled, time), picture(family, eager, time))
            graphs.append(backend.frame_count)
        report, expected = handle.report(), wanted.report()
        assert report.calls == expected.calls == len(graphs) and report.reasons == expected.reasons
        assert [level.merged for level in report.levels] == [level.merged for level in expected.levels]
        assert report.merged_anything and set(report.reasons) == {"attn: outside the rules' time range"}
    assert graphs[0] == graphs[-1] <= 2 * unpatched, "time makes no graph anew"
    assert torch.equal(picture(family, compiled), plain) and backend.frame_count == graphs[-1]


@quick_and_slow([("tiny", whole), ("Flux", by_blocks)], [("least", by_attentions), ("Flux", in_place)])
def test_patched_and_then_compiled_it_may_be_patched_otherwise_and_taken_off(family: Family, way: Way):
    """Other settings need no other graph: nothing of them is in it."""
    first, other = (merged_eagerly(family, settings) for settings in (STRONG, OTHER))
    model, unpatched, backend = family.build(), family.build(), CompileCounter()
    plain = picture(family, model)
    way(family, unpatched)
    tome_core.patch(model, **STRONG)
    compiled = way(family, model, backend)
    assert torch.equal(picture(family, compiled), first)
    graphs = backend.frame_count
    tome_core.patch(compiled, **OTHER)
    assert torch.equal(picture(family, compiled), other) and backend.frame_count == graphs
    tome_core.remove_patch(compiled)
    for number in range(2):
        assert torch.equal(picture(family, compiled), plain)
        for settings, wanted in ((STRONG, first), (OTHER, other)):
            with tome_core.patch(compiled, **settings):
                assert torch.equal(picture(family, compiled), wanted)
        if number == 0:
            again = backend.frame_count
    assert backend.frame_count == again <= 3 * graphs and traces(model) == traces(unpatched)


@pytest.mark.slow
def test_blocks_share_their_graphs_although_each_has_a_number_of_its_own():
    """With fullgraph, a compiler that makes more than eight graphs for one place raises."""
    counts = []
    for settings in ({"ratio": 0.0}, STRONG):
        torch._dynamo.reset()
        backend = CompileCounter()
        with tome_core.patch(model := MANY.build(), max_downsample=8, **settings):
            picture(MANY, by_blocks(MANY, model, backend))
        counts.append(backend.frame_count)
    assert counts[0] == counts[1] < 8


@pytest.mark.slow
@either
def test_another_size_is_no_more_graphs_than_without_a_patch(family: Family):
    def sizes(model: nn.Module) -> list[torch.Tensor]:
        if family is LEAST:
            return [LEAST.call(model, batch, height, timestep=TIMES[0]) for height, batch in ((16, 2), (24, 1))]
        return [tiny_transformers.call(model, given) for given in of_two_sizes()]

    counts = []
    with tome_core.patch(eager := family.build(), **STRONG):
        expected = sizes(eager)
    for settings in (None, STRONG):
        torch._dynamo.reset()
        backend, model = CompileCounter(), family.build()
        if settings:
            tome_core.patch(model, **settings)
        pictures = sizes(whole(family, model, backend))
        counts.append(backend.frame_count)
    assert all(map(torch.equal, pictures, expected)) and counts[1] <= counts[0]


def of_two_sizes() -> list[dict[str, Any]]:
    """Flux's arguments."""
    given = tiny_transformers.arguments_of("Flux")
    small = {"hidden_states": given["hidden_states"][:, :256], "img_ids": tiny_transformers.flux_ids(16, 16)}
    return [given, given | small]


@pytest.mark.slow
def test_a_python_number_is_a_time_too():
    settings, model, backend, graphs = OTHER | {"keep": 60.0}, LEAST.build(), CompileCounter(), []
    compiled, eager = whole(LEAST, model, backend), LEAST.build()
    with tome_core.patch(eager, **settings), tome_core.patch(model, **settings):
        for kind in (float, int):
            for time in TIMES[:3]:
                assert torch.equal(picture(LEAST, compiled, kind(time)), picture(LEAST, eager, kind(time)))
            graphs.append(backend.frame_count)
    unpatched = CompileCounter()
    torch._dynamo.reset()
    compiled = whole(LEAST, LEAST.build(), unpatched)
    for time in (float(TIMES[0]), float(TIMES[1]), int(TIMES[0]), int(TIMES[1])):
        picture(LEAST, compiled, time)
    assert graphs[-1] == unpatched.frame_count


@pytest.mark.parametrize("family, way, backend", [
    (TINY, whole, "aot_eager"), (FLUX, by_blocks, "aot_eager"),
    *(pytest.param(family, way, "inductor", marks=[pytest.mark.slow, for_inductor])
      for family, way in ((LEAST, whole), (FLUX, by_blocks))),
], ids=lambda value: getattr(value, "name", getattr(value, "__name__", value)))  # fmt: skip
def test_a_compiler_that_rewrites_changes_a_merged_picture_no_more_than_an_unmerged_one(family, way, backend):
    expected, model = merged_eagerly(family, STRONG), family.build()
    plain = picture(family, model)
    compiled = way(family, model, CompileCounterWithBackend(backend))
    changed = distance(picture(family, compiled), plain)
    with tome_core.patch(compiled, **STRONG) as handle:
        merged = picture(family, compiled)
        assert not handle.report().reasons and handle.report().merged_anything
    assert distance(merged, expected) <= max(4 * changed, 1e-6) < distance(merged, plain)


@pytest.mark.parametrize("whole_unet", some_quick([False, True]))
def test_blocks_that_checkpoint_themselves_compile_in_pieces_and_merge(whole_unet: bool):
    """torch's checkpoint is one operator to the compiler, into which nothing may be handed on the side."""

    class Block(BasicTransformerBlock):
        def forward(self, x, context=None):
            return checkpoint(self._forward, x, context, use_reentrant=False)

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            spatial = SpatialTransformer(16, 2, 24)
            spatial.transformer_blocks = nn.ModuleList([Block(16, 2, 24)])
            return UNet([[spatial]]).eval()

    with tome_core.patch(eager := build(), **STRONG) as wanted, tome_core.patch(model := build(), **STRONG) as handle:
        (model if whole_unet else model.input_blocks[0][0].transformer_blocks[0]).compile(backend="aot_eager")
        for seed in (1, 2):
            torch.testing.assert_close(least_unet.call(model, seed=seed), least_unet.call(eager, seed=seed))
        assert handle.report() == wanted.report() and handle.report().merged_anything


def test_processors_of_other_classes_merge_by_the_function_that_they_call():
    """diffusers' own of an image prompt, and a class that is derived from another."""
    image = diffusers.models.transformers.transformer_flux.FluxIPAdapterAttnProcessor
    model, arguments = tiny_transformers.make("Flux")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model.transformer_blocks[0].attn.processor = image(32, 32, num_tokens=(4,), scale=[0.5])
        arguments["joint_attention_kwargs"] = {"ip_hidden_states": [torch.randn(1, 4, 32)]}
    attention = model.single_transformer_blocks[0].attn
    attention.processor = type("Derived", (type(attention.processor),), {})()
    with tome_core.patch(model, **STRONG) as handle:
        expected = tiny_transformers.call(model, arguments)
        assert torch.equal(tiny_transformers.call(whole(FLUX, model), arguments), expected)
        assert not handle.report().reasons and handle.report().work_saved > 0.8


@pytest.mark.slow
def test_a_processor_that_is_exchanged_later_is_another_graph():
    compiled = whole(LEAST, model := LEAST.build())
    with tome_core.patch(compiled, **STRONG) as handle:
        merged = picture(LEAST, compiled)
        model.fuse_qkv_projections()
        torch.testing.assert_close(picture(LEAST, compiled), merged, rtol=1e-4, atol=1e-5)
        assert not handle.report().reasons and handle.report().calls == 2


def test_an_attention_that_looks_up_torchs_function_at_each_call_is_asked_at_each_call(monkeypatch):
    """A graph names the site, so a function that a host puts in place of torch's serves compiled models too."""
    seen, plain = [], F.scaled_dot_product_attention

    def noted(*args, **kwargs):
        seen.append(1)
        return plain(*args, **kwargs)

    with tome_core.patch(model := TINY.build(), **STRONG):
        merged = TINY.call(compiled := whole(TINY, model))
        monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
        torch.testing.assert_close(TINY.call(compiled), merged)
    assert seen


# --- left alone, and said ---------------------------------------------------------------------------------------------


def test_if_nothing_ever_merges_the_graph_is_the_models_own():
    compiled = whole(TINY, TINY.build(), "aot_eager")
    plain = picture(TINY, compiled)
    with tome_core.patch(compiled, **(STRONG | {"ratio": 0.0})) as handle:
        assert torch.equal(picture(TINY, compiled), plain)
        assert not handle.report().merged_anything


@ways
def test_a_call_that_cannot_merge_under_a_compiler_is_left_alone_and_the_report_says_why(way: Way, monkeypatch):
    compiled = way(TINY, model := TINY.build())
    plain = picture(TINY, compiled)

    def report_of(call: Callable[[], torch.Tensor]) -> str:
        with tome_core.patch(compiled, **STRONG) as handle:
            torch.testing.assert_close(call(), plain, rtol=0.1, atol=0.1)
        return str(handle.report())

    def with_gradients() -> torch.Tensor:
        model.requires_grad_()
        with monkeypatch.context() as patches:
            patches.setattr(torch, "no_grad", torch.enable_grad)
            out = picture(TINY, compiled)
        out.sum().backward()
        assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())
        return out.detach()

    def under_autocast() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return picture(TINY, compiled).float()

    assert "a backward pass may follow a compiled call" in report_of(with_gradients)
    assert "autocast ends before what a compiled call asks for" in report_of(under_autocast)
    torch._dynamo.reset()
    monkeypatch.setattr(operators, "_TRIED", False)
    assert "this torch's compiler was not tried with it" in report_of(lambda: picture(TINY, compiled))


def test_arguments_that_no_graph_can_be_given_are_left_alone_and_named(monkeypatch):
    model, arguments = tiny_transformers.make("Flux")
    plain, compiled = tiny_transformers.call(model, arguments), whole(FLUX, model)
    monkeypatch.setattr(transformer, "_READERS", {("img_ids", "joint_attention_kwargs"): None})
    handle = tome_core.patch(compiled, **STRONG)
    given = arguments | {"joint_attention_kwargs": {}}
    assert torch.equal(tiny_transformers.call(compiled, given), plain)
    assert "a compiled call cannot be told such arguments" in str(handle.report())


def test_an_exported_model_asks_nobody():
    def exported(*args: Any, **kwargs: Any) -> Any:
        return torch.export.export(model, args, kwargs).module()(*args, **kwargs)

    plain = picture(LEAST, model := LEAST.build())
    with tome_core.patch(model, **STRONG) as handle:
        torch.testing.assert_close(picture(LEAST, exported), plain)
        assert "an exported model would need it wherever it runs" in str(handle.report())
        assert not handle.report().merged_anything


def _wrapper(attention: nn.Module) -> None:
    own = attention.forward
    attention.forward = lambda *args, **kwargs: own(*args, **kwargs)


def _by_hand(attention: nn.Module) -> None:
    attention.set_processor(AttnProcessor())


def _by_xformers(attention: nn.Module) -> None:
    attention.set_processor(attention_processor.XFormersAttnProcessor())


@pytest.mark.parametrize("change", some_quick([_wrapper, _by_hand, _by_xformers]), ids=lambda change: change.__name__)
def test_an_attention_that_a_graph_cannot_ask_is_left_alone_and_named(change: Callable, monkeypatch):
    """The operator knows the arguments of torch's function; those of xformers' are others."""
    with_xformers(monkeypatch, attention_processor)
    model = LEAST.build()
    change(attentions_of(model)[0])
    with tome_core.patch(model, **STRONG) as handle:
        picture(LEAST, model)
        assert not handle.report().reasons, "it merges without a compiler"
        handle.reset_counts()
        picture(LEAST, whole(LEAST, model))
        (level,) = handle.report().levels
        assert level.calls_merged == level.blocks - 1 and NOT_KNOWN in str(handle.report())


@pytest.mark.parametrize("more", [{"proportional": False}, {"merge_crossattn": True, "merge_mlp": True}], ids=str)
def test_a_compiled_block_merges_in_its_self_attention_alone_and_says_so(more):
    """tomesd's rule merges there as many tokens, but those whose keys are alike."""
    settings = {"ratio": 0.5, **more}
    with tome_core.patch(eager := TINY.build(), **settings) as wanted:
        TINY.call(eager)
    with tome_core.patch(model := TINY.build(), **settings) as handle:
        assert TINY.call(whole(TINY, model)).isfinite().all()
    (level,), (expected,) = handle.report().levels, wanted.report().levels
    assert level.tokens == expected.tokens and level.work_saved == expected.work_saved
    reason = "its parts merge by a rule that compiled blocks do not follow"
    assert not level.mlp_tokens and (reason in level.traced) == ("merge_mlp" in more)


# --- copies, threads --------------------------------------------------------------------------------------------------


@ways
def test_a_copy_of_a_patched_model_merges_nothing_until_it_is_patched_and_answers_for_itself(way: Way):
    wanted, plain = merged_eagerly(TINY, OTHER), picture(TINY, model := TINY.build())
    with tome_core.patch(model, **STRONG) as handle:
        compiled = way(TINY, copied := copy.deepcopy(model))
        assert torch.equal(picture(TINY, compiled), plain)
        with tome_core.patch(copied, **OTHER):
            assert torch.equal(picture(TINY, compiled), wanted)
        assert handle.report().calls == 0
        assert not torch.equal(picture(TINY, way(TINY, model)), plain)


@quick_and_slow([("Flux", whole)], [("Flux", by_blocks), ("least", whole)])
def test_each_thread_has_its_own_call(family: Family, way: Way):
    """Two sizes at once through one compiled model: none takes the other's grid."""
    if family is FLUX:
        calls = [lambda model, given=given: tiny_transformers.call(model, given) for given in of_two_sizes()]
    else:
        calls = [lambda model, height=height, time=time: LEAST.call(model, height=height, timestep=time)
                 for height, time in ((16, TIMES[3]), (32, TIMES[9]))]  # fmt: skip
    compiled = way(family, model := family.build())
    with tome_core.patch(model, **OTHER) as handle:
        with torch.compiler.set_stance("force_eager"):
            expected = [call(compiled) for call in calls]
        calls[0](compiled)  # so that one thread compiles anew while the other's graph runs
        pictures = at_once(*(lambda call=call: [call(compiled) for _ in range(4)] for call in calls))
        for of_thread, wanted in zip(pictures, expected, strict=True):
            assert all(torch.equal(one, wanted) for one in of_thread)
        assert not handle.report().reasons


def test_the_first_call_may_be_a_threads():
    """As in a server, each of whose requests has a thread: the graph is good for the next call and the next thread."""
    expected, compiled = merged_eagerly(TINY, STRONG), whole(TINY, TINY.build())
    with tome_core.patch(compiled, **STRONG):
        for _ in range(2):
            (pictures,) = at_once(lambda: [picture(TINY, compiled) for _ in range(2)])
            assert all(torch.equal(one, expected) for one in pictures)
