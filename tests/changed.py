"""The quick tests of what was changed: ``python -m tests.changed`` since the last commit, or ``... FILE...``.

A file of the engine has those of its room, another one those whose names have its own in whole words, else those of
its folder; what tests share has the nearest of those that lead to it; `BESIDE` has what no name shows. `python
install.py test` runs what lies farther away.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import install

ROOT = Path(__file__).parents[1]
HOUSE = "tests/project/test_house.py"
# pattern of a path, in which * goes through folders -> files in tests/, without `test_` and `.py`
BESIDE = {
    "*.md": ("project/contributing", "project/links", "project/readme", "project/troubleshooting"),
    "[Rd]*.md": ("benchmarks/doc_tables",),
    "CHANGELOG.md": ("project/release",),
    "LICENSE": ("project/release",),
    "MANIFEST.in": ("project/release",),
    "pyproject.toml": ("project/release", "project/install", "comfy_nodes/pack"),
    ".[cg]*ignore": ("project/release",),
    ".ci/*": ("project/readme",),
    ".github/*": ("project/github",),
    "docs/methods.md": ("project/smallest_form",),
    "scripts/*": ("extension/shim",),
    "extension/ui.py": ("extension/infotext", "extension/strength_by_layout"),  # test_ui.py has slow ones alone
    "__init__.py": ("comfy_nodes/pack",),
    "locales/*": ("comfy_nodes/pack",),
    "example_workflows/*": ("comfy_nodes/pack",),
    "comfy_nodes/web/*": ("comfy_nodes/pack",),
    "benchmarks/results/*": ("benchmarks/doc_tables",),
    "tome_core/*": ("project/docstrings", "project/troubleshooting"),
    "tome_core/settings/*": ("benchmarks/doc_tables",),
    "tome_core/models/*": ("beside/beside",),
}


def find_tests(name: str) -> set[str]:
    """Files and folders for pytest, for a file by its path from the root; a file of tests that is gone has none."""
    path = Path(name)
    if path.name.startswith("test_"):
        return {name} if (ROOT / name).is_file() else set()
    beside = {f"tests/{folder}/test_{stem}.py" for pattern, tests in BESIDE.items() if fnmatch(name, pattern)
              for folder, _, stem in (one.partition("/") for one in tests)}  # fmt: skip
    if path.parts[0] == "tests":
        return beside | _of_shared(name)
    if path.parts[0] == "tome_core" and len(path.parts) > 2:
        return {f"tests/engine/{path.parts[1]}", HOUSE} | beside
    folder = ROOT / "tests" / path.parts[0]
    own = folder.is_dir()
    named = [found for found in (folder if own else ROOT / "tests" / "project").glob("test_*.py")
             if f"_{path.stem}_" in f"{found.stem}_"]  # fmt: skip
    named = {_name(found) for found in named or ([folder] if own and not beside else [])}
    return named | beside | {HOUSE}


def _of_shared(name: str) -> set[str]:
    """Tests that lead to one of tests' own files: the nearest of them, or those of its host."""
    seen, new = set(), {name}
    while new:
        tests = {one for one in new if Path(one).name.startswith("test_")}
        if tests:
            return tests
        seen |= new
        new = {user for one in new for user in _users()[one]} - seen
    parts = Path(name).parts
    return {"/".join(parts[:3])} if parts[1] == "hosts" else set()


@cache
def _users() -> dict[str, set[str]]:
    """File of tests -> those that import it, else name it; of a conftest, those that ask for its fixtures."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.*")
             if path.suffix in (".py", ".txt")}  # fmt: skip
    words = {path: {word.strip(".") for word in re.findall(r"[\w.-]+", text)} for path, text in texts.items()}
    found = defaultdict(set)
    for user, text in texts.items():
        for one in _imported(text) if user.suffix == ".py" else ():
            found[one].add(_name(user))
    for path, text in texts.items():
        if _name(path) in found:
            continue
        module = _name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        called, below = {path.name, module} - {"__init__.py"}, ROOT
        if path.name == "conftest.py":
            called, below = set(re.findall(r"@pytest\.fixture.*\ndef (\w+)", text)), path.parent
        elif path.suffix == ".txt" and path.parent.name != "tests":
            called = {path.parent.name}
        found[_name(path)] = {_name(user) for user in texts if below in user.parents and called & words[user]}
    return found


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(text: str) -> set[tuple[int, str]]:
    """Level and full name of all that a file imports, (1, "a.b") where it says ``from .a import b``."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            above = f"{node.module}." if getattr(node, "module", None) else ""
            found |= {(getattr(node, "level", 0), above + alias.name) for alias in node.names}
    return found


def _imported(text: str) -> set[str]:
    """Files of tests that a file of tests imports, at its head or in a function."""
    places = [Path(*name.split(".")) for _, name in imports(text) if name.startswith("tests.")]
    files = {f"{place.as_posix()}{end}" for name in places for place in (name, name.parent)
             for end in (".py", "/__init__.py")}  # fmt: skip
    return {file for file in files if (ROOT / file).is_file()}


def changed() -> list[str]:
    """Files that differ from the last commit, and new ones."""
    commands = (["git", "diff", "--name-only", "HEAD"], ["git", "ls-files", "--others", "--exclude-standard"])
    return [name for command in commands
            for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
            if name]  # fmt: skip


def main() -> int:
    """Run them; gives pytest's exit code."""
    wanted = sorted(set().union(*map(find_tests, sys.argv[1:] or changed())))
    if not wanted:
        print("Nothing has changed that has tests.")
        return 0
    command = ["-m", "pytest", *install.tests_to_run([]), *wanted]
    print("python", *command, flush=True)
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
