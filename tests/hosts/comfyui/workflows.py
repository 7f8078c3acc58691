"""Our example workflows."""

from __future__ import annotations

import json
from pathlib import Path

WORKFLOWS = ("txt2img", "sdxl", "hires_fix", "easycache")


def workflow(name: str) -> dict:
    """As it lies in example_workflows/."""
    folder = Path(__file__).parents[3] / "example_workflows"
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
