"""ToMePreview in a real ComfyUI."""

from __future__ import annotations

from tests.hosts.comfyui.graphs import Graph, report_of


def previewing(applied_values: dict, with_preview: bool = True, seed: int | None = None) -> tuple[Graph, list]:
    graph = Graph(steps=1, batch=2)
    applied = graph.apply(**applied_values)
    latent = graph.sample("latent", applied, **({} if seed is None else {"seed": seed}))
    if with_preview:
        image = graph.add("ToMePreview", model=applied, latent=latent)
        graph.add("TestKeepImage", image=image, name="preview")
        return graph, image
    return graph, []


def test_a_panel_a_level_for_every_image(comfy):
    graph, _ = previewing({"level": "up to /2"})
    picture = comfy.good(graph.graph)["latents"]["preview"]
    assert picture["shape"] == [2, 128, 256, 3] and picture["bytes"][0] != picture["bytes"][1]


def test_a_cached_sampler_left_no_map_and_the_node_says_so(comfy):
    graph, _ = previewing({"merge_seed": 77}, with_preview=False, seed=77)
    comfy.good(graph.graph)
    again, preview = previewing({"merge_seed": 77}, seed=77)
    seen = comfy.good(again.graph)
    assert "No merge map" in report_of(seen, preview) and seen["latents"]["preview"]["shape"] == [2, 128, 128, 3]
    fresh, preview = previewing({"merge_seed": 77}, seed=78)
    seen = comfy.good(fresh.graph)
    assert report_of(seen, preview).startswith("ToMe: 1 step, ")
