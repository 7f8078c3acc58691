"""The pack in a real ComfyUI: a clone is loaded with all its files, and prompts use its nodes."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.hosts.comfyui.graphs import Graph, report_of
from tests.hosts.comfyui.running import ROOT, WORKFLOWS, serve


def test_a_clone_is_found_with_its_nodes_texts_docs_and_example_workflows(checkout, tmp_path):
    for name in ("custom_nodes", "models", "input", "output", "temp", "user"):
        (tmp_path / name).mkdir()
    pack = "ComfyUI-tome.core"
    place = tmp_path / "custom_nodes" / pack
    shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".*", "__pycache__", "shared", "results"))
    done = subprocess.run([sys.executable, "install.py"], cwd=place, capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""  # ComfyUI-Manager's call after it has cloned
    with serve(checkout, tmp_path) as comfy:
        for node in ("ApplyToMe", "ToMeSettings", "RemoveToMe", "ToMePreview"):
            facts = comfy.ask(f"/object_info/{node}")[node]
            assert facts["python_module"] == f"custom_nodes.{pack}"
            assert facts["description"] and facts["output_tooltips"]
            assert comfy.ask(f"/extensions/{pack}/docs/{node}.md").startswith("# ")
        texts = comfy.ask("/i18n")
        assert all("ApplyToMe" in texts[language]["nodeDefs"] for language in ("en", "zh", "ja"))
        assert sorted(comfy.ask("/workflow_templates")[pack]) == sorted(WORKFLOWS)
        for name in WORKFLOWS:
            assert comfy.ask(f"/api/workflow_templates/{pack}/{name}.json")["nodes"]
            with pytest.raises(UnicodeDecodeError):  # a picture, no text
                comfy.ask(f"/api/workflow_templates/{pack}/{name}.jpg")


@pytest.mark.parametrize(("own", "settings"), [({"start": "soon"}, {}), ({}, {"ratio": 1.5, "sx": 3})])
def test_one_wrong_value_is_one_error_on_one_input_before_anything_runs(comfy, own, settings):
    graph = Graph()
    graph.sample("never", graph.strength(settings=graph.add("ToMeSettings", **settings), **own))
    with pytest.raises(AssertionError) as refused:
        comfy.queue(graph.graph)
    errors = [error for node in json.loads(str(refused.value))["node_errors"].values() for error in node["errors"]]
    assert [error["extra_info"]["input_name"] for error in errors] == [next(iter(own or settings))]


def test_a_preview_has_a_panel_a_level_of_the_latest_sampling_even_if_that_is_in_the_cache(comfy):
    first, again = (Graph(steps=1, batch=2) for _ in range(2))
    for graph in (first, again):
        applied = graph.apply(merge_seed=77, level="up to /2")
        latent = graph.sample("latent", applied, seed=77)
    said = report_of(comfy.good(first.graph), applied)
    preview = again.add("ToMePreview", model=applied, latent=latent)
    again.add("TestKeep", result=preview, name="preview")
    seen = comfy.good(again.graph)
    picture = seen["latents"]["preview"]
    assert picture["shape"] == [2, 128, 256, 3] and picture["bytes"][0] != picture["bytes"][1]
    assert report_of(seen, preview) == said and said.startswith("ToMe: own settings, 1 step, ")
    assert [node for node, _ in seen["texts"]] == [preview[0]], "it was sampled again"
    assert comfy.ask("/api/jobs")["jobs"], "its output is more than ComfyUI can list"
