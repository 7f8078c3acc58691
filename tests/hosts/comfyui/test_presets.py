"""Presets in a real ComfyUI, as a prompt without a page names them. Pictures are as small as merging pays on a CPU."""

from __future__ import annotations

import pytest

from tests.hosts.comfyui.graphs import Graph, bytes_of, report_of

SIZE = (256, 256)


def of_preset(graph: Graph, name: str, **values) -> list:
    """ApplyToMe as a person writes it into an API file; a preset and a ratio are what it has to mention."""
    return graph.add("ApplyToMe", model=graph.model, preset=name, **{"ratio": 0.1, **values})


def presets_of(comfy) -> dict:
    """Preset -> values, as the page gets them."""
    return comfy.ask("/object_info/ApplyToMe")["ApplyToMe"]["input"]["required"]["preset"][1]["presets"]


@pytest.mark.parametrize("name", ["fast", "max"])  # with an early phase, and without
def test_a_presets_name_is_enough_and_means_what_the_nodes_definition_says(comfy, name):
    graph = Graph(size=SIZE, steps=2)
    named = of_preset(graph, name)
    graph.sample("plain")
    graph.sample("named", named)
    graph.sample("spelled out", graph.apply(**presets_of(comfy)[name]))
    graph.sample("removed", graph.add("RemoveToMe", model=named))
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "named") == bytes_of(seen, "spelled out") != bytes_of(seen, "plain")
    assert bytes_of(seen, "removed") == bytes_of(seen, "plain")
    report = report_of(seen, named)
    assert ": 1024 tokens" in report and "6 calls merged" in report and "2 steps" in report


@pytest.mark.parametrize(("model", "said"), [
    ("sd1", ("level 0 (latent /1, ", "4096 tokens -> ", "level 1 (latent /2, ", "1024 tokens -> ")),
    ("sdxl", ("level 0 (latent /2, ", "1024 tokens -> ")),
])  # fmt: skip
def test_where_the_latent_is_halved_a_preset_merges_keys_and_values_and_no_mlp(comfy, model, said):
    graph = Graph(model, size=(512, 512), steps=2)  # one step of the early phase and one behind it
    named = of_preset(graph, "balanced")
    graph.sample("named", named)
    graph.sample("and the MLPs", graph.apply(**{**presets_of(comfy)["balanced"], "deep_mlp": 0.25}))
    seen = comfy.good(graph.graph)
    report = report_of(seen, named)
    assert all(one in report for one in said) and "MLP" not in report, report
    assert bytes_of(seen, "named") != bytes_of(seen, "and the MLPs")


def test_kept_matches_do_not_pass_from_one_sampling_to_the_next(comfy):
    """One node before two samplers whose steps are all within `keep`: the second is as if it were alone."""
    steps = {"denoise": 0.1}  # 2 of 20: timesteps 100 and less
    both, alone = Graph(size=SIZE), Graph(size=SIZE)
    applied = of_preset(both, "fast")
    both.sample("one", applied, seed=5, **steps)
    both.sample("other", applied, seed=6, **steps)
    alone.sample("other", of_preset(alone, "fast"), seed=6, **steps)
    alone.sample("always anew", alone.apply(**{**presets_of(comfy)["fast"], "keep": 0}), seed=6, **steps)
    first = comfy.good(both.graph)
    comfy.forget()
    second = comfy.good(alone.graph)
    assert bytes_of(first, "other") == bytes_of(second, "other") != bytes_of(second, "always anew")


def test_off_is_the_plain_picture(comfy):
    graph = Graph(size=SIZE, steps=1)
    off = of_preset(graph, "off")
    graph.sample("plain")
    graph.sample("off", off)
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "plain") == bytes_of(seen, "off") and "preset is off" in report_of(seen, off)


def test_a_preset_leaves_the_smallest_picture_to_its_own_input(comfy):
    """Hires fix: one node for both passes, merging only in the second."""
    graph = Graph(size=SIZE, steps=1)
    applied = of_preset(graph, "fast", min_pixels=300 * 300)
    first = graph.sample("first", applied)
    graph.sample("first plain")
    larger = graph.add("LatentUpscale", samples=first, upscale_method="nearest-exact", width=320, height=320,
                       crop="disabled")  # fmt: skip
    graph.sample("second", applied, latent_image=larger, denoise=0.5)
    graph.sample("second plain", latent_image=larger, denoise=0.5)
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "first") == bytes_of(seen, "first plain")
    assert bytes_of(seen, "second") != bytes_of(seen, "second plain")
    reports = [text for number, text in seen["texts"] if number == applied[0]]
    assert "the picture is smaller than min_pixels" in reports[0] and ": 1600 tokens" in reports[1]


def test_an_unknown_preset_is_refused_before_anything_runs(comfy):
    graph = Graph()
    graph.sample("never", of_preset(graph, "turbo"))
    with pytest.raises(AssertionError, match="turbo"):
        comfy.queue(graph.graph)
