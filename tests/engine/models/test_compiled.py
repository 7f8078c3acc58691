"""Under a compiler models merge as without it, or are left alone and the report says why."""

import gc
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models import attention_processor
from diffusers.models.attention_processor import XFormersAttnProcessor
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import tome_core
from tests.engine.attention.conformance import with_xformers
from tests.small_models import transformer_pipelines
from tests.small_models.dits import STRONG, Transformer, distance, make
from tests.small_models.families import MODELS
from tests.small_models.least_unet import Least
from tests.small_models.unets import SDXL, Family, call_unet, seeded, unet
from tests.thoroughness import some_quick
from tests.watching.threads import at_once
from tests.watching.traces import traces, wraps_of
from tome_core import MergeConfig, MergePlan, MergeRule
from tome_core.models import compiled as operators
from tome_core.models import find_models
from tome_core.models.sites import AttentionSite
from tome_core.reporting.ledger import PARTS_COMPILED

pytestmark = pytest.mark.usefixtures("fresh_compiler")
for_inductor = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")  # fmt: skip
TIMES = [torch.tensor(time) for time in range(40, 1000, 48)]
OTHER = STRONG | {"ratio": 0.5, "metric": "input", "side": "qkv", "use_rand": True}
IN_TIME = MergeConfig(rules=tuple(MergeRule(**(STRONG | {"ratio": ratio, "min_timestep": time}))
                                  for ratio, time in ((0.75, 600), (0.5, 300))))  # fmt: skip
# four blocks, all on the latent's level
LEAST = Family("least", seeded(unet, block_out_channels=(16,), down_block_types=("CrossAttnDownBlock2D",),
                               up_block_types=("CrossAttnUpBlock2D",)), call_unet)  # fmt: skip
TINY = Least("tiny", depth=1)
COMPILED = {TINY.name: TINY, LEAST.name: LEAST, **MODELS}
FLUX = COMPILED["Flux"]
WITH_BREAKS = ("Lumina 2",)  # no compiler takes its forward as a whole, patched or not
Way = Callable[..., nn.Module]


def whole(family: Family, model: Any, backend: Any = "eager") -> nn.Module:
    """A compiled model, to be called instead of the model."""
    return torch.compile(model, backend=backend, fullgraph=family.name not in WITH_BREAKS)


def in_place(family: Family, model: Any, backend: Any = "eager") -> nn.Module:
    find_models(model)[0].compile(backend=backend, fullgraph=True)
    return model


def by_blocks(family: Family, model: Any, backend: Any = "eager") -> nn.Module:
    """Compile each block, as diffusers' `compile_repeated_blocks` does."""
    for module in model.modules():
        if type(module).__name__ in getattr(model, "_repeated_blocks", ["BasicTransformerBlock"]):
            module.compile(backend=backend, fullgraph=True)
    return model


def ways(*pairs: tuple[str, Way], quick: int = 1) -> pytest.MarkDecorator:
    """Families, and how each is compiled; the first ones are quick."""
    return pytest.mark.parametrize("family, way", [
        pytest.param(COMPILED[name], way, id=f"{name}-{way.__name__}", marks=[pytest.mark.slow] * (place >= quick))
        for place, (name, way) in enumerate(pairs)])  # fmt: skip


Graph = Callable[..., Any]


def picture(family: Family, model: Any, time: torch.Tensor = TIMES[0]) -> torch.Tensor:
    return family.call(model, timestep=time)


def merged_eagerly(family: Family, settings: dict[str, Any]) -> torch.Tensor:
    with tome_core.patch(model := family.build(), **settings):
        return picture(family, model)


# arguments are nested (Qwen-Image, with a mask), a list (Z-Image, whose heads share keys), or in several graphs
# (Lumina 2), and an image prompt is one more attention
@ways(("least", whole), ("Flux", by_blocks), ("least", by_blocks), ("ip_adapter_masks", whole),
      ("Qwen-Image, padded", whole), ("Z-Image", whole), ("Lumina 2", whole))  # fmt: skip
