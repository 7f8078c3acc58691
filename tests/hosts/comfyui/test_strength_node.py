"""Strength in a real ComfyUI, as a prompt without a page names it. Pictures are as small as merging pays on a CPU."""

from __future__ import annotations

import json
import re

import pytest

import tome_core
from comfy_nodes.inputs import SETTINGS
from tests.hosts.comfyui.graphs import Graph, assert_merged_and_off, bytes_of, report_of, reports_of

SIZE = (256, 256)


def settings_of(strength: float, layout: str = "sd") -> dict:
    """What ToMeSettings is set to, to mean the same on models of this layout."""
    return {name: value for name, value in tome_core.form.fill(strength, layout).items() if name in SETTINGS}


def test_a_prompt_needs_nothing_but_the_model(comfy):
    graph = Graph(size=SIZE, steps=2)
    alone = graph.strength()
    named = graph.strength(strength=0.5, start=0.0, end=1.0)
    graph.sample_all({"plain": graph.model, "alone": alone, "named": named})
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "alone") == bytes_of(seen, "named") != bytes_of(seen, "plain")
    assert "strength 0.5" in report_of(seen, alone)


@pytest.mark.parametrize("strength", [0.75, 1.0])  # with an early phase, and without
def test_a_strength_is_its_settings_spelled_out(comfy, strength):
    graph = Graph(size=SIZE, steps=2)
    named = graph.strength(strength=strength)
    graph.sample("spelled out", graph.apply(**settings_of(strength)))
    seen = assert_merged_and_off(comfy, graph, named)
    assert bytes_of(seen, "applied") == bytes_of(seen, "spelled out")
    first, *more = report_of(seen, named).splitlines()
    assert re.match(r"ToMe: strength [0-9.]+, 2 steps, \d+% of attention left out", first)
    assert any("1024 tokens" in one for one in more)
    assert len(more) < 10


def test_on_sdxl_a_strength_is_that_of_its_layout(comfy):
    graph = Graph("sdxl", size=(512, 512), steps=2)
    sdxl, sd = (graph.apply(**settings_of(0.25, layout)) for layout in ("sdxl", "sd"))
    graph.sample_all({"named": graph.strength(strength=0.25), "SDXL's": sdxl, "SD's": sd})
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "named") == bytes_of(seen, "SDXL's") != bytes_of(seen, "SD's")


@pytest.mark.parametrize(("model", "said"), [
    ("sd1", r"latent /1: 4096 tokens -> \d+ keys or \d+ keys,.*\n.*latent /2: 1024 tokens -> \d+ keys,"),
    ("sdxl", r"latent /2: 1024 tokens -> \d+ keys or \d+ keys,"),
])  # fmt: skip
def test_a_strength_merges_early_steps_most_at_the_finest_level(comfy, model, said):
    graph = Graph(model, size=(512, 512), steps=2)  # one step of the early phase and one behind it
    named = graph.strength()
    graph.sample("named", named)
    report = report_of(comfy.good(graph.graph), named)
    assert re.search(said, report), report


def test_kept_matches_do_not_pass_from_one_sampling_to_the_next(comfy):
    """One node before two samplers whose steps are all within `keep`: the second is as if it were alone."""
    steps = {"denoise": 0.1}  # 2 of 20: timesteps 100 and less
    both, alone = Graph(size=SIZE), Graph(size=SIZE)
    applied = both.strength(strength=0.75)
    both.sample("one", applied, seed=5, **steps)
    both.sample("other", applied, seed=6, **steps)
    alone.sample("other", alone.strength(strength=0.75), seed=6, **steps)
    alone.sample("always anew", alone.apply(**{**settings_of(0.75), "keep": 0}), seed=6, **steps)
    first = comfy.good(both.graph)
    comfy.forget()
    second = comfy.good(alone.graph)
    assert bytes_of(first, "other") == bytes_of(second, "other") != bytes_of(second, "always anew")


def test_one_node_may_serve_both_passes_of_a_hires_fix(comfy):
    graph = Graph(size=(248, 248), steps=1)  # of fewer tokens than pay
    applied = graph.apply(**settings_of(0.75) | {"only_if_it_pays": True})
    first = graph.sample("first", applied)
    graph.sample("first plain")
    larger = graph.add("LatentUpscale", samples=first, upscale_method="nearest-exact", width=320, height=320,
                       crop="disabled")  # fmt: skip
    graph.sample("second", applied, latent_image=larger, denoise=0.5)
    graph.sample("second plain", latent_image=larger, denoise=0.5)
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "first") == bytes_of(seen, "first plain")
    assert bytes_of(seen, "second") != bytes_of(seen, "second plain")
    reports = reports_of(seen, applied)
    assert "nothing merged: so few tokens that merging would not pay" in reports[0]
    assert ": 1600 tokens" in reports[1]


@pytest.mark.parametrize(("kind", "values"), [
    ("ApplyToMe", {"strength": 1.5}), ("ApplyToMe", {"start": "soon"}), ("ToMeSettings", {"method": "turbo", "sx": 3}),
    ("ToMeSettings", {"ratio": 1.5, "sx": 3, "early_ratio": 0.5}),
])  # fmt: skip
def test_one_wrong_value_is_one_error_on_one_input_before_anything_runs(comfy, kind, values):
    graph = Graph()
    settings = {} if kind == "ApplyToMe" else {"settings": graph.add("ToMeSettings", **values)}
    graph.sample("never", graph.strength(**(values if kind == "ApplyToMe" else settings)))
    with pytest.raises(AssertionError) as refused:
        comfy.queue(graph.graph)
    errors = [error for node in json.loads(str(refused.value))["node_errors"].values() for error in node["errors"]]
    assert [error["extra_info"]["input_name"] for error in errors] == [next(iter(values))]


def test_inputs_of_another_version_are_named_and_left_out(comfy):
    graph = Graph(steps=1)
    older = graph.strength(preset="fast", of_a_link=graph.latent)
    graph.sample("older", older)
    seen = comfy.good(graph.graph)
    assert "unknown to this version of the node: of_a_link, preset" in report_of(seen, older)
