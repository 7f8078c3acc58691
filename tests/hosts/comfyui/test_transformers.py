"""Small random transformers in a real ComfyUI: merged through the nodes, near the plain picture, and then gone."""

from __future__ import annotations

import pytest

from tests.hosts.comfyui.graphs import Graph, assert_merged_and_off, bytes_of, distance, report_of

SETTINGS = {"merge_what": "k+v", "ratio": 0.9375, "sx": 4, "sy": 4, "metric": "keys+values", "use_rand": False,
            "refine": 1, "only_if_it_pays": False}  # fmt: skip
PICTURE, FILM = "1101 tokens -> 141 keys", "1024 tokens -> 64 keys"
KINDS = {  # what their reports say
    "flux": PICTURE, "sd3": PICTURE, "wan": "2048 tokens -> 128 keys", "qwen_image": PICTURE, "hunyuan_video": PICTURE,
    "ltxv": FILM, "cosmos_predict2": FILM, "z_image": "1024 tokens -> 181 keys", "krea2": PICTURE,
}  # fmt: skip
MOST = 0.06  # of a merged picture's distance from the plain one


@pytest.mark.parametrize("kind", KINDS)
def test_each_merges_near_the_plain_picture_and_is_as_it_was_when_it_is_off_again(comfy, kind):
    graph = Graph(kind, steps=3)
    seen = assert_merged_and_off(comfy, graph, graph.apply(**SETTINGS), KINDS[kind])
    assert distance(seen, "applied", "plain") < MOST


def test_another_nodes_attention_goes_on_being_called(comfy):
    """If it adds masks, it gets merged keys; if it drops them, as SageAttention does, none; if it does more, all."""
    for does in ("add", "drop", "more"):
        graph = Graph("flux", steps=1)
        slot = graph.add("TestSlot", model=graph.model, does=does)
        graph.sample("merged", graph.apply(**SETTINGS))
        graph.sample_all({"alone": slot, "both": graph.apply(slot, **SETTINGS)})
        seen = comfy.good(graph.graph)
        assert any(seen["slot"]) == (does == "add") and seen["slot"], does
        assert (bytes_of(seen, "both") == bytes_of(seen, "alone")) == (does == "more"), does
        assert does == "more" or distance(seen, "both", "merged") < 1e-3, does


def test_a_compiled_transformer_is_plain_and_says_so(comfy):
    graph = Graph("flux")
    merged, before = graph.apply(), graph.apply(graph.add("TestCompile", model=graph.model, backend="eager"))
    after = graph.add("TestCompile", model=merged, backend="eager")
    graph.sample_all({"plain": graph.model, "before": before, "after": after})
    seen = comfy.good(graph.graph)
    assert "stepped aside: the model is compiled" in report_of(seen, merged)
    assert distance(seen, "before", "plain") < 1e-5 and distance(seen, "after", "plain") < 1e-5
