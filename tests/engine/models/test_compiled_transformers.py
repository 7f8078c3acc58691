"""Diffusers' transformers under a compiler merge as they do without it: whole, by their blocks, in any order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from tome_core.sequence import handle as sequence_handle
from tome_core.transformers import in_graph
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import tome_core
from tests import tiny_transformers, transformer_pipelines
from tests.compiling import for_inductor
from tests.thoroughness import some_quick
from tests.threads import at_once
from tests.tiny_transformers import PRESENT, STRONG, call, distance
from tome_core.engine.match import match
from tome_core.models.arguments import pack, unpack

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(not in_graph.TRIED, reason="this torch's compiler is left alone"),
]
OTHER = STRONG | {"ratio": 0.5, "metric": "input", "side": "qkv"}
BROKEN = ("Lumina 2",)  # no compiler takes its forward whole, with us or without


def whole(name: str, model: torch.nn.Module, backend: Any = "eager") -> torch.nn.Module:
    """The transformer, to be called in its place."""
    return torch.compile(model, backend=backend, fullgraph=name not in BROKEN)


def in_place(name: str, model: torch.nn.Module, backend: Any = "eager") -> torch.nn.Module:
    model.compile(backend=backend, fullgraph=name not in BROKEN)
    return model


def by_blocks(name: str, model: torch.nn.Module, backend: Any = "eager") -> torch.nn.Module:
    if not getattr(model, "_repeated_blocks", None):
        pytest.skip("this class names no repeated blocks")
    model.compile_repeated_blocks(backend=backend, fullgraph=True)
    return model


def by_attentions(name: str, model: torch.nn.Module, backend: Any = "eager") -> torch.nn.Module:
    for attention in (one for one in model.modules() if hasattr(one, "to_q")):
        attention.compile(backend=backend, fullgraph=True)
    return model


Way = Callable[..., torch.nn.Module]
NAMES = sorted(PRESENT, key=lambda name: name not in ("Flux", "SD3.5", "Wan"))
ways = pytest.mark.parametrize("way", [whole, by_blocks], ids=lambda way: way.__name__)
a_quick_way = pytest.mark.parametrize("way", some_quick([whole, by_blocks]), ids=lambda way: way.__name__)


def at(arguments: dict[str, Any], share: float) -> dict[str, Any]:
    """The same call at another time."""
    return {key: one * share if key in ("timestep", "t") else one for key, one in arguments.items()}


def merged_eagerly(name: str, settings: dict[str, Any], shares: tuple[float, ...] = (1.0,)) -> list[torch.Tensor]:
    model, arguments = tiny_transformers.make(name)
    with tome_core.patch(model, **settings):
        return [call(model, at(arguments, share)) for share in shares]


@ways
@pytest.mark.parametrize("name", some_quick(NAMES, 3))
def test_merges_as_without_a_compiler_counts_as_there_and_off_again_leaves_the_same_bits(name, way: Way):
    """Compiled before it is patched, at several times: one graph for all of them."""
    times = (1.0, 0.5, 0.25)
    expected, backend = merged_eagerly(name, STRONG, times), CompileCounter()
    model, arguments = tiny_transformers.make(name)
    eager = call(model, arguments)  # Z-Image makes its frequencies once, as no compiler can
    compiled = way(name, model, backend)
    plain, graphs = call(compiled, arguments), []
    assert torch.equal(plain, eager)
    with tome_core.patch(compiled, **STRONG) as handle:
        for time, wanted in zip(times, expected, strict=True):
            assert torch.equal(call(compiled, at(arguments, time)), wanted)
            graphs.append(backend.frame_count)
    data = handle.report().as_data()
    assert graphs[0] == graphs[-1], "time makes no graph anew"
    assert data["calls"] == len(times) and not data.get("skipped") and handle.report().work_saved > 0.85
    assert "compiled" not in str(handle.report())
    assert not torch.equal(expected[0], plain)
    assert torch.equal(call(compiled, arguments), plain) and backend.frame_count == graphs[-1]


@pytest.mark.parametrize("way", [whole, in_place, by_blocks, by_attentions], ids=lambda way: way.__name__)
def test_patched_first_taken_off_and_patched_otherwise(way: Way):
    """Other settings need no other graph: nothing of them is in it."""
    first, other = merged_eagerly("Flux", STRONG)[0], merged_eagerly("Flux", OTHER)[0]
    model, arguments = tiny_transformers.make("Flux")
    plain, backend = call(model, arguments), CompileCounter()
    tome_core.patch(model, **STRONG)
    compiled = way("Flux", model, backend)
    assert torch.equal(call(compiled, arguments), first)
    graphs = backend.frame_count
    tome_core.patch(compiled, **OTHER)
    assert torch.equal(call(compiled, arguments), other)
    assert backend.frame_count == graphs
    tome_core.remove_patch(compiled)
    assert torch.equal(call(compiled, arguments), plain)
    unpatched = backend.frame_count
    for settings, wanted in ((STRONG, first), (OTHER, other)):
        with tome_core.patch(compiled, **settings):
            assert torch.equal(call(compiled, arguments), wanted)
        assert torch.equal(call(compiled, arguments), plain)
    assert unpatched <= 2 * graphs and backend.frame_count <= 3 * graphs


@a_quick_way
def test_where_nothing_ever_merges_the_graph_is_the_models_own(way: Way):
    model, arguments = tiny_transformers.make("Flux")
    compiled = way("Flux", model, "aot_eager")
    plain = call(compiled, arguments)
    with tome_core.patch(compiled, **(STRONG | {"ratio": 0.0})) as handle:
        assert torch.equal(call(compiled, arguments), plain)
    assert "no rule ever merges here" in str(handle.report())
    with tome_core.patch(compiled, **(STRONG | {"min_pixels": 10**7})) as handle:
        assert torch.equal(call(compiled, arguments), plain)
    assert "the picture is smaller than min_pixels" in str(handle.report())


@ways
@pytest.mark.parametrize("backend", [
    "aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, for_inductor])])
@pytest.mark.parametrize("name", some_quick(["Flux", "HunyuanVideo"]))
def test_a_compiler_that_rewrites_changes_a_merged_picture_no_more_than_an_unmerged_one(name, backend, way: Way):
    expected = merged_eagerly(name, STRONG)[0]
    model, arguments = tiny_transformers.make(name)
    plain = call(model, arguments)
    compiled = way(name, model, CompileCounterWithBackend(backend))
    changed = distance(call(compiled, arguments), plain)
    with tome_core.patch(compiled, **STRONG) as handle:
        merged = call(compiled, arguments)
    assert not handle.report().as_data().get("skipped")
    assert distance(merged, expected) <= max(4 * changed, 1e-6) < distance(merged, plain)


@pytest.mark.parametrize("name", some_quick(["Flux", "Wan 2.2, of two transformers", "Wan, image to video", "SD3.5"]))
@ways
def test_a_compiled_pipeline_keeps_over_its_steps_what_it_would_keep(name, way: Way, monkeypatch):
    matches: list[int] = []
    monkeypatch.setattr(sequence_handle, "match", lambda *args: matches.append(1) or match(*args))
    settings, found = STRONG | {"keep": 900.0}, []
    for compiles in (False, True):
        pipe, asked = transformer_pipelines.make(name)
        for part in ("transformer", "transformer_2") if compiles else ():
            if getattr(pipe, part, None) is not None:
                setattr(pipe, part, way(name, getattr(pipe, part)))
        matches.clear()
        with tome_core.patch(pipe, **settings) as handle:
            pictures = [transformer_pipelines.draw(pipe, asked) for _ in range(2)]
            assert handle.run.kept_in_graph is None, "nothing of a picture is held when it is done"
        found.append((pictures, len(matches), handle.report().as_data()))
    (eager, wanted, counted), (pictures, done, told) = found
    assert all(torch.equal(one, other) for one, other in zip(pictures, eager, strict=True))
    assert done == wanted and told == counted


@a_quick_way
def test_what_cannot_merge_under_a_compiler_is_left_alone_and_told(way: Way, monkeypatch):
    model, arguments = tiny_transformers.make("Flux")
    compiled = way("Flux", model)
    plain = call(compiled, arguments)

    def told(changed: Callable[[], torch.Tensor]) -> str:
        with tome_core.patch(compiled, **STRONG) as handle:
            torch.testing.assert_close(changed(), plain, rtol=0.1, atol=0.1)
        return str(handle.report())

    def with_gradients() -> torch.Tensor:
        out = compiled(**arguments, return_dict=False)[0]
        out.sum().backward()
        assert all(torch.isfinite(one.grad).all() for one in model.parameters() if one.grad is not None)
        return out.detach()

    def under_autocast() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(compiled, arguments).float()

    assert "a backward pass may follow a compiled call" in told(with_gradients)
    assert "autocast ends before what a compiled call asks for" in told(under_autocast)
    torch._dynamo.reset()
    monkeypatch.setattr(in_graph, "TRIED", False)
    assert "this torch's compiler was not tried with it" in told(lambda: call(compiled, arguments))


def test_arguments_that_no_graph_can_be_given_are_left_alone_and_told(monkeypatch):
    model, arguments = tiny_transformers.make("Flux")
    plain, compiled = call(model, arguments), whole("Flux", model)
    handle = tome_core.patch(compiled, **STRONG)
    site = model.forward.__self__
    monkeypatch.setattr(site, "family", site.family._replace(reads=("img_ids", "joint_attention_kwargs")))
    assert torch.equal(call(compiled, arguments | {"joint_attention_kwargs": {}}), plain)
    assert "a compiled call cannot be told such arguments" in str(handle.report())


def test_an_exported_model_asks_nobody():
    model, arguments = tiny_transformers.make("PixArt")
    plain = call(model, arguments)
    with tome_core.patch(model, **STRONG) as handle, torch.no_grad():
        made = torch.export.export(model, (), arguments | {"return_dict": False})
        assert "an exported model would need it wherever it runs" in str(handle.report())
    torch.testing.assert_close(made.module()(**arguments, return_dict=False)[0], plain)


@a_quick_way
def test_a_processor_of_somebody_else_and_a_foreign_forward_are_left_and_named(way: Way):
    model, arguments = tiny_transformers.make("Flux")
    kind = type(model.transformer_blocks[0].attn.processor)

    class Mine(kind):
        """The same under another name."""

    attention = model.single_transformer_blocks[1].attn
    attention.forward = lambda *args, **kwargs: 2 * type(attention).forward(attention, *args, **kwargs)
    model.single_transformer_blocks[0].attn.processor = Mine()
    with tome_core.patch(model, **STRONG):
        expected = call(model, arguments)
    compiled = way("Flux", model)
    with tome_core.patch(compiled, **STRONG) as handle:
        assert torch.equal(call(compiled, arguments), expected)
    assert "Mine is no processor that is known" in str(handle.report())
    assert "something else runs in its place" in str(handle.report())


def test_a_processor_that_is_exchanged_later_is_another_graph():
    model, arguments = tiny_transformers.make("PixArt")
    compiled = whole("PixArt", model)
    with tome_core.patch(compiled, **STRONG) as handle:
        merged = call(compiled, arguments)
        model.fuse_qkv_projections()
        torch.testing.assert_close(call(compiled, arguments), merged, rtol=1e-4, atol=1e-5)
        assert not handle.report().as_data().get("skipped")


@a_quick_way
def test_a_copy_of_a_patched_model_merges_nothing_until_it_is_patched_and_answers_for_itself(way: Way):
    wanted = merged_eagerly("Flux", OTHER)[0]
    model, arguments = tiny_transformers.make("Flux")
    plain = call(model, arguments)
    with tome_core.patch(model, **STRONG) as handle:
        copied = copy.deepcopy(model)
        other = way("Flux", copied)
        assert torch.equal(call(other, arguments), plain)
        with tome_core.patch(copied, **OTHER):
            assert torch.equal(call(other, arguments), wanted)
        assert handle.report().as_data()["calls"] == 0
        assert not torch.equal(call(way("Flux", model), arguments), plain)


@pytest.mark.parametrize("by_head", [False, True])
def test_an_attentions_output_lies_as_the_compiler_was_told(by_head: bool):
    """And is nobody else's memory, which a compiler may write over."""
    model, _ = tiny_transformers.make("SD3.5" if by_head else "Wan")
    tome_core.patch(model, **STRONG)
    site = next(one.forward.__self__ for one in model.modules() if hasattr(one, "to_q") and "forward" in vars(one))
    q, k, v = (torch.randn(1, 2, 24, 16) if by_head else torch.randn(1, 24, 2, 16) for _ in range(3))
    operator = in_graph.OPERATORS.made["attend"]
    with torch.no_grad():
        torch.library.opcheck(
            operator, (site.number, site.number, q, k, v, None, by_head, None, False, ""),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


@a_quick_way
def test_each_thread_has_its_own_call(way: Way):
    """Two sizes at once through one compiled model: none takes the other's grid."""
    model, arguments = tiny_transformers.make("Flux")
    small = arguments | {"hidden_states": arguments["hidden_states"][:, :256],
                         "img_ids": tiny_transformers.flux_ids(16, 16)}  # fmt: skip
    with tome_core.patch(model, **STRONG):
        expected = [call(model, one) for one in (arguments, small)]
    compiled = way("Flux", model)
    with tome_core.patch(compiled, **STRONG):
        call(compiled, arguments)  # so that one thread compiles anew while the other's graph runs
        found = at_once(*(lambda one=one: [call(compiled, one) for _ in range(8)] for one in (arguments, small)))
    for pictures, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(one, wanted) for one in pictures)


