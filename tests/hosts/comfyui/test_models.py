"""Small random models in a real ComfyUI: merged through the nodes, and as they were when it is off again."""

from __future__ import annotations

import pytest

from tests.hosts.comfyui.graphs import Graph, assert_merged_and_off, bytes_of, distance, report_of

SETTINGS = {"merge_what": "k+v", "ratio": 0.9375, "sx": 4, "sy": 4, "metric": "keys+values", "use_rand": False,
            "refine": 1, "only_if_it_pays": False}  # fmt: skip
PICTURE, FILM = "1101 tokens -> 141 keys", "1024 tokens -> 64 keys"
TRANSFORMERS = {  # what their reports say
    "flux": PICTURE, "sd3": PICTURE, "wan": "2048 tokens -> 128 keys", "qwen_image": PICTURE, "hunyuan_video": PICTURE,
    "ltxv": FILM, "cosmos_predict2": FILM, "z_image": "1024 tokens -> 181 keys", "krea2": PICTURE,
}  # fmt: skip
MOST = 0.06  # of a merged picture's distance from the plain one


@pytest.mark.parametrize(("model", "text"), [("sd1", "256 tokens -> 128, 75% left out"), ("sdxl", "64 tokens -> 32")])
def test_each_unet_merges_at_its_finest_level(comfy, model, text):
    graph = Graph(model, steps=1)
    assert_merged_and_off(comfy, graph, graph.apply(), text)


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_each_transformer_merges_near_the_plain_picture(comfy, kind):
    graph = Graph(kind, steps=3)
    seen = assert_merged_and_off(comfy, graph, graph.apply(**SETTINGS), TRANSFORMERS[kind])
    assert distance(seen, "applied", "plain") < MOST


def test_the_percent_range_counts_steps_as_comfyui_does_and_random_numbers_are_left_alone(comfy):
    graph = Graph(steps=4)
    second_half = graph.apply(start=0.5)
    graph.sample("second half", graph.probe(second_half), sampler_name="euler_ancestral")
    graph.sample_all({"never": graph.apply(start=1.0), "plain": graph.model}, seed=3)
    seen = comfy.good(graph.graph)
    assert "not merged, 6 calls: outside the rules' time range" in report_of(seen, second_half)
    assert [time < 500 for time, _ in seen["calls"]] == [False, False, True, True]
    assert not any(has_drawn for _, has_drawn in seen["calls"])
    assert bytes_of(seen, "never") == bytes_of(seen, "plain")


def test_after_an_exception_in_mid_step_models_are_dropped_and_loaded_again_as_ever(comfy):
    graph = Graph(steps=4)
    applied = graph.apply()
    graph.sample("fails", graph.probe(applied, fail_at=2))
    seen = comfy.run(graph.graph)
    (error,) = [facts for kind, facts in seen["history"]["status"]["messages"] if kind == "execution_error"]
    assert "the test wanted this" in error["exception_message"]
    assert len(seen["calls"]) == 2 and report_of(seen, applied).startswith("ToMe: own settings, 1 of 4 steps, ")
    drawn = []
    for _ in range(2):
        graph = Graph()
        graph.sample_all({"plain": graph.model, "applied": graph.apply()}, seed=31)
        seen = comfy.good(graph.graph)
        drawn.append([bytes_of(seen, name) for name in ("plain", "applied")])
        comfy.forget()
    assert drawn[0] == drawn[1]
