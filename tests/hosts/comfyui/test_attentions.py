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


@pytest.mark.parametrize(("backend", "attention"), [
    ("eager", "pytorch"),
    pytest.param("inductor", "quad", marks=pytest.mark.skipif(not HAS_COMPILER, reason="inductor needs a compiler")),
])  # fmt: skip
def test_a_compiled_unet_merges_in_any_order_and_branches_beside_it_are_as_ever(
    checkout, base, tmp_path, backend, attention
):
    graph = Graph()

    def compiled(model: list) -> list:
        return graph.add("TestCompile", model=model, backend=backend)

    applied, more, before = graph.apply(), graph.apply(ratio=0.75), graph.apply(compiled(graph.model))
    same = {  # each beside the one without a compiler that it ought to be
        "compiled": "plain", "after": "applied", "before": "applied", "compiled more": "more",
        "applied again": "applied",
    }  # fmt: skip
    graph.sample_all({"plain": graph.model, "applied": applied, "more": graph.apply(ratio=0.75)})
    graph.sample_all({"compiled": compiled(graph.model), "after": compiled(applied), "before": before,
                      "compiled more": compiled(more), "applied again": graph.apply()})  # fmt: skip
    make_base(checkout, tmp_path, base / "models")
    with serve(checkout, tmp_path, attention) as comfy:
        seen = comfy.good(graph.graph)
    assert len({str(bytes_of(seen, name)) for name in ("plain", "applied", "more")}) == 3
    assert "256 tokens -> 128" in report_of(seen, before) and "256 tokens -> 64" in report_of(seen, more)
    least = 0 if backend == "eager" else 1e-3 * distance(seen, "applied", "plain")
    assert all(distance(seen, *pair) <= least for pair in same.items())
