"""ToMePreview in a real ComfyUI."""

from __future__ import annotations

from tests.hosts.comfyui.graphs import Graph, report_of


def previewed(applied_values: dict, **changes: int) -> tuple[Graph, list]:
    """A graph whose preview keeps its picture, and the preview; changes: of the sampler."""
    graph = Graph(steps=1, batch=2)
    applied = graph.apply(**applied_values)
    preview = graph.add("ToMePreview", model=applied, latent=graph.sample("latent", applied, **changes))
    graph.add("TestKeepImage", image=preview, name="preview")
    return graph, preview


def test_a_panel_a_level_for_every_image(comfy):
    graph, _ = previewed({"level": "up to /2"})
    picture = comfy.good(graph.graph)["latents"]["preview"]
    assert picture["shape"] == [2, 128, 256, 3] and picture["bytes"][0] != picture["bytes"][1]


def test_a_cached_sampler_left_no_map_and_the_node_says_so(comfy):
    first = Graph(steps=1, batch=2)
    first.sample("latent", first.apply(merge_seed=77), seed=77)
    comfy.good(first.graph)
    again, preview = previewed({"merge_seed": 77}, seed=77)
    seen = comfy.good(again.graph)
    assert "No merge map" in report_of(seen, preview) and seen["latents"]["preview"]["shape"] == [2, 128, 128, 3]
    fresh, preview = previewed({"merge_seed": 77}, seed=78)
    assert report_of(comfy.good(fresh.graph), preview).startswith("ToMe: 1 step, ")
