"""Under a compiler models merge as they do without it: whole, by their blocks, in any order, whatever they are; and
matches serve several steps, but never a step of another sampling.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import tome_core
from benchmarks.models import BasicTransformerBlock
from tests import tiny_transformers, transformer_pipelines
from tests.compiling import (
    COMPILED,
    LEAST,
    TIMES,
    TINY,
    Way,
    by_blocks,
    for_inductor,
    in_place,
    where_compilers_were_tried,
    whole,
)  # fmt: skip
from tests.least_unet import KEPT, WAYS, build, call, draw, same
from tests.models import Family
from tests.thoroughness import some_quick
from tests.threads import at_once
from tests.tiny_transformers import STRONG, distance
from tests.traces import traces
from tome_core import MergeConfig, MergePlan, MergeRule

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), where_compilers_were_tried]
OTHER = STRONG | {"ratio": 0.5, "metric": "input", "side": "qkv", "use_rand": True}
IN_TIME = MergeConfig(rules=tuple(MergeRule(**(STRONG | {"ratio": ratio, "min_timestep": time}))
                                  for ratio, time in ((0.75, 600), (0.5, 300))))  # fmt: skip
FLUX = COMPILED["Flux"]


def ways(*pairs: tuple[str, Way], quick: int = 2) -> pytest.MarkDecorator:
    """Families, and how each is compiled."""
    return pytest.mark.parametrize("family, way", [
        pytest.param(COMPILED[name], way, id=f"{name}-{way.__name__}", marks=[pytest.mark.slow] * (place >= quick))
        for place, (name, way) in enumerate(pairs)])  # fmt: skip


def picture(family: Family, model: Any, time: Any = TIMES[0]) -> torch.Tensor:
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
    plain = picture(family, model)  # Z-Image makes its frequencies once, as no compiler can
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
        assert report.merged_anything and set(report.reasons) == {"attn: outside the rules' time range"}
    assert graphs[0] == graphs[-1] <= 2 * unpatched, "time makes no graph anew"
    assert torch.equal(picture(family, compiled), plain) and backend.frame_count == graphs[-1]


@ways(("tiny", whole), ("Flux", by_blocks), ("Flux", in_place))
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


@pytest.mark.parametrize("family, way, backend", [
    (TINY, whole, "aot_eager"), (FLUX, by_blocks, "aot_eager"),
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


def test_blocks_that_checkpoint_themselves_compile_in_pieces_and_merge():
    """torch's checkpoint is one operator to the compiler, into which nothing may be handed on the side."""

    class Block(BasicTransformerBlock):
        def forward(self, x, context=None):
            return checkpoint(self._forward, x, context, use_reentrant=False)

    eager, model = build(1), build(1)
    for unet in (eager, model):
        unet.input_blocks[0][0].transformer_blocks[0].__class__ = Block
    model.compile(backend="aot_eager")
    with tome_core.patch(eager, **STRONG) as wanted, tome_core.patch(model, **STRONG) as handle:
        for seed in (1, 2):
            torch.testing.assert_close(call(model, seed=seed), call(eager, seed=seed))
        assert handle.report() == wanted.report() and handle.report().merged_anything


# --- threads ----------------------------------------------------------------------------------------------------------


@ways(("Flux", whole), ("Flux", by_blocks), quick=1)
def test_each_thread_has_its_own_call(family: Family, way: Way):
    """Two sizes at once through one compiled model: none takes the other's grid."""
    given = tiny_transformers.arguments_of("Flux")
    small = {"hidden_states": given["hidden_states"][:, :256], "img_ids": tiny_transformers.flux_ids(16, 16)}
    compiled, sizes = way(family, model := family.build()), (given, given | small)
    with tome_core.patch(model, **OTHER) as handle:
        with torch.compiler.set_stance("force_eager"):
            expected = [tiny_transformers.call(compiled, size) for size in sizes]
        tiny_transformers.call(compiled, given)  # so that one thread compiles anew while the other's graph runs
        pictures = at_once(*(lambda size=size: [tiny_transformers.call(compiled, size) for _ in range(4)]
                             for size in sizes))  # fmt: skip
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


# --- matches that serve several steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", some_quick([in_place, by_blocks]), ids=lambda way: way.__name__)
def test_what_is_kept_over_steps_is_kept_in_graphs_and_never_for_another_sampling(way):
    backend, plain = CompileCounter(), build()
    model = way(TINY, build(), backend)
    for config in WAYS.values():
        with tome_core.patch(plain, config) as eager, tome_core.patch(model, config) as handle:
            for name in ("a", "b"):
                assert same(draw(model, handle, name=name), draw(plain, eager, name=name))
            # of guidance, whose halves have one match, and of another size
            for name, shape in (("c", {"pictures": 1, "copies": 2}), ("d", {"side": 16})):
                assert same(draw(model, handle, name=name, **shape), draw(plain, eager, name=name, **shape))
            for one in (eager, handle):
                one.set_time(timestep=280.0)
            assert torch.equal(call(model, seed=9), call(plain, seed=9)), "a call without a name"
            assert handle.report() == eager.report()
    assert backend.frame_count <= 4, "two blocks that look alike share a graph, whatever is set"


def _plans() -> int:
    gc.collect()
    return sum(isinstance(one, MergePlan) for one in gc.get_objects())


def test_a_loop_of_ones_own_is_a_sampling_too_of_which_nothing_is_held_when_it_is_done(work):
    with tome_core.patch(model := in_place(TINY, build()), KEPT) as handle:
        before = _plans()
        for _ in range(2):
            with handle.sampling():
                call(model, time=900.0)
                call(model, time=850.0)
                assert _plans() == before + 2
            assert _plans() == before
        assert work == ["match"] * 2 * 2, "for each of two blocks in each of two samplings"


@pytest.mark.parametrize("name", some_quick(["Flux", "Wan 2.2, of two transformers"]))
def test_a_compiled_pipeline_keeps_over_its_steps_what_it_would_keep(name, work):
    found = []
    for is_compiled in (False, True):
        pipe, call = transformer_pipelines.make(name)
        for network in transformer_pipelines.transformers_of(pipe) if is_compiled else ():
            in_place(FLUX, network)
        work.clear()
        with tome_core.patch(pipe, **STRONG, keep=900.0) as handle:
            pictures = [transformer_pipelines.draw(pipe, call) for _ in range(2)]
        assert torch.equal(*pictures), "equal seeds, equal pictures"
        found.append((pictures[0].tolist(), list(work), handle.report()))
    assert found[0] == found[1] and work
