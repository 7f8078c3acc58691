"""The nodes' texts, made from the nodes: `python -m tests.project.nodedefs` writes `locales/en/nodeDefs.json` and a
help page's table; to translations, written by hand, it adds missing texts in English, and removes old ones."""

import json
from pathlib import Path
from typing import Any

from comfy_nodes import NODE_CLASS_MAPPINGS

LOCALES = Path(__file__).resolve().parents[2] / "locales"
PATH = LOCALES / "en" / "nodeDefs.json"
HELP_PAGE = LOCALES.parent / "comfy_nodes" / "web" / "docs" / "ToMeSettings.md"
_HEAD = "| input | what it does |\n|---|---|\n"


def inputs_of(node: Any) -> dict[str, tuple]:
    types = node.INPUT_TYPES()
    return {**types["required"], **types.get("optional", {})}


def english() -> dict[str, Any]:
    """The content of nodeDefs.json in English: names, descriptions and tooltips of every node."""
    texts = {}
    for key, node in NODE_CLASS_MAPPINGS.items():
        inputs = {name: {"name": facts.get("display_name", name), "tooltip": facts["tooltip"]}
                  for name, (_, facts) in inputs_of(node).items()}  # fmt: skip
        names = getattr(node, "RETURN_NAMES", node.RETURN_TYPES)
        outputs = {str(number): {"name": name, "tooltip": tooltip}
                   for number, (name, tooltip) in enumerate(zip(names, node.OUTPUT_TOOLTIPS, strict=True))}  # fmt: skip
        texts[key] = {"display_name": node.DISPLAY_NAME, "description": node.DESCRIPTION, "inputs": inputs,
                      "outputs": outputs}  # fmt: skip
    return texts


def complete(translated: Any, wanted: Any) -> Any:
    """The translation with exactly the wanted texts, in their order; a missing text is in English."""
    if not isinstance(wanted, dict):
        return translated
    return {key: complete(translated.get(key, entry), entry) for key, entry in wanted.items()}


def help_page(page: str) -> str:
    """ToMeSettings' help page with its table made again: a row for every input, the advanced ones in light type."""
    before, rest = page.split(_HEAD)
    rows = ["| {0}{1[display_name]}{0} | {1[tooltip]} |\n".format("" if facts.get("advanced") else "**", facts)
            for _, facts in inputs_of(NODE_CLASS_MAPPINGS["ToMeSettings"]).values()]  # fmt: skip
    _, _, after = rest.partition("\n\n")
    return f"{before}{_HEAD}{''.join(rows)}\n{after}"


def text(texts: dict[str, Any]) -> str:
    return json.dumps(texts, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for path in LOCALES.glob("*/nodeDefs.json"):
        translated = json.loads(path.read_text(encoding="utf-8")) if path != PATH else english()
        path.write_text(text(complete(translated, english())), encoding="utf-8")
    HELP_PAGE.write_text(help_page(HELP_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
