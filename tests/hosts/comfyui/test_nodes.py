"""The nodes in a real ComfyUI, as prompts without a page name them. Pictures are as small as merging pays on a CPU."""

from __future__ import annotations

import json

import pytest

from tests.hosts.comfyui.graphs import Graph, report_of


@pytest.mark.parametrize(("own", "settings"), [({"start": "soon"}, {}), ({}, {"ratio": 1.5, "sx": 3})])
def test_one_wrong_value_is_one_error_on_one_input_before_anything_runs(comfy, own, settings):
    graph = Graph()
    graph.sample("never", graph.strength(settings=graph.add("ToMeSettings", **settings), **own))
    with pytest.raises(AssertionError) as refused:
        comfy.queue(graph.graph)
    errors = [error for node in json.loads(str(refused.value))["node_errors"].values() for error in node["errors"]]
    assert [error["extra_info"]["input_name"] for error in errors] == [next(iter(own or settings))]


def test_inputs_of_another_version_are_named_and_left_out(comfy):
    graph = Graph(steps=1)
    older = graph.strength(preset="fast", of_a_link=graph.latent)
    graph.sample("older", older)
    assert "this version of the node does not know: of_a_link, preset" in report_of(comfy.good(graph.graph), older)


def test_a_preview_has_a_panel_a_level_of_the_latest_sampling_even_if_that_is_in_the_cache(comfy):
    first, again = (Graph(steps=1, batch=2) for _ in range(2))
    for graph in (first, again):
        applied = graph.apply(merge_seed=77, level="up to /2")
        latent = graph.sample("latent", applied, seed=77)
    said = report_of(comfy.good(first.graph), applied)
    preview = again.add("ToMePreview", model=applied, latent=latent)
    again.add("TestKeep", result=preview, name="preview")
    seen = comfy.good(again.graph)
    picture = seen["latents"]["preview"]
    assert picture["shape"] == [2, 128, 256, 3] and picture["bytes"][0] != picture["bytes"][1]
    assert report_of(seen, preview) == said and said.startswith("ToMe: own settings, 1 step, ")
    assert [node for node, _ in seen["texts"]] == [preview[0]], "it was sampled again"
    assert comfy.ask("/api/jobs")["jobs"], "its output is more than ComfyUI can list"
