"""What the engine's docstrings show after ``>>>`` runs, and gives what they say."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWING = [path.relative_to(ROOT).with_suffix("").as_posix() for path in sorted((ROOT / "tome_core").rglob("*.py"))
           if ">>>" in path.read_text(encoding="utf-8")]  # fmt: skip


@pytest.mark.parametrize("name", SHOWING)
def test_what_a_docstring_shows_runs(name):
    result = doctest.testmod(import_module(name.replace("/", ".").removesuffix(".__init__")))
    assert result.attempted and not result.failed
