"""What merging gains, measured in a real ComfyUI because Apply ToMe is asked to."""

from __future__ import annotations

import json

from tests.hosts.comfyui.graphs import Graph, bytes_of, report_of


def test_it_is_measured_once_after_a_sampling_and_the_report_and_a_file_have_it(comfy, base):
    found = []
    for seed in (1, 2):
        graph = Graph(size=(256, 256), steps=2)
        applied = graph.strength(measure=True)
        latent = graph.sample("applied", applied, seed=seed)
        preview = graph.add("ToMePreview", model=applied, latent=latent)
        seen = comfy.good(graph.graph)
        report = report_of(seen, applied)
        print(report)
        found.append((report, comfy.wait(comfy.queue(graph.graph))["outputs"][preview[0]]["tome_report"][0]["gains"]))
    assert "measured: 256x256: " in found[0][0] and "measured: 256x256: " not in found[1][0]
    lines = (base / "user" / "tome_core_gains.json").read_text().splitlines()
    (kept,) = (one for one in map(json.loads, filter(None, lines)) if isinstance(one, dict))
    assert "attention" in kept["attention"] and kept["height"] == 32
    assert all(gains[0]["merged"] == kept["merged"] for _, gains in found)
    assert "faster (measured here)" in found[1][0] or "nothing merged: measured: " in found[1][0]


def test_a_measurement_changes_no_picture_of_a_branch_beside_it(comfy):
    pictures = []
    for measure in (False, True):
        graph = Graph(size=(256, 192), steps=2)
        graph.sample("applied", graph.strength(measure=measure), seed=11 + measure)
        graph.sample("plain", seed=5)
        pictures.append(bytes_of(comfy.good(graph.graph), "plain"))
        comfy.forget()
    assert pictures[0] == pictures[1]
