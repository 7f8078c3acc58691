"""Beside ComfyUI's own nodes that people combine it with, in a real ComfyUI: it merges, or it says why not."""

from __future__ import annotations

import pytest

from tests.hosts.comfyui.graphs import Graph, bytes_of, report_of

FEWER = "queries and keys are not of the same tokens"
OTHERS = {  # a node -> its inputs, and what the report says in both orders
    "HyperTile": ({"tile_size": 64, "swap_size": 1, "max_depth": 0, "scale_depth": False}, FEWER),
    "PatchModelAddDownscale": (
        {"block_number": 1, "downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 1.0,
         "downscale_after_skip": True, "downscale_method": "bicubic", "upscale_method": "bicubic"}, "tokens -> "),
    "TomePatchModel": ({"ratio": 0.5}, FEWER),
    "PerturbedAttentionGuidance": ({"scale": 3.0}, "another program runs in its place"),
    # leaves out all steps that it may
    "EasyCache": ({"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 0.9, "verbose": False},
                  "of them computed, "),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_before_or_after_makes_no_difference(comfy, kind):
    inputs, said = OTHERS[kind]
    # some of them take the finest level alone; EasyCache needs steps to leave out
    graph, settings = Graph("flux", steps=5) if kind == "EasyCache" else Graph(steps=1), {"level": "up to /2"}
    alone = graph.add(kind, model=graph.model, **inputs)
    before, inner = graph.apply(alone, **settings), graph.apply(**settings)
    after = graph.add(kind, model=inner, **inputs)
    graph.sample_all({"plain": graph.model, "other alone": alone, "before": before, "after": after,
                      "removed": graph.removed(after)})  # fmt: skip
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "plain") != bytes_of(seen, "other alone") == bytes_of(seen, "removed")
    assert bytes_of(seen, "before") == bytes_of(seen, "after") != bytes_of(seen, "other alone")
    assert said in report_of(seen, before) and said in report_of(seen, inner)
