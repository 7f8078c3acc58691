"""The quick tests of what was changed: ``python -m tests.changed`` since the last commit, or ``... FILE...``.

A file of the engine has those of its room, another one those that carry its name, else those of its folder; what tests
share has those that import it. `python install.py test` runs what lies farther away.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import install

ROOT = Path(__file__).parents[1]
HOUSE = "tests/project/test_house.py"


def find_tests(name: str) -> set[str]:
    """Files and folders for pytest, for a file by its path from the root; empty where none is known."""
    path = Path(name)
    if path.name.startswith("test_"):
        return {name} if (ROOT / name).is_file() else set()
    if path.suffix == ".md":
        return {"tests/project/test_readme.py", "tests/project/test_contributing.py"}
    if path.parts[0] == "tests":
        return _importing(path.with_suffix("").as_posix().replace("/", "."))
    if path.parts[0] == "tome_core":
        room = Path(path.parts[1]).stem if len(path.parts) > 1 else ""
        return {f"tests/engine/{room}" if (ROOT / "tests" / "engine" / room).is_dir() else "tests/engine", HOUSE}
    folder = ROOT / "tests" / path.parts[0]
    own = folder.is_dir()
    named = list((folder if own else ROOT / "tests" / "project").glob(f"test_*{path.stem}*.py"))
    return {found.relative_to(ROOT).as_posix() for found in named or [folder] * own} | {HOUSE}


def _importing(module: str) -> set[str]:
    """Tests that import one of tests' own modules, whichever way they write it."""
    parent, name = module.rsplit(".", 1)
    ways = re.compile(rf"^from {re.escape(module)} import|^from {re.escape(parent)} import .*\b{name}\b", re.M)
    tests = (ROOT / "tests").rglob("test_*.py")
    return {test.relative_to(ROOT).as_posix() for test in tests if ways.search(test.read_text(encoding="utf-8"))}


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
