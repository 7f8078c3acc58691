"""The page on troubleshooting quotes what the code says, and has a row for every reason that a call gives."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# the first column, and sentences that stand in backticks with more than a name in them
QUOTED = sorted(set(re.findall(r"^\| `([^`]+)` \|", PAGE, re.M)) | {
    text for text in re.findall(r"`([^`\n]*)`", PAGE) if len(text.split()) >= 5 and "->" not in text})  # fmt: skip
CODE = ("tome_core", "extension", "comfy_nodes")
# where it is decided that a call, or a part of one, is left alone
REASONS = (
    *(f"tome_core/{name}.py" for name in (
        "reporting/ledger", "engine/decision", "engine/state", "engine/time", "measuring/pays",
        "attention/by_hand", "models/asked", "models/compiled", "models/sites", "models/transformer",
        "models/unet")),
    "comfy_nodes/transformers.py", "comfy_nodes/unets.py", "extension/host.py",
)  # fmt: skip


def texts(path: Path, errors: bool = True) -> list[str]:
    """What a module can say: its strings, without docstrings. errors: with those of what it raises."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    if not errors:
        docs |= {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Raise) for inner in ast.walk(node)}
    return [node.value for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs]  # fmt: skip


SAID = [text for folder in CODE for path in sorted((ROOT / folder).rglob("*.py")) for text in texts(path)]


def test_what_is_quoted_is_said():
    assert not [quoted for quoted in QUOTED if not any(quoted in text for text in SAID)], "nothing says these any more"


def test_every_reason_has_its_row():
    for name in REASONS:
        found = texts(ROOT / name, errors=False)
        reasons = {text.strip() for text in found if len(text.split()) >= 4 and not re.search("->|%s", text)}
        assert reasons, f"{name} gives no reason any more"
        missing = {reason for reason in reasons if not any(one.strip() in reason for one in QUOTED)}
        assert not missing, f"{name}: explain these in docs/troubleshooting.md"