def test_compiled_and_then_patched_it_merges_as_without_a_compiler_in_one_graph_for_all_times(family: Family, way: Way):
    eager, model, backend, graphs = family.build(), family.build(), CompileCounter(), []
    plain = picture(family, model)  # Z-Image makes its frequencies once, outside of a compiler
    compiled = way(family, model, backend)
    assert torch.equal(picture(family, compiled), plain)
    unpatched = backend.frame_count
    with tome_core.patch(eager, IN_TIME) as wanted, tome_core.patch(compiled, IN_TIME) as handle:
        for time in TIMES[1::4]:
            assert torch.equal(picture(family, compiled, time), picture(family, eager, time))
            graphs.append(backend.frame_count)
        with handle.unmerged():
            assert torch.equal(picture(family, compiled), plain)
        report, expected = handle.report(), wanted.report()
        assert report.calls == expected.calls == len(graphs) and report.reasons == expected.reasons
        assert [level.merged for level in report.levels] == [level.merged for level in expected.levels]
        why = "attn: these steps stay whole, by the strength or the settings"
        assert report.merged_anything and set(report.reasons) == {why}
    assert graphs[0] == graphs[-1] <= 2 * unpatched, "time makes no graph anew"
    assert torch.equal(picture(family, compiled), plain) and backend.frame_count == graphs[-1]


@ways(("tiny", whole), ("Flux", by_blocks), ("Flux", in_place))
def test_patched_and_then_compiled_it_may_be_patched_otherwise_and_taken_off(family: Family, way: Way):
    """Other settings need no other graph, because a graph contains no settings."""
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


