"""Branches of one graph in a real ComfyUI: each merges as its own nodes say, and no other does."""

from __future__ import annotations

import pytest

from tests.hosts.comfyui.graphs import Graph, assert_merged_and_off, bytes_of, report_of


@pytest.mark.parametrize(("model", "text"), [("sd1", "256 tokens -> 128, 75% left out"), ("sdxl", "64 tokens -> 32")])
def test_each_unet_merges_at_its_finest_level_and_is_as_it_was_when_it_is_off_again(comfy, model, text):
    graph = Graph(model, steps=1)
    assert_merged_and_off(comfy, graph, graph.apply(), text)


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
