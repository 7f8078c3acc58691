"""Families of models, sizes and batches in a real ComfyUI."""

from __future__ import annotations

import pytest

from tests.hosts.comfyui.graphs import Graph, assert_merged_and_off, bytes_of, report_of


@pytest.mark.parametrize(("model", "text"), [("sd1", "256 tokens -> 128"), ("sd2", "256 tokens -> 128"),
                                             ("sdxl", "64 tokens -> 32")])  # fmt: skip
def test_each_family_merges_at_its_finest_level(comfy, model, text):
    graph = Graph(model, steps=1)
    assert_merged_and_off(comfy, graph, graph.apply(), text)


def test_a_level_that_sdxl_does_not_have_is_said(comfy):
    graph = Graph("sdxl", steps=1)
    applied = graph.apply(level="up to /1")
    graph.sample_all({"plain": graph.model, "applied": applied})
    seen = comfy.good(graph.graph)
    assert "nothing will merge: no rule reaches a level of this model" in report_of(seen, applied)
    assert bytes_of(seen, "plain") == bytes_of(seen, "applied")


def test_inpainting_merges(comfy):
    graph = Graph("sd1_inpainting", steps=1)
    latent = graph.add("TestEncode", image=graph.grey_image())
    assert_merged_and_off(comfy, graph, graph.apply(), "256 tokens -> 128", latent_image=latent)


@pytest.mark.parametrize("size", [(136, 88), (16, 256), (72, 72)])
@pytest.mark.parametrize("batch", [1, 3])
def test_odd_sizes_and_batches_merge_or_step_aside(comfy, size, batch):
    graph = Graph(size=size, batch=batch, steps=1)
    applied = graph.apply(level="up to /8")
    graph.sample("applied", applied)
    seen = comfy.good(graph.graph)
    assert seen["latents"]["applied"]["shape"] == [batch, 4, size[1] // 8, size[0] // 8]
    print(report_of(seen, applied))


def test_offloaded_and_loaded_again_it_merges_as_before(comfy):
    first, second = Graph(), Graph()
    for graph in (first, second):
        graph.sample("applied", graph.apply(), seed=11)
    before = comfy.good(first.graph)
    comfy.forget()
    after = comfy.good(second.graph)
    assert bytes_of(before, "applied") == bytes_of(after, "applied")
