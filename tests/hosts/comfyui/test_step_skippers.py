"""EasyCache and LazyCache beside merging in a real ComfyUI: what they skip is not counted, and outlives no match."""

from __future__ import annotations

from typing import Any

import pytest

import tome_core
from tests.hosts.comfyui.graphs import Graph, bytes_of, report_of

SKIPPERS = ("EasyCache", "LazyCache")
SKIPS = {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 0.9, "verbose": False}  # all that they may


@pytest.mark.parametrize("skipper", SKIPPERS)
def test_the_report_counts_the_calls_that_were_computed_and_is_in_the_history(comfy, skipper):
    graph = Graph(steps=6)
    applied = graph.apply()
    skipping = graph.add(skipper, model=applied, **SKIPS)
    computed = graph.probe(skipping, "computed")  # inside of the skipper
    preview = graph.add("ToMePreview", model=computed, latent=graph.sample("both", computed))
    comfy.ask("/tome_test/clear")
    history = comfy.wait(comfy.queue(graph.graph))
    seen = comfy.state()
    calls = len(seen["calls"])
    (text,), (data,) = (history["outputs"][preview[0]][name] for name in ("text", "tome_report"))
    said = f"ToMe: own settings, 6 steps, {calls} of them computed, "
    assert report_of(seen, applied).startswith(said) and said in text
    finest = data["levels"][0]
    merged = sum(kind["calls"] for kind in finest["merged"])
    assert 0 < calls < graph.steps and merged == calls * finest["blocks"]


@pytest.mark.parametrize("skipper", SKIPPERS)
def test_a_kept_match_counts_time_and_not_the_calls_that_were_left(comfy, skipper):
    """Kept for 110 timesteps a match serves three neighbours, kept for 60 two; behind skipped steps neither serves."""
    steps = {"denoise": 0.3}  # 6 of 20, 50 timesteps apart
    graph = Graph(size=(256, 256), steps=6)

    def sampled(name: str, keep: float, **more: Any) -> None:
        model = graph.apply(**{**tome_core.form.fill(0.5), "keep": keep})
        graph.sample(name, graph.add(skipper, model=model, **SKIPS) if more else model, **steps)

    for keep in (60.0, 110.0):
        sampled(f"{keep:.0f}", keep)
        sampled(f"{keep:.0f}, skipping", keep, skipping=True)
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "60") != bytes_of(seen, "110")
    assert bytes_of(seen, "60, skipping") == bytes_of(seen, "110, skipping") != bytes_of(seen, "60")
