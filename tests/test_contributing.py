"""CONTRIBUTING.md: its map is that of the tree, its links lead somewhere, and its commands exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests import code_map

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def paths() -> list[Path]:
    found = code_map.tracked()
    if found is None:
        pytest.skip("this is no git checkout, so what belongs to it is not known")
    return found


def test_the_map_is_that_of_the_tree(paths):
    text = PAGE.read_text(encoding="utf-8")
    made = code_map.replace_between_markers(text, code_map.code_map(paths))
    assert made == text, "run: python -m tests.code_map --write CONTRIBUTING.md"


def test_every_folder_and_every_file_has_its_line(paths):
    made = code_map.code_map(paths)
    for path in paths:
        folder = path.parent.as_posix()
        heading = "### The root\n" if folder == "." else f"### `{folder}/`\n"
        section = made.split(heading)[1].split("\n### ")[0]
        assert f"`{code_map.line_of(path)[0]}`: " in section or path.name == "__init__.py", path


def test_nothing_is_said_of_what_is_not_there(paths):
    folders = {path.parent.as_posix() for path in paths}
    assert set(code_map.FOLDERS) <= folders
    for pattern in code_map.OTHERS:
        assert any(code_map.fnmatchcase(path.as_posix(), pattern) for path in paths), pattern


def test_a_file_of_which_nothing_is_said_is_refused(paths, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"notes\.odt.*OTHERS"):
        code_map.code_map([*paths, Path("tome_core/notes.odt")])
    monkeypatch.setattr(code_map, "ROOT", tmp_path)
    (tmp_path / "silent.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"silent\.py has no docstring"):
        code_map.line_of(Path("silent.py"))
    (tmp_path / "silent.py").write_text('"""Speaks."""\n')
    with pytest.raises(ValueError, match="nothing is said of the folder new"):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "a.py").write_text('"""Speaks."""\n')
        code_map.code_map([Path("new/a.py")])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("One. Two.", "One."), ("Is it? Yes.", "Is it?"), ("Of tomesd 0.1.3 and\n1.10 alone.\n\nMore.",
     "Of tomesd 0.1.3 and 1.10 alone."), ("``code`` here", "`code` here"), ("Ends: `a.b`. More", "Ends: `a.b`.")],
)  # fmt: skip
def test_a_sentence_ends_at_a_mark_that_ends_a_word(text, sentence):
    assert code_map.first_sentence(text) == sentence


def test_the_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text(encoding="utf-8"))
    assert len(links) > 5
    assert all((ROOT / link).exists() for link in links)


def test_the_modules_and_files_it_names_exist():
    text = PAGE.read_text(encoding="utf-8").split(code_map.START)[0]
    modules = set(re.findall(r"python -m (\w+\.\w+)", text))
    assert modules >= {"tests.release", "tests.code_map"}
    assert all(importlib.util.find_spec(module) for module in modules)
    assert all((ROOT / name).exists() for name in re.findall(r"`(tests/[\w/]+(?:\.py|\.txt)?)`", text))


def test_missing_markers_are_named():
    with pytest.raises(ValueError, match="end of map"):
        code_map.replace_between_markers(code_map.START, "")
