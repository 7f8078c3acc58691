"""Attention in a real ComfyUI: every function merges right, and compiled models merge as eager ones do."""

import json

from tests.hosts.comfyui.graphs import Graph, bytes_of, report_of
from tests.hosts.comfyui.hold_attentions import FUNCTIONS
from tests.hosts.comfyui.running import run_script
from tome_core.attention.merged import BIAS, OWN_BIAS

ADDING = ("basic", "split", "pytorch")  # for other functions torch's own is better


def test_each_function_gives_what_repeated_keys_give(checkout):
    """Each function is tested in every precision, upcast, chosen by a node, and with cut work if memory is short."""
    ways = json.loads(run_script(checkout, "hold_attentions.py", "--cpu").splitlines()[-1])
    assert len(ways) == len(FUNCTIONS) * 3 * 3 + 2
    for case, way in ways.items():
        assert way == (BIAS if case.split()[0] in ADDING else OWN_BIAS), case


def test_a_compiled_unet_merges_in_any_order_and_branches_beside_it_are_as_ever(comfy):
    graph = Graph()

    def compiled(model: list) -> list:
        return graph.add("TestCompile", model=model)

    applied, more, before = graph.apply(), graph.apply(ratio=0.75), graph.apply(compiled(graph.model))
    graph.sample_all({"plain": graph.model, "applied": applied, "more": graph.apply(ratio=0.75)})
    graph.sample_all({"compiled": compiled(graph.model), "after": compiled(applied), "before": before,
                      "compiled more": compiled(more), "applied again": graph.apply()})  # fmt: skip
    seen = comfy.good(graph.graph)
    plain, *merged = (bytes_of(seen, name) for name in ("plain", "applied", "more"))
    assert plain not in merged and merged[0] != merged[1]
    assert bytes_of(seen, "compiled") == plain and bytes_of(seen, "compiled more") == merged[1]
    assert all(bytes_of(seen, name) == merged[0] for name in ("after", "before", "applied again"))
    assert "256 tokens in 128 groups" in report_of(seen, before) and "256 tokens in 64 groups" in report_of(seen, more)
