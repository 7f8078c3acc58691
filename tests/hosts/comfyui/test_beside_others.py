"""Beside the nodes that people combine it with, in a real ComfyUI: it merges or steps aside and says so."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.hosts.comfyui.graphs import Graph, assert_merged_and_off, bytes_of, report_of

MERGED = "256 tokens -> 128"
FEWER = "queries and keys are not of the same tokens"
ELSE = "something else runs in its place"
SKIPS = {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 0.9, "verbose": False}  # all that they may
GUIDED = {"level": "up to /2"}  # so that the middle block merges, which guidance stands in for


class Other(NamedTuple):
    """said: of the report in both orders; settings: of merging."""

    inputs: dict[str, Any]
    said: tuple[str, ...] = (MERGED,)
    model: str = "sd1"
    steps: int = 1
    settings: dict[str, Any] = {}  # noqa: RUF012 (never changed)


OTHERS = {
    "HyperTile": Other({"tile_size": 64, "swap_size": 1, "max_depth": 0, "scale_depth": False}, (FEWER,)),
    "PatchModelAddDownscale": Other(
        {"block_number": 1, "downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 1.0,
         "downscale_after_skip": True, "downscale_method": "bicubic", "upscale_method": "bicubic"}, ("tokens -> ",)),
    "TomePatchModel": Other({"ratio": 0.5}, (FEWER,)),
    "FreeU_V2": Other({"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2}, model="sd1_growing"),
    "PerturbedAttentionGuidance": Other({"scale": 3.0}, (MERGED, ELSE), settings=GUIDED),
    "SelfAttentionGuidance": Other({"scale": 0.5, "blur_sigma": 2.0}, (MERGED, ELSE), settings=GUIDED),
    "EasyCache": Other(SKIPS, ("1101 tokens -> ",), "flux", 5),
    "LazyCache": Other(SKIPS, ("64 tokens -> 32",), "sdxl", 5),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "other"), OTHERS.items(), ids=OTHERS)
def test_before_or_after_makes_no_difference(comfy, kind, other):
    graph = Graph(other.model, steps=other.steps)
    alone = graph.add(kind, model=graph.model, **other.inputs)
    before, inner = graph.apply(alone, **other.settings), graph.apply(**other.settings)
    after = graph.add(kind, model=inner, **other.inputs)
    graph.sample_all({"plain": graph.model, "other alone": alone, "before": before, "after": after,
                      "removed": graph.removed(after), "plain again": graph.removed(graph.apply())})  # fmt: skip
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "plain") == bytes_of(seen, "plain again") != bytes_of(seen, "other alone")
    assert bytes_of(seen, "other alone") == bytes_of(seen, "removed")
    assert bytes_of(seen, "before") == bytes_of(seen, "after")
    for said in other.said:
        assert said in report_of(seen, before) and said in report_of(seen, inner)
    if any(" -> " in said for said in other.said):
        assert bytes_of(seen, "other alone") != bytes_of(seen, "before")


def test_area_prompts_merge_each_crop_on_its_own(comfy):
    graph = Graph(size=(256, 192), steps=1)
    area = graph.add("ConditioningSetArea", conditioning=graph.positive, width=96, height=64, x=32, y=64, strength=1.0)
    both = graph.add("ConditioningCombine", conditioning_1=graph.negative, conditioning_2=area)
    applied = graph.apply()
    graph.sample("applied", applied, positive=both)
    assert "768 tokens -> 384; 96 tokens -> 48" in report_of(comfy.good(graph.graph), applied)


@pytest.mark.parametrize("kind", ["TestControl", "TestGligen"])
def test_what_comes_with_a_prompt_and_merging_both_take_effect(comfy, kind):
    graph = Graph(steps=1)
    more = {"image": graph.add("TestPicture", width=128, height=128)} if kind == "TestControl" else {}
    controlled, applied = graph.add(kind, conditioning=graph.positive, **more), graph.apply()
    graph.sample("merged", applied)
    seen = assert_merged_and_off(comfy, graph, applied, MERGED, positive=controlled)
    assert bytes_of(seen, "merged")[0] not in (bytes_of(seen, "plain")[0], bytes_of(seen, "applied")[0])


@pytest.mark.parametrize("skipper", ["EasyCache", "LazyCache"])
def test_the_report_counts_the_calls_that_were_computed_and_is_in_the_history(comfy, skipper):
    graph = Graph(steps=6)
    applied = graph.apply()
    computed = graph.probe(graph.add(skipper, model=applied, **SKIPS), "computed")  # inside of the skipper
    preview = graph.add("ToMePreview", model=computed, latent=graph.sample("both", computed))
    seen = comfy.good(graph.graph)
    calls, shown = len(seen["calls"]), seen["history"]["outputs"][preview[0]]
    said = f"ToMe: own settings, 6 steps, {calls} of them computed, "
    assert report_of(seen, applied).startswith(said) and said in shown["text"][0]
    finest = shown["tome_report"][0]["levels"][0]
    merged = sum(kind["calls"] for kind in finest["merged"])
    assert 0 < calls < graph.steps and merged == calls * finest["blocks"]
