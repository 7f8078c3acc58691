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


def test_a_preview_that_is_added_later_shows_the_sampling_that_is_in_the_cache(comfy):
    first = Graph(steps=1, batch=2)
    applied = first.apply(merge_seed=77)
    first.sample("latent", applied, seed=77)
    told = report_of(comfy.good(first.graph), applied)
    again, preview = previewed({"merge_seed": 77}, seed=77)
    seen = comfy.good(again.graph)
    assert report_of(seen, preview) == told and told.startswith("ToMe: own settings, 1 step, ")
    assert [node for node, _ in seen["texts"]] == [preview[0]], "it was sampled again"


def test_where_nothing_was_sampled_there_is_no_map_and_the_node_says_so(comfy):
    graph = Graph(steps=1, batch=2)
    preview = graph.add("ToMePreview", model=graph.apply(merge_seed=78), latent=graph.latent)
    assert "Change its seed" in report_of(comfy.good(graph.graph), preview)
