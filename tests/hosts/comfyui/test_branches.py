"""Branches of one graph in a real ComfyUI: each merges as its own nodes say, and no other does."""

from __future__ import annotations

import re
import time

import pytest

from tests.hosts.comfyui.graphs import Graph, assert_merged_and_off, bytes_of, report_of


@pytest.mark.parametrize(("model", "text"), [("sd1", "256 tokens -> 128, 75% left out"), ("sdxl", "64 tokens -> 32")])
def test_each_unet_merges_at_its_finest_level_and_is_as_it_was_when_it_is_off_again(comfy, model, text):
    graph = Graph(model, steps=1)
    assert_merged_and_off(comfy, graph, graph.apply(), text)


def test_each_branch_of_a_checkpoint_merges_by_the_last_node_on_it(comfy):
    graph = Graph()
    quarter, half = graph.apply(ratio=0.25), graph.apply(ratio=0.5)
    twice = graph.apply(graph.apply(ratio=0.75), ratio=0.25)
    graph.sample_all({"quarter": quarter, "half": half, "again": graph.apply(ratio=0.25), "twice": twice})
    seen = comfy.good(graph.graph)
    assert "256 tokens -> 192" in report_of(seen, twice) and "256 tokens -> 128" in report_of(seen, half)
    assert bytes_of(seen, "quarter") == bytes_of(seen, "again") == bytes_of(seen, "twice") != bytes_of(seen, "half")


def test_the_percent_range_counts_steps_as_comfyui_does_and_random_numbers_are_left_alone(comfy):
    graph = Graph(steps=4)
    second_half = graph.apply(start=0.5)
    graph.sample("second half", graph.probe(second_half, "late"), sampler_name="euler_ancestral")
    graph.sample_all({"never": graph.apply(start=1.0), "plain": graph.model}, seed=3)
    seen = comfy.good(graph.graph)
    assert "not merged, 6 calls: outside the rules' time range" in report_of(seen, second_half)
    assert [time < 500 for _, time, *_ in seen["calls"]] == [False, False, True, True]
    assert not any(moved for *_, moved in seen["calls"])
    assert bytes_of(seen, "never") == bytes_of(seen, "plain")


def test_after_an_exception_in_mid_step_models_are_dropped_and_loaded_again_as_ever(comfy):
    graph = Graph(steps=4)
    graph.sample("fails", graph.probe(graph.apply(), "bomb", fail_at=2))
    seen = comfy.run(graph.graph)
    (error,) = [facts for kind, facts in seen["history"]["status"]["messages"] if kind == "execution_error"]
    assert "the test wanted this" in error["exception_message"]
    assert [patched for _, _, patched, *_ in seen["calls"]] == [0, 0] and seen["patched"] == 0
    drawn = []
    for _ in range(2):
        graph = Graph()
        graph.sample_all({"plain": graph.model, "applied": graph.apply()}, seed=31)
        seen = comfy.good(graph.graph)
        drawn.append([bytes_of(seen, name) for name in ("plain", "applied")])
        comfy.forget()
    assert drawn[0] == drawn[1]


def test_an_interrupt_in_mid_sampling_leaves_nothing_patched(comfy):
    graph = Graph(steps=30)
    graph.sample("interrupted", graph.probe(graph.apply(), "slow", sleep=0.3))
    comfy.ask("/tome_test/clear")
    prompt = comfy.queue(graph.graph)
    while len(comfy.state()["calls"]) < 2:
        time.sleep(0.2)
    comfy.ask("/interrupt", {})
    history = comfy.wait(prompt)
    seen = comfy.state()
    assert any(message[0] == "execution_interrupted" for message in history["status"]["messages"])
    assert re.search(r"ToMe: [a-z0-9. ]+, \d+ of 30 steps, ", seen["texts"][-1][1])
    assert 2 <= len(seen["calls"]) < 30 and seen["patched"] == 0