@a_quick_way
def test_the_first_call_may_be_a_threads(way: Way):
    """As in a server, each of whose requests has a thread: the graph is good for the next call and the next thread."""
    model, arguments = tiny_transformers.make("Flux")
    with tome_core.patch(model, **STRONG):
        expected = call(model, arguments)
    compiled = way("Flux", model)
    with tome_core.patch(compiled, **STRONG):
        for _ in range(2):
            (found,) = at_once(lambda: [call(compiled, arguments) for _ in range(3)])
            assert all(torch.equal(one, expected) for one in found)


def test_what_is_packed_is_unpacked():
    tensor = torch.zeros(1)
    values = [tensor, None, 3, [(1, 2, 3), [tensor], ()], (7,), True]
    form, tensors, numbers = pack(values)
    assert unpack(form, tensors, numbers) == values and len(tensors) == 2
    assert pack([{}]) is None and pack([[0.5]]) is None


def test_ip_adapters_processors_merge_compiled_too():
    model, arguments = tiny_transformers.make("Flux")
    kind = diffusers.models.transformers.transformer_flux.FluxIPAdapterAttnProcessor
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model.transformer_blocks[0].attn.processor = kind(32, 32, num_tokens=(4,), scale=[0.5])
        arguments["joint_attention_kwargs"] = {"ip_hidden_states": [torch.randn(1, 4, 32)]}
    with tome_core.patch(model, **STRONG) as handle:
        expected = call(model, arguments)
        assert torch.equal(call(whole("Flux", model), arguments), expected)
        assert not handle.report().as_data().get("skipped") and handle.report().work_saved > 0.85
