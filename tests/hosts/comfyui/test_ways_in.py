"""A clone in a real ComfyUI: the nodes load, and texts, docs and example workflows are found."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.hosts.comfyui.running import ROOT, serve
from tests.hosts.comfyui.workflows import WORKFLOWS


def test_everything_is_found(checkout, tmp_path):
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
