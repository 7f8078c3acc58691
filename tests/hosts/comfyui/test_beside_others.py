"""Beside ComfyUI's own nodes that people combine it with, in a real ComfyUI: it merges, or it says why not."""

from __future__ import annotations

import pytest

from tests.hosts.comfyui.graphs import Graph, bytes_of, report_of

SKIPS = {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 0.9, "verbose": False}  # all that they may
FEWER = "queries and keys are not of the same tokens"
ELSE = "another program runs in its place"
OTHERS = {  # a node -> its inputs, the model, and what the report says in both orders
    "HyperTile": ({"tile_size": 64, "swap_size": 1, "max_depth": 0, "scale_depth": False}, "sd1", FEWER),
    "PatchModelAddDownscale": (
        {"block_number": 1, "downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 1.0,
         "downscale_after_skip": True, "downscale_method": "bicubic", "upscale_method": "bicubic"}, "sd1",
        "tokens -> "),
    "TomePatchModel": ({"ratio": 0.5}, "sd1", FEWER),
    "PerturbedAttentionGuidance": ({"scale": 3.0}, "sd1", ELSE),
    "EasyCache": (SKIPS, "flux", "1101 tokens -> "),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_before_or_after_makes_no_difference(comfy, kind):
    inputs, model, said = OTHERS[kind]
    graph, settings = Graph(model, steps=5 if inputs is SKIPS else 1), {"level": "up to /2"}  # some take the finest one
    alone = graph.add(kind, model=graph.model, **inputs)
    before, inner = graph.apply(alone, **settings), graph.apply(**settings)
    after = graph.add(kind, model=inner, **inputs)
    graph.sample_all({"plain": graph.model, "other alone": alone, "before": before, "after": after,
                      "removed": graph.removed(after)})  # fmt: skip
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "plain") != bytes_of(seen, "other alone") == bytes_of(seen, "removed")
    assert bytes_of(seen, "before") == bytes_of(seen, "after") != bytes_of(seen, "other alone")
    assert said in report_of(seen, before) and said in report_of(seen, inner)


@pytest.mark.parametrize("skipper", ["EasyCache", "LazyCache"])
def test_the_report_counts_the_calls_that_were_computed_and_is_in_the_history(comfy, skipper):
    graph = Graph(steps=6)
    applied = graph.apply()
    computed = graph.probe(graph.add(skipper, model=applied, **SKIPS))  # inside of the skipper
    preview = graph.add("ToMePreview", model=computed, latent=graph.sample("both", computed))
    seen = comfy.good(graph.graph)
    calls, shown = len(seen["calls"]), seen["history"]["outputs"][preview[0]]
    said = f"ToMe: own settings, 6 steps, {calls} of them computed, "
    assert report_of(seen, applied).startswith(said) and said in shown["text"][0]
    finest = shown["tome_report"][0]["levels"][0]
    merged = sum(kind["calls"] for kind in finest["merged"])
    assert 0 < calls < graph.steps and merged == calls * finest["blocks"]
