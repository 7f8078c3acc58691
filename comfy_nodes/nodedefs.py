"""The English texts of the nodes as ComfyUI's locales want them, made from the nodes themselves.

`python -m comfy_nodes.nodedefs` writes `locales/en/nodeDefs.json`; the translations beside it are written by hand,
and a test holds that they have the same entries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import NODE_CLASS_MAPPINGS

PATH = Path(__file__).resolve().parents[1] / "locales" / "en" / "nodeDefs.json"


def english() -> dict[str, Any]:
    """What belongs into nodeDefs.json: names, descriptions and tooltips of every node."""
    return {name: _described(node) for name, node in NODE_CLASS_MAPPINGS.items()}


def _described(node: Any) -> dict[str, Any]:
    types = node.INPUT_TYPES()
    inputs = {**types["required"], **types.get("optional", {})}
    names = getattr(node, "RETURN_NAMES", node.RETURN_TYPES)
    return {
        "display_name": node.DISPLAY_NAME,
        "description": node.DESCRIPTION,
        "inputs": {
            name: {"name": facts.get("display_name", name), "tooltip": facts["tooltip"]}
            for name, (_, facts) in inputs.items()
        },
        "outputs": {
            str(number): {"name": name, "tooltip": tooltip}
            for number, (name, tooltip) in enumerate(zip(names, node.OUTPUT_TOOLTIPS, strict=True))
        },
    }


def text() -> str:
    """The file's content."""
    return json.dumps(english(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(text(), encoding="utf-8")
