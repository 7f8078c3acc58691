"""Small random models in a real ComfyUI: the nodes merge them, and without the nodes they are as before."""

import pytest

from tests.hosts.comfyui.graphs import Graph, bytes_of, distance, report_of
from tests.hosts.comfyui.running import Comfy

SETTINGS = {"merge_what": "k+v", "ratio": 0.9375, "sx": 4, "sy": 4, "metric": "keys+values", "use_rand": False,
            "refine": 1, "keep": 1000.0, "only_if_it_pays": False}  # fmt: skip
MODELS = {  # settings, the report's words, and the largest distance of a merged picture from the plain one
    "sd1": ({}, "256 tokens in 128 groups", 1.0),
    "sdxl": ({}, "64 tokens in 32 groups", 1.0),
    **dict.fromkeys(("flux", "sd3", "qwen_image"), (SETTINGS, "1,101 tokens in 141 groups", 0.06)),
    "wan": (SETTINGS, "2,048 tokens in 128 groups", 0.06), "z_image": (SETTINGS, "1,024 tokens in 181 groups", 0.06),
}  # fmt: skip
# what the report says of whole blocks at strength 0.5
BLOCKS = {"flux": "whole blocks on 589 of 1,101 tokens", "sd3": "whole blocks on 512 of 1,024 tokens",
          "qwen_image": "whole blocks on 512 of 1,024 tokens", "wan": "whole blocks on 1,024 of 2,048 tokens",
          "z_image": "whole blocks on 644 of 1,184 tokens"}  # fmt: skip


def assert_merged_and_off(comfy: Comfy, kind: str) -> None:
    graph, (settings, said, most) = Graph(kind), MODELS[kind]
    applied = graph.apply(**settings)
    graph.sample_all({"plain": graph.model, "applied": applied, "removed": graph.removed(applied)})
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "plain") == bytes_of(seen, "removed")
    assert 0 < distance(seen, "applied", "plain") < most and said in report_of(seen, applied)


@pytest.mark.parametrize("kind", MODELS)
def test_each_model_merges_near_the_plain_picture_and_is_off_again(comfy, kind):
    assert_merged_and_off(comfy, kind)


def test_whole_blocks_of_sdxl_merge_and_are_off_again(comfy):
    graph = Graph("sdxl")
    applied = graph.strength(settings=graph.add("TestBlocks"))
    graph.sample_all({"plain": graph.model, "applied": applied, "removed": graph.removed(applied)})
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "plain") == bytes_of(seen, "removed")
    assert 0 < distance(seen, "applied", "plain") < 1.0
    assert "latent /4: 16 tokens in 5 groups; whole blocks on 5 of 16 tokens, " in report_of(seen, applied)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if MODELS[kind][0]])
def test_whole_blocks_of_transformers_merge_in_noisy_steps_and_are_off_again(comfy, kind):
    graph = Graph(kind)
    if kind == "z_image":
        graph.latent = graph.add("TestLatent", shape="16,72,60")  # more tokens, which are no multiple of 32
    applied = graph.strength(strength=0.5)
    graph.sample_all({"plain": graph.model, "applied": applied, "removed": graph.removed(applied)})
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "plain") == bytes_of(seen, "removed")
    assert 0 < distance(seen, "applied", "plain") < 0.5 and BLOCKS[kind] in report_of(seen, applied)


def test_the_percent_range_counts_steps_as_comfyui_does(comfy):
    graph = Graph(steps=4)
    second_half = graph.apply(start=0.5)
    graph.sample_all({"second half": second_half, "never": graph.apply(start=1.0), "plain": graph.model}, seed=3)
    seen = comfy.good(graph.graph)
    assert "not merged, 6 calls: these steps stay whole, by start and end" in report_of(seen, second_half)
    assert bytes_of(seen, "never") == bytes_of(seen, "plain")


def test_after_an_exception_in_mid_step_nothing_is_left(comfy):
    graph = Graph(steps=4)
    applied = graph.apply()
    graph.sample("fails", graph.add("TestFail", model=applied))
    seen = comfy.run(graph.graph)
    (error,) = [facts for kind, facts in seen["history"]["status"]["messages"] if kind == "execution_error"]
    assert "the test wanted this" in error["exception_message"]
    assert report_of(seen, applied).startswith("ToMe: own settings, 1 of 4 steps, ")
    assert_merged_and_off(comfy, "sd1")


def test_a_cancel_inside_a_merged_block_ends_the_prompt_and_leaves_nothing(comfy):
    """Before ComfyUI 0.20 the interrupt was an `Exception`."""
    graph = Graph("sdxl")
    applied = graph.strength(settings=graph.add("TestBlocks"))
    graph.sample("cancelled", graph.add("TestCancel", model=applied, tokens=5))
    seen = comfy.run(graph.graph)
    assert "execution_interrupted" in [kind for kind, _ in seen["history"]["status"]["messages"]]
    assert "cancelled" not in seen["latents"]
    test_whole_blocks_of_sdxl_merge_and_are_off_again(comfy)
