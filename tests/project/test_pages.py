"""The pages agree with the project: links, the map of the rooms, messages that are quoted, examples in docstrings."""

from __future__ import annotations

import ast
import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "demo", "comfy_nodes")
PAGES = [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SENTENCES = (text for text in re.findall(r"`([^`\n]*)`", TROUBLESHOOTING) if len(text.split()) >= 5)
QUOTED = {*re.findall(r"^\| `([^`]+)` \|", TROUBLESHOOTING, re.M), *(text for text in SENTENCES if "->" not in text)}
# modules that decide that a call, or a part of a call, is left alone, and say why
REASONS = (
    *(f"tome_core/{name}.py" for name in (
        "reporting/ledger", "engine/decision", "engine/state", "engine/time", "measuring/pays",
        "attention/by_hand", "models/asked", "models/compiled", "models/sites", "models/transformer",
        "models/unet")),
    "comfy_nodes/transformers.py", "comfy_nodes/unets.py", "extension/host.py",
)  # fmt: skip
WITH_EXAMPLES = [path for path in sorted((ROOT / "tome_core").rglob("*.py")) if ">>>" in path.read_text("utf-8")]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """The names by which links on GitHub find the page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere_and_the_readme_leads_to_every_page_of_docs():
    for page in PAGES:
        links = {text or source for text, source in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose(page))}
        for link in (link for link in links if not re.match(r"[a-z]+:", link)):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists() and target.is_relative_to(ROOT), f"{page} links to {link}, which is not there"
            assert not anchor or anchor in anchors(target), f"{page} links to {link}, and there is no such heading"
        if page == ROOT / "README.md":
            assert links >= {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")}


def test_the_map_names_every_room_and_files_that_exist():
    before, after = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## The map")
    rooms = {path.parent.name for path in (ROOT / "tome_core").glob("*/__init__.py")}
    assert set(re.findall(r"`(\w+)/`", after.split("|---|---|")[1].split("\n\n")[0])) == rooms
    named = re.findall(r"`((?:tests|scripts|locales)/?[\w/]*(?:\.py|\.txt)?)`", before + after.replace("/ROOM", ""))
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_of_a_docstring_give_what_they_say(path):
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    result = doctest.testmod(import_module(name))
    assert result.attempted and not result.failed


def said_by(path: Path, errors: bool = True) -> set[str]:
    """The strings of a module, without docstrings. errors: with the sentences that it raises."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    if not errors:
        left_out |= {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Raise) for inner in ast.walk(node)}
    return {node.value for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out}  # fmt: skip


def test_the_page_on_troubles_quotes_what_the_code_says_and_explains_every_reason_for_a_call_left_alone():
    said = [text for folder in ("tome_core", "extension", "comfy_nodes") for path in (ROOT / folder).rglob("*.py")
            for text in said_by(path)]  # fmt: skip
    assert not [quoted for quoted in QUOTED if not any(quoted in text for text in said)], "nothing says these any more"
    for name in REASONS:
        reasons = {text.strip() for text in said_by(ROOT / name, errors=False)
                   if len(text.split()) >= 4 and not re.search("->|%s", text)}  # fmt: skip
        missing = {reason for reason in reasons if not any(quoted.strip() in reason for quoted in QUOTED)}
        assert reasons and not missing, f"{name}: explain these in docs/troubleshooting.md: {missing}"
