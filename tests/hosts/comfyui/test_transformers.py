"""Small random transformers in a real ComfyUI: merged through the nodes, near the plain picture, and then gone."""

from __future__ import annotations

import pytest

from tests.hosts.comfyui.graphs import Graph, assert_merged_and_off, bytes_of, distance, report_of

SETTINGS = {"merge_what": "k+v", "ratio": 0.9375, "sx": 4, "sy": 4, "metric": "keys+values", "use_rand": False,
            "refine": 1, "only_if_it_pays": False}  # fmt: skip
PICTURE, FILM = "1101 tokens -> 141 keys", "1024 tokens -> 64 keys"
KINDS = {  # what their reports say, and how far from the plain picture they may be
    "flux": (PICTURE, 0.04), "sd3": (PICTURE, 0.042), "wan": ("2048 tokens -> 128 keys", 0.0125),
    "flux2": ("1536 tokens -> 576 keys", 0.06), "chroma": (PICTURE, 0.06), "qwen_image": (PICTURE, 0.06),
    "hunyuan_video": (PICTURE, 0.06), "ltxv": (FILM, 0.06), "cosmos_predict2": (FILM, 0.06), "lumina2": (PICTURE, 0.06),
    "z_image": ("1024 tokens -> 181 keys", 0.06), "krea2": (PICTURE, 0.06),
}  # fmt: skip
BLOCKS = {"flux": 4, "wan": 3}
LEFT_OUT = "of attention left out"


@pytest.mark.parametrize("kind", KINDS)
def test_each_merges_near_the_plain_picture_and_is_as_it_was_when_it_is_off_again(comfy, kind):
    graph, (said, most) = Graph(kind, steps=3), KINDS[kind]
    seen = assert_merged_and_off(comfy, graph, graph.apply(**SETTINGS), said)
    assert distance(seen, "applied", "plain") < most


def test_a_transformer_whose_tokens_lie_nobody_knows_where_says_so_and_is_left_alone(comfy):
    graph = Graph("hidream")
    applied = graph.apply(**SETTINGS)
    graph.sample_all({"plain": graph.model, "applied": applied})
    seen = comfy.good(graph.graph)
    assert "117 tokens beside the picture's, and nobody knows where" in report_of(seen, applied)
    assert bytes_of(seen, "plain") == bytes_of(seen, "applied")


def test_another_nodes_attention_goes_on_being_called(comfy):
    """One that adds masks gets merged keys, one that drops them none, as SageAttention's; one that does more, all."""
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


# --- weights that are not where the model runs: swapped out, in part, or in eight bits --------------------------------


@pytest.mark.parametrize(("kind", "dtype", "node", "values"), [
    ("flux", "float8_e4m3fn", "TestSwap", {"of": "blocks"}), ("wan", "default", "TestSwap", {"of": "blocks"}),
    ("sd3", "default", "TestInPart", {"share": 0.9}), ("sd1", "default", "TestSwap", {"of": "layers"}),
])  # fmt: skip
def test_beside_a_swapper_merges_what_merges_without_it_in_both_orders(comfy, kind, dtype, node, values):
    """In part with a LoRA, which is then added where a weight is used, and is in no weight."""
    graph = Graph(kind, (256, 256), dtype=dtype)
    if node == "TestInPart":
        graph.model = graph.add("TestLora", model=graph.model)
    swapped, merged = graph.add(node, model=graph.model, **values), graph.strength()
    orders = {"swapper first": graph.strength(swapped), "merging first": graph.add(node, model=merged, **values)}
    removed = {f"{name}, removed": graph.removed(model) for name, model in orders.items()}
    graph.sample_all({"plain": graph.model, "swapped": swapped, "merged": merged, **orders, **removed})
    seen = comfy.good(graph.graph)
    plain, both = bytes_of(seen, "plain"), bytes_of(seen, "merged")
    assert plain != both and all(bytes_of(seen, name) == both for name in orders)
    assert all(bytes_of(seen, name) == plain for name in ("swapped", *removed))
    assert LEFT_OUT in report_of(seen, merged) and LEFT_OUT in report_of(seen, orders["swapper first"])
    assert len(seen["swaps"]) == 5
    if node == "TestInPart":
        assert all(freed > 0.5 and waiting for freed, waiting in seen["swaps"]), seen["swaps"]
    elif kind in BLOCKS:
        parts = BLOCKS[kind]
        assert all(swap == [parts, parts * graph.steps, parts] for swap in seen["swaps"]), seen["swaps"]
