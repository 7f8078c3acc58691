"""Branches of one graph in a real ComfyUI: each merges as its own nodes say, and no other does."""

from __future__ import annotations

import re
import time

from tests.hosts.comfyui.graphs import Graph, assert_merged_and_off, bytes_of, numbers_of, report_of


def test_removed_and_plain_are_the_same_bytes_and_applied_is_not(comfy):
    graph = Graph()
    said = "ToMe: own settings, 2 steps, ", "256 tokens -> 128, 75% left out"
    assert_merged_and_off(comfy, graph, graph.apply(), *said)


def test_a_plain_graph_gives_the_same_bytes_as_the_plain_branch(comfy):
    mixed = Graph()
    mixed.sample("applied", mixed.apply(merge_seed=5))
    mixed.sample("plain", seed=7)
    alone = Graph()
    alone.sample("plain", seed=7)
    first = comfy.good(mixed.graph)
    comfy.forget()
    second = comfy.good(alone.graph)
    assert bytes_of(first, "plain") == bytes_of(second, "plain")


def test_two_ratios_from_one_checkpoint_do_not_disturb_each_other(comfy):
    both = Graph()
    quarter, half = both.apply(ratio=0.25), both.apply(ratio=0.5)
    both.sample_all({"quarter": quarter, "half": half, "quarter again": both.apply(ratio=0.25)})
    seen = comfy.good(both.graph)
    assert "256 tokens -> 192" in report_of(seen, quarter) and "256 tokens -> 128" in report_of(seen, half)
    assert bytes_of(seen, "quarter") == bytes_of(seen, "quarter again") != bytes_of(seen, "half")


def test_a_second_apply_replaces_the_first(comfy):
    graph = Graph()
    twice = graph.apply(graph.apply(ratio=0.75), ratio=0.25)
    graph.sample_all({"once": graph.apply(ratio=0.25), "twice": twice})
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "once") == bytes_of(seen, "twice")
    assert "256 tokens -> 192" in report_of(seen, twice)


def test_the_percent_range_counts_steps_as_comfyui_does(comfy):
    graph = Graph(steps=4)
    second_half = graph.apply(start=0.5)
    graph.sample("second half", graph.probe(second_half, "late"))
    graph.sample_all({"never": graph.apply(start=1.0), "plain": graph.model}, seed=3)
    seen = comfy.good(graph.graph)
    report = report_of(seen, second_half)
    assert "not merged, 6 calls: outside the rules' time range" in report
    assert [call[1] < 500 for call in seen["calls"]] == [False, False, True, True]
    assert bytes_of(seen, "never") == bytes_of(seen, "plain")


def test_the_hosts_random_numbers_are_left_alone(comfy):
    graph = Graph()
    graph.sample("applied", graph.probe(graph.apply(), "merging"), sampler_name="euler_ancestral")
    assert [call[4] for call in comfy.good(graph.graph)["calls"]] == [False, False]


def test_image_0_does_not_depend_on_the_batch(comfy):
    one, two = Graph(batch=1), Graph(batch=2)
    for graph in (one, two):
        graph.sample_all({"plain": graph.model, "applied": graph.apply()}, seed=21)
    first, second = comfy.good(one.graph), comfy.good(two.graph)
    for name in ("plain", "applied"):
        ours, theirs = numbers_of(first, name), numbers_of(second, name)
        largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(map(abs, ours))
        print(f"{name}: batch of 1 against batch of 2, largest difference {largest:.1e} of the largest value")
        assert largest < 1e-4


def test_an_exception_in_mid_step_leaves_nothing_and_nothing_was_patched(comfy):
    graph = Graph(steps=4)
    graph.sample("fails", graph.probe(graph.apply(), "bomb", fail_at=2))
    seen = comfy.run(graph.graph)
    assert seen["status"] == "error" and "the test wanted this" in seen["errors"][0]["exception_message"]
    assert [call[2] for call in seen["calls"]] == [0, 0] and seen["patched"] == 0
    before, after = Graph(), Graph()
    for plain in (before, after):
        plain.sample("plain", seed=31)
    first = comfy.good(before.graph)
    comfy.forget()
    assert bytes_of(first, "plain") == bytes_of(comfy.good(after.graph), "plain")


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
