"""CONTRIBUTING.md: its map has every room, and its files exist; its commands run in test_readme.py."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"


def test_the_map_names_every_room_and_nothing_else():
    text = PAGE.read_text(encoding="utf-8").split("## The map")[1]
    rooms = {path.name for path in (ROOT / "tome_core").iterdir() if (path / "__init__.py").is_file()}
    assert set(re.findall(r"`(\w+)/`", text.split("|---|---|")[1].split("\n\n")[0])) == rooms
    assert all((ROOT / folder).is_dir() for folder in re.findall(r"`((?:tests|scripts|locales)/?\w*)`", text))


def test_the_files_it_names_exist():
    text = PAGE.read_text(encoding="utf-8").split("## The map")[0]
    assert all((ROOT / name).exists() for name in re.findall(r"`(tests/[\w/]+(?:\.py|\.txt)?)`", text))


def test_every_folder_of_tests_mirrors_a_room_or_is_named():
    text = PAGE.read_text(encoding="utf-8").split("`tests/` mirrors this")[1].replace("`tests/engine/ROOM`", "")
    rooms = {path.parent.name for path in (ROOT / "tome_core").glob("*/__init__.py")}
    folders = [path.parent for path in (ROOT / "tests").glob("*/*.py")]
    folders += [path.parent for path in (ROOT / "tests" / "engine").glob("*/*.py") if path.parent.name not in rooms]
    names = {path.relative_to(ROOT).as_posix() for path in folders} - {"tests/engine"}
    assert not {name for name in names if f"`{name}`" not in text}
