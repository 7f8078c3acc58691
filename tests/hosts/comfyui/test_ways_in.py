"""Two ways in, each in a real ComfyUI: the nodes load, and texts, docs and example workflows are found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.comfyui.running import ROOT, serve
from tests.hosts.comfyui.workflows import WORKFLOWS


def clone(base: Path) -> str:
    place = base / "custom_nodes" / "ComfyUI-tome.core"
    shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".*", "__pycache__", "shared", "results"))
    done = subprocess.run([sys.executable, "install.py"], cwd=place, capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""  # ComfyUI-Manager's call after it has cloned
    return place.name


def link(base: Path) -> str:
    subprocess.run([sys.executable, str(ROOT / "install.py"), "comfyui", str(base)], check=True, capture_output=True)
    return "tome_core"


@pytest.mark.parametrize("way", [clone, link], ids=lambda way: way.__name__)
def test_everything_is_found(checkout, tmp_path, way):
    for name in ("custom_nodes", "models", "input", "output", "temp", "user"):
        (tmp_path / name).mkdir()
    pack = way(tmp_path)
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