@pytest.mark.parametrize("family, way, backend", [
    (TINY, whole, "aot_eager"), pytest.param(FLUX, by_blocks, "aot_eager", marks=pytest.mark.slow),
    pytest.param(LEAST, whole, "inductor", marks=[pytest.mark.slow, for_inductor]),
    pytest.param(FLUX, by_blocks, "inductor", marks=[pytest.mark.slow, for_inductor]),
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


def test_the_first_call_may_be_a_threads():
    """A server runs each request in its own thread: the graph serves the next call and the next thread."""
    expected, compiled = merged_eagerly(TINY, STRONG), whole(TINY, TINY.build())
    with tome_core.patch(compiled, **STRONG):
        for _ in range(2):
            (pictures,) = at_once(lambda: [picture(TINY, compiled) for _ in range(2)])
            assert all(torch.equal(drawn, expected) for drawn in pictures)


def _plans() -> int:
    gc.collect()
    return sum(isinstance(thing, MergePlan) for thing in gc.get_objects())


@pytest.mark.parametrize("name", some_quick(["Flux", "Wan 2.2, of two transformers"]))
def test_a_compiled_pipeline_keeps_over_its_steps_what_it_would_keep_and_nothing_when_it_is_done(name, work):
    results, before = [], _plans()
    for is_compiled in (False, True):
        pipe, call = transformer_pipelines.make(name)
        for network in transformer_pipelines.transformers_of(pipe) if is_compiled else ():
            in_place(FLUX, network)
        work.clear()
        with tome_core.patch(pipe, **STRONG, keep=900.0) as handle:
            pictures = [transformer_pipelines.draw(pipe, call) for _ in range(2)]
            assert _plans() == before
        assert torch.equal(*pictures), "equal seeds, equal pictures"
        results.append((pictures[0].tolist(), list(work), handle.report()))
    assert results[0] == results[1] and work


# --- whole blocks -----------------------------------------------------------------------------------------------------

class DeepTransformer(Transformer):
    def build(self) -> nn.Module:
        return make(self.name, 4)[0]


DEEP, WAN = Least("deep", depth=4), DeepTransformer("Wan")
DEEP_SDXL = MODELS["sdxl"]._replace(
    name="deep sdxl", build=seeded(unet, **{**SDXL, "transformer_layers_per_block": (1, 1, 4)}))


def with_blocks(ratio: float = 0.75) -> dict[str, Any]:
    """Settings by which keys merge, and later blocks run on fewer tokens."""
    blocks = MergeRule(ratio=ratio, max_downsample=8, side="kv", use_rand=False, merge_attn=False, merge_blocks=True)
    return {"config": MergeConfig(rules=(MergeRule(**STRONG), blocks))}


def assert_blocks_merge_as_eagerly(family: Any, model: nn.Module, ratio: float = 0.75) -> torch.Tensor:
    """Draw with blocks on fewer tokens, and return the picture."""
    eager = family.build()
    with tome_core.patch(eager, **with_blocks(ratio)) as wanted, tome_core.patch(model, **with_blocks(ratio)) as handle:
        expected, merged = picture(family, eager), picture(family, model)
        assert handle.report().as_data() == wanted.report().as_data() and handle.report().block_tokens
        if ratio < 0.6:
            with handle.unmerged():
                assert torch.equal(picture(family, model), picture(family, family.build()))
    assert torch.equal(merged, expected)
    return merged


@pytest.mark.parametrize("family", some_quick([DEEP, DEEP_SDXL, WAN, FLUX]), ids=lambda family: family.name)
@pytest.mark.parametrize("comes_first", [False, True], ids=["compiled first", "patched first"])
def test_blocks_compiled_one_by_one_run_on_fewer_tokens_by_few_more_graphs(comes_first: bool, family: Any):
    model, backend = family.build(), CompileCounter()
    before, plain = traces(model), picture(family, model)
    if comes_first:
        tome_core.patch(model, **with_blocks())
    by_blocks(family, model, backend)
    if not comes_first:
        assert torch.equal(picture(family, model), plain)
    graphs = []
    for ratio in (0.75, 0.5, 0.75, 0.9):
        assert not torch.equal(assert_blocks_merge_as_eagerly(family, model, ratio), plain)
        graphs.append(backend.frame_count)
    assert graphs[1] == graphs[3], "steps and settings make no graph anew"
    tome_core.remove_patch(model)
    assert torch.equal(picture(family, model), plain)
    with tome_core.patch(model, strength=0):
        assert torch.equal(picture(family, model), plain)
    for module in model.modules():
        vars(module).pop("_compiled_call_impl", None)
    assert traces(model) == before


def test_blocks_merge_on_in_one_patch_when_they_are_compiled_and_compiled_anew_and_no_longer():
    expected, model = merged_eagerly(DEEP, with_blocks()), DEEP.build()
    with tome_core.patch(model, **with_blocks()) as handle:
        for compiled in (True, True, False, True):
            for block in model.input_blocks[0][0].transformer_blocks:
                block._compiled_call_impl = None
            handle.reset_counts()
            assert torch.equal(picture(DEEP, by_blocks(DEEP, model) if compiled else model), expected)
            assert handle.report().block_tokens
    assert not any(slot in vars(module) for module in model.modules() for slot in ("forward", "_tome_core_wrap"))


@for_inductor
@pytest.mark.slow
def test_inductor_changes_a_picture_with_merged_blocks_no_more_than_an_unmerged_one():
    eager, model = DEEP_SDXL.build(), by_blocks(DEEP_SDXL, DEEP_SDXL.build(), "inductor")
    plain = picture(DEEP_SDXL, eager)
    changed = distance(unmerged := picture(DEEP_SDXL, model), plain)
    with tome_core.patch(eager, **with_blocks()), tome_core.patch(model, **with_blocks()) as handle:
        expected, merged = picture(DEEP_SDXL, eager), picture(DEEP_SDXL, model)
        assert handle.report().block_tokens
    assert distance(merged, expected) <= max(4 * changed, 1e-6) < distance(merged, plain)
    assert torch.equal(picture(DEEP_SDXL, model), unmerged)


def test_compiled_blocks_may_use_the_memory_of_earlier_outputs_again():
    """As CUDA graphs do: an output is valid until the next compiled block runs."""
    earlier: list[torch.Tensor] = []

    def backend(graph: Graph, _: Any) -> Graph:
        def run(*args: Any) -> Any:
            outs = graph(*args)
            for out in earlier:
                out.fill_(torch.nan)
            earlier[:] = outs
            return outs

        return run

    with torch.no_grad():
        assert_blocks_merge_as_eagerly(DEEP, by_blocks(DEEP, DEEP.build(), backend))


def test_under_a_compiler_that_was_not_tried_they_get_all_tokens(monkeypatch):
    monkeypatch.setattr(operators, "TRIED", False)
    plain, model = picture(DEEP, DEEP.build()), by_blocks(DEEP, DEEP.build())
    with tome_core.patch(model, **with_blocks()) as handle:
        assert torch.equal(picture(DEEP, model), plain)
    assert PARTS_COMPILED in handle.report().levels[0].traced


class Cancelled(Exception):
    """A host's interrupt."""


@pytest.mark.parametrize("error, why", [(Cancelled("stop"), ""), (ValueError("size"), "BackendCompilerFailed")])
def test_compiled_code_that_fails_with_fewer_tokens_gets_all_of_them_unless_it_was_interrupted(error, why):
    """A compiler may refuse another size: with ``fullgraph=True, dynamic=False`` torch's does after eight."""

    def backend(graph: Graph, inputs: list[Any]) -> Graph:
        def run(*args: Any) -> Any:
            if any(torch.is_tensor(one) and one.shape[1:] == (18, 16) for one in args):  # groups and samples
                raise error
            return graph(*args)

        if why:
            run(*inputs)
        return run

    model = DEEP.build()
    for block in model.input_blocks[0][0].transformer_blocks:
        block.compile(backend=backend, fullgraph=True, dynamic=False)
    plain = picture(DEEP, model)
    with tome_core.patch(model, **with_blocks()) as handle:
        if not why:
            with pytest.raises(Cancelled):
                picture(DEEP, model)
            return
        out, reasons = picture(DEEP, model), handle.report().reasons
    assert [count for reason, count in reasons.items() if why in reason] == [3] and not handle.report().block_tokens
    assert distance(out, plain) < 0.1


@pytest.mark.parametrize("change, why", [
    (lambda block: block.ff.register_forward_hook(lambda *_: None), "a hook on ff may need every token"),
    (lambda block: setattr(block, "forward", partial(type(block).forward, block)), "another program runs in its place"),
    (lambda block: block.requires_grad_(True), "gradients are enabled")])
def test_compiled_blocks_that_may_need_every_token_get_all_of_them(change: Callable, why: str, monkeypatch):
    model = DEEP.build()
    if "gradients" in why:
        monkeypatch.setattr(torch, "no_grad", torch.enable_grad)
    for block in model.input_blocks[0][0].transformer_blocks:
        change(block)
    by_blocks(DEEP, model)
    with tome_core.patch(model, **with_blocks()) as handle:
        picture(DEEP, model)
    assert sum(count for reason, count in handle.report().reasons.items() if why in reason) == 3
    assert not handle.report().block_tokens


# --- what is left alone -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("way", some_quick([whole, by_blocks]), ids=lambda way: way.__name__)
def test_a_call_that_cannot_merge_under_a_compiler_is_left_alone_and_the_report_says_why(way: Way, monkeypatch):
    compiled = way(TINY, model := TINY.build())
    plain = TINY.call(compiled)

    def report_of(call: Callable[[], torch.Tensor]) -> str:
        with tome_core.patch(compiled, **STRONG) as handle:
            torch.testing.assert_close(call(), plain, rtol=0.1, atol=0.1)
        return str(handle.report())

    def with_gradients() -> torch.Tensor:
        model.requires_grad_()
        with monkeypatch.context() as patches:
            patches.setattr(torch, "no_grad", torch.enable_grad)
            out = TINY.call(compiled)
        out.sum().backward()
        assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
        return out.detach()

    def under_autocast() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return TINY.call(compiled).float()

    assert "a backward pass may follow a compiled call" in report_of(with_gradients)
    assert "autocast is not supported in compiled models" in report_of(under_autocast)
    torch._dynamo.reset()
    monkeypatch.setattr(operators, "TRIED", False)
    assert "merging was not tested with this torch's compiler" in report_of(lambda: TINY.call(compiled))


def _by_a_wrapper(attention: nn.Module) -> None:
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def _by_xformers(attention: nn.Module) -> None:
    """The operator knows the arguments of torch's function; xformers' has others."""
    attention.set_processor(XFormersAttnProcessor())


@pytest.mark.parametrize("change", some_quick([_by_xformers, _by_a_wrapper], quick=0))
def test_an_attention_that_a_graph_cannot_ask_is_left_alone_and_named(change: Callable, monkeypatch):
    with_xformers(monkeypatch, attention_processor)
    model = LEAST.build()
    change(next(module for path, module in model.named_modules() if path.endswith("attn1")))
    with tome_core.patch(model, **STRONG) as handle:
        LEAST.call(model)
        assert not handle.report().reasons, "it merges without a compiler"
        handle.reset_counts()
        LEAST.call(whole(LEAST, model))
        (level,) = handle.report().levels
        assert level.calls_merged == level.blocks - 1
        assert "its function is not known in a compiled model" in str(handle.report())


def attentions(family: Family, model: Any, backend: Any = "eager") -> nn.Module:
    """Compile each self-attention alone."""
    for path, module in model.named_modules():
        if path.endswith("attn1"):
            module.compile(backend=backend, fullgraph=True)
    return model


def transformers(family: Family, model: Any, backend: Any = "eager") -> nn.Module:
    for module in model.modules():
        if hasattr(module, "transformer_blocks"):
            module.compile(backend=backend)
    return model


AS_TOMESD = MergeConfig(ratio=0.5, proportional=False, use_rand=False)


@ways(("tiny", whole), ("least", by_blocks), ("tiny", attentions), ("least", whole), ("least", in_place),
      ("tiny", transformers), ("ldm_sd1", whole), ("ldm_sd1", attentions), quick=3)  # fmt: skip
@pytest.mark.parametrize("parts", some_quick([True, False]), ids=["all parts", "self-attention"])
@pytest.mark.parametrize("comes_first", [True, False], ids=["patched first", "compiled first"])
def test_parts_that_merge_as_in_tomesd_merge_uncompiled_alone_and_the_report_says_so(comes_first, parts, family, way):
    """Two kinds of self-attention may not merge in one picture, one by the block's input and one by keys."""
    config = replace(AS_TOMESD, merge_crossattn=parts, merge_mlp=parts)
    eager, model, in_graph = family.build(), family.build(), way is not attentions
    compiled = model if comes_first else way(family, model)
    plain = picture(family, compiled)
    with tome_core.patch(compiled, config) as handle:
        compiled = way(family, model) if comes_first else compiled
        merged = picture(family, compiled)
        level = handle.report().levels[0]
        assert level.traced or level.skipped == {f"attn: {PARTS_COMPILED}": level.blocks}
        assert not level.tokens and "compiled" in str(handle.report())
        assert not in_graph or PARTS_COMPILED in level.traced
    with tome_core.patch(eager, replace(config, merge_attn=False)) as wanted:
        expected = plain if in_graph else picture(family, eager)
        assert level.merged == wanted.report().levels[0].merged
    assert torch.equal(merged, expected) and torch.equal(merged, plain) == (in_graph or not parts)


def test_a_compiled_model_may_be_patched_tomesds_way_and_otherwise_in_turn():
    plain, strong = TINY.call(TINY.build()), merged_eagerly(TINY, STRONG)
    compiled = whole(TINY, TINY.build())
    for _ in range(2):
        for config, expected in ((MergeConfig(**STRONG), strong), (AS_TOMESD, plain)):
            with tome_core.patch(compiled, config) as handle:
                assert torch.equal(TINY.call(compiled, timestep=TIMES[0]), expected)
                assert handle.report().merged_anything == (expected is strong)


def test_a_rule_in_force_that_is_not_tomesds_merges_in_a_graph_and_the_other_does_not():
    rules = MergeRule(**STRONG, min_timestep=500), AS_TOMESD.rules[0]
    plain, compiled = TINY.build(), whole(TINY, TINY.build())
    with tome_core.patch(eager := TINY.build(), **STRONG), tome_core.patch(compiled, MergeConfig(rules=rules)):
        for time, expected in ((900, eager), (100, plain), (800, eager)):
            assert torch.equal(TINY.call(compiled, time), TINY.call(expected, time))


def test_a_compiled_block_merges_in_its_self_attention_alone_and_says_so():
    settings = {"ratio": 0.5, "merge_crossattn": True, "merge_mlp": True}
    with tome_core.patch(eager := TINY.build(), **settings) as wanted:
        TINY.call(eager)
    with tome_core.patch(model := TINY.build(), **settings) as handle:
        assert TINY.call(whole(TINY, model)).isfinite().all()
    (level,), (expected,) = handle.report().levels, wanted.report().levels
    assert level.tokens == expected.tokens and 0 < level.work_saved < expected.work_saved
    assert not level.mlp_tokens and "its parts merge by a rule that compiled blocks do not follow" in level.traced


# --- operators --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", [TINY, MODELS["Wan"]], ids=lambda family: family.name)
@torch.no_grad()
def test_operators_give_what_a_compiler_was_told(family: Any):
    """An attention's output has the promised layout, and shares no memory that a compiler may overwrite."""
    wraps = wraps_of(tome_core.patch(family.build(), **STRONG))
    number = next(wrap.number for wrap in wraps if isinstance(wrap, AttentionSite))
    calls = [("begin", (wraps[0].number, "tt", [torch.randn(1, 16, 8, 8), torch.tensor(5)], []))]
    for by_head in (False, True):
        qkv = [torch.randn(1, 2, 24, 16) if by_head else torch.randn(1, 24, 2, 16) for _ in range(3)]
        calls.append(("attend", (number, number, *qkv, None, by_head, None, False, "")))
    for name, call in calls if family is TINY else calls[1:]:
        torch.library.opcheck(operators.OPERATORS[name], call, test_utils=("test_schema", "test_faketensor"))


def test_copies_of_the_engine_share_the_operators_and_no_number():
    """Two hosts in one process may each bring a copy, or a webui reloads it; torch accepts a name once."""
    modules, numbers = [nn.Module() for _ in range(2)], []
    for module in modules:
        spec = importlib.util.spec_from_file_location("tome_core.models.another", operators.__file__)
        another = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(another)
        numbers += [int(copy.number_of(module)) for copy in (another, operators)]
        assert another.OPERATORS == operators.OPERATORS != {}
    assert len(set(numbers)) == 4
