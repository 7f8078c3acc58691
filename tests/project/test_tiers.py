"""The two tiers of tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
