"""Our example workflows, and how they are made small enough for a CPU."""

from __future__ import annotations

import copy
import json
from typing import Any

from tests.hosts.comfyui.running import ROOT

WORKFLOWS = ("txt2img", "sdxl", "hires_fix", "easycache")
SEED, STEPS = 0, 2  # places among the widgets of KSampler
TITLE = 30  # pixels, above a node's box


def workflow(name: str) -> dict:
    """As it lies in example_workflows/."""
    return json.loads((ROOT / "example_workflows" / f"{name}.json").read_text(encoding="utf-8"))


def made_small(flow: dict, steps: int, size: int, seed: int) -> dict:
    """Fewer steps, and pictures of `size` pixels a side; what else is measured in pixels follows suit."""
    flow = copy.deepcopy(flow)
    scale = size / next(node["widgets_values"][0] for node in flow["nodes"] if node["type"] == "EmptyLatentImage")
    for node in flow["nodes"]:
        values = node.get("widgets_values")
        if node["type"] == "KSampler":
            values[SEED], values[STEPS] = seed, steps
        elif node["type"] == "EmptyLatentImage":
            values[:2] = [size, size]
        elif node["type"] == "LatentUpscale":
            values[1:3] = [round(side * scale / 8) * 8 for side in values[1:3]]
    return flow


def overlapping(nodes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Types of nodes of which one covers a part of the other; a node's "box" is left, top, width, height."""

    def meet(one: list[float], other: list[float]) -> bool:
        (x, y, width, height), (left, top, wide, high) = one, other
        return x < left + wide and left < x + width and y - TITLE < top + high and top - TITLE < y + height

    return [(one["type"], other["type"]) for number, one in enumerate(nodes) for other in nodes[:number]
            if meet(one["box"], other["box"])]  # fmt: skip
