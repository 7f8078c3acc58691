"""In a real ComfyUI, whichever function attends, and compiled: what merges is what merges in eager code."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.hosts.comfyui.graphs import Graph, bytes_of, distance, report_of
from tests.hosts.comfyui.running import make_base, run_script, serve
from tome_core.attention.merged import BIAS, OWN_BIAS

ADDING = ("basic", "split", "pytorch")  # to others torch's own function is better
HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")


def test_each_function_gives_what_repeated_keys_give(checkout):
    """In every precision, raised, chosen by a node, and cutting its work if memory is short."""
    ways = json.loads(run_script(checkout, "hold_attentions.py", "--cpu").splitlines()[-1])
    for case, way in ways.items():
        assert way == (BIAS if case.split()[0] in ADDING else OWN_BIAS), case
    assert len(ways) > 40
    assert {"split short of memory", "sub_quad short of memory", "pytorch behind a node"} <= set(ways)


def compiled_in_any_order(comfy, backend: str) -> tuple[dict, dict[str, str]]:
    """What was seen; and which branch without a compiler each other one ought to be."""
    graph = Graph()

    def compiled(model: list) -> list:
        return graph.add("TestCompile", model=model, backend=backend)

    applied, before = graph.apply(), graph.apply(compiled(graph.model))
    after, more, eager_more = compiled(applied), graph.apply(ratio=0.75), graph.apply(ratio=0.75)
    graph.sample_all({"plain": graph.model, "applied": applied, "more": eager_more})
    branches = {
        "compiled": (compiled(graph.model), "plain"), "after": (after, "applied"), "before": (before, "applied"),
        "compiled more": (compiled(more), "more"), "compiled again": (compiled(graph.model), "plain"),
        "applied again": (graph.apply(), "applied"),
    }  # fmt: skip
    graph.sample_all({name: model for name, (model, _) in branches.items()})
    seen = comfy.good(graph.graph)
    assert len({str(bytes_of(seen, name)) for name in ("plain", "applied", "more")}) == 3
    assert "256 tokens -> 128" in report_of(seen, before) and "256 tokens -> 64" in report_of(seen, more)
    return seen, {name: same for name, (_, same) in branches.items()}


def test_a_compiled_unet_merges_in_any_order_and_branches_beside_it_are_as_ever(comfy):
    seen, ought = compiled_in_any_order(comfy, "eager")
    assert all(bytes_of(seen, name) == bytes_of(seen, same) for name, same in ought.items())


@pytest.mark.skipif(not HAS_COMPILER, reason="inductor needs a compiler")
def test_so_it_does_by_a_function_without_a_bias_and_with_inductor(checkout, base, tmp_path):
    make_base(checkout, tmp_path, base / "models")
    with serve(checkout, tmp_path, "quad") as comfy:
        seen, ought = compiled_in_any_order(comfy, "inductor")
    assert all(distance(seen, name, same) < 1e-3 * distance(seen, "applied", "plain") for name, same in ought.items())
