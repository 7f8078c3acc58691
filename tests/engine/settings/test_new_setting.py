"""A new setting is one field in one file: everything else is made from it, or generated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HELP = "Written in one place: how much of nothing is added."
FIELD = f'''    gentleness: float = setting(
        0.25, "Gentleness", "{HELP}", minimum=0.0, maximum=2.0, step=0.05, advanced=True, place=%d,
    )

'''
BEFORE = {"MergeRule": "    def __post_init__", "MergeConfig": "    def __init__(self, *, rules"}
CONFIG = Path("tome_core", "settings", "config.py")
HELP_PAGE = Path("comfy_nodes", "web", "docs", "ToMeSettings.md")
LOCALES = [Path("locales", language, "nodeDefs.json") for language in ("en", "zh", "ja")]
ASKED = """
import json
from tome_core import MergeConfig, form, patch, strength
from comfy_nodes.nodes import ApplyToMe, ToMeSettings

def refusal(values):
    try:
        form.change(MergeConfig(), values)
    except ValueError as error:
        return str(error)

(settled,) = ToMeSettings().settings(gentleness=0.5)
print(json.dumps({
    "last of the form": form.NAMES[-1], "filled": form.fill(0.5)["gentleness"],
    "set": [form.change(MergeConfig(), {"gentleness": 1}).value("gentleness"), settled.value("gentleness"),
            MergeConfig(gentleness=0.5).value("gentleness")],
    "refusal": refusal({"gentleness": 3}), "left out": form.settle({"gentleness": 3})[1],
    "input": list(ToMeSettings.INPUT_TYPES()["optional"].items())[-1],
    "elsewhere": "gentleness" in ApplyToMe.INPUT_TYPES()["optional"],
}))
"""


def call(place: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("owner", BEFORE)
def test_it_is_in_the_form_the_node_and_all_that_is_generated_until_it_is_taken_out_again(owner, tmp_path):
    """Of a copy of the product with one more setting, of a rule or of the whole; what is generated is made anew."""
    for name in ("tome_core", "comfy_nodes", "locales"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("tests/nodedefs.py", "benchmarks/settings_table.py"):
        (tmp_path / file).parent.mkdir()
        shutil.copy(ROOT / file, tmp_path / file)
    text = (tmp_path / CONFIG).read_text(encoding="utf-8")
    assert text.count(BEFORE[owner]) == 1
    field = FIELD % text.count("place=")
    (tmp_path / CONFIG).write_text(text.replace(BEFORE[owner], field + BEFORE[owner]), encoding="utf-8")
    call(tmp_path, "-m", "tests.nodedefs")

    assert json.loads(call(tmp_path, "-c", ASKED)) == {
        "last of the form": "gentleness", "filled": 0.25, "set": [1.0, 0.5, 0.5],
        "refusal": "gentleness=3 is out of range; use a number from 0.0 to 2.0",
        "left out": ["gentleness=3 is out of range; use a number from 0.0 to 2.0"],
        "input": ["gentleness", ["FLOAT", {"default": 0.25, "display_name": "gentleness", "tooltip": HELP,
                                           "advanced": True, "min": 0.0, "max": 2.0, "step": 0.05,
                                           "round": 0.000001}]],
        "elsewhere": False,
    }  # fmt: skip
    table = call(tmp_path, "-c", "from benchmarks.settings_table import settings; print(settings())")
    assert f"| `gentleness` | `0.25` | from 0 to 2 | {HELP} |" in table
    page = (tmp_path / HELP_PAGE).read_text(encoding="utf-8")
    assert f"| gentleness | {HELP} |" in page and 'behind "Show advanced inputs"' in page
    for path in LOCALES:
        texts = json.loads((tmp_path / path).read_text(encoding="utf-8"))
        assert texts["ToMeSettings"]["inputs"]["gentleness"] == {"name": "gentleness", "tooltip": HELP}

    shutil.copy(ROOT / CONFIG, tmp_path / CONFIG)
    call(tmp_path, "-m", "tests.nodedefs")
    assert all((tmp_path / path).read_bytes() == (ROOT / path).read_bytes() for path in (HELP_PAGE, *LOCALES))
