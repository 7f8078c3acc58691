"""Small random transformers in a real ComfyUI: merged through the nodes, near the plain picture, and then gone."""

from __future__ import annotations

import pytest

from tests.hosts.comfyui.graphs import Graph, assert_merged_and_off, distance

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
