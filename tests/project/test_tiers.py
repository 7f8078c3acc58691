"""The two tiers of tests, and which tests belong to a changed file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.changed import HOUSE, find_tests

ROOT = Path(__file__).parents[2]
ENGINE = {f"tests/project/test_{name}.py" for name in ("docstrings", "house", "troubleshooting")}
TWO = '''
import pytest

@pytest.mark.slow
def test_long(): pass

def test_short(): pass
'''


def ran(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"),
               "--rootdir", str(ROOT), "-p", "tests.conftest", "--collect-only", *options, str(folder)]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_quick_leaves_out_the_slow_ones_and_says_how_many(tmp_path):
    (tmp_path / "test_a_short.py").write_text("def test_first(): pass\n")
    (tmp_path / "test_b_two.py").write_text(TWO)
    everything, quick = ran(tmp_path), ran(tmp_path, "--quick")
    assert everything.index("test_long") < everything.index("test_first"), "files with slow tests come first"
    assert "test_long" not in quick and "test_short" in quick and "1 deselected" in quick


@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("tome_core/merging/plan.py", {"tests/engine/merging", *ENGINE}),
        ("tome_core/patching/__init__.py", {"tests/engine/patching", *ENGINE}),
        ("comfy_nodes/host.py", {"tests/comfy_nodes", "tests/project/test_house.py"}),
        ("benchmarks/result.py", {"tests/benchmarks", "tests/project/test_house.py"}),  # not test_results.py
        ("extension/infotext.py", {"tests/extension/test_infotext.py", "tests/project/test_house.py"}),
        ("install.py", {"tests/project/test_install.py", "tests/project/test_house.py"}),
        ("tests/engine/merging/test_plan.py", {"tests/engine/merging/test_plan.py"}),
        ("tests/random_stackings/webui_jobs.py", {"tests/project/test_random_stackings.py"}),
        ("docs/gone.png", {"tests/project/test_house.py"}),
    ],
)
def test_a_changed_file_names_its_tests(name, tests):
    assert find_tests(name) == tests


def test_every_file_has_tests_beside_the_house():
    """But for the house itself. A test is its own."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not listed:
        pytest.skip("needs a checkout of git's")
    found = {name: find_tests(name) - {HOUSE} for name in listed.splitlines()
             if (ROOT / name).is_file() and name != HOUSE}  # fmt: skip
    assert not [name for name, tests in found.items() if not tests]
    for test in set().union(*found.values()):
        assert (ROOT / test).is_file() or any((ROOT / test).glob("test_*.py")), test
