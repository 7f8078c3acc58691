"""The pack as ComfyUI and its users find it: three ways in, locales, docs, example workflows."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

import install_hosts as install
from comfy_nodes import NODE_CLASS_MAPPINGS
from install import COMFYUI
from tests import nodedefs
from tests.host_folders import call_install, load_pack, make_folder
from tests.hosts.comfyui.workflows import WORKFLOWS, workflow

ROOT = Path(__file__).parents[2]
LANGUAGES = ("en", "zh", "ja")
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def looks_right(place: Path) -> None:
    """The pack loads from here, and what ComfyUI looks for beside it is there."""
    pack = load_pack(place)
    assert set(pack.NODE_CLASS_MAPPINGS) == set(NODE_CLASS_MAPPINGS)
    host = importlib.import_module(pack.NODE_CLASS_MAPPINGS["ApplyToMe"].__module__.rpartition(".")[0] + ".host")
    assert Path(host.hosting.__file__).parents[1].samefile(place), "another copy of the engine was found"
    files = [f"{pack.WEB_DIRECTORY}/docs/{name}.md" for name in NODE_CLASS_MAPPINGS]
    files += [f"locales/{language}/nodeDefs.json" for language in LANGUAGES]
    files += [f"example_workflows/{name}.{kind}" for name in WORKFLOWS for kind in ("json", "jpg")]
    assert all((place / file).is_file() for file in files)


# --- three ways in -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    """Like ComfyUI's."""
    return make_folder(COMFYUI, tmp_path)


@pytest.fixture
def place(folder) -> Path:
    return folder / "custom_nodes" / "tome_core"


def test_a_clone_in_custom_nodes_loads(place):
    shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests", "demo", "shared"))
    looks_right(place)
    assert not (place / "requirements.txt").exists(), "hosts would install it; torch is theirs"


@pytest.mark.parametrize("options", [(), ("--copy",)], ids=["link", "copy"])
def test_install_py_puts_it_there_and_takes_it_away(folder, place, options):
    for _ in range(2):  # again is no mistake
        done = call_install("comfyui", folder, *options)
        assert done.returncode == 0 and str(place) in done.stdout, done.stderr
    assert place.is_symlink() != bool(options)
    looks_right(place)
    assert call_install("comfyui", folder, "--uninstall").returncode == 0 and not os.path.lexists(place)
    assert all((ROOT / name).exists() for name in COMFYUI.copied)
    assert "nothing to undo" in call_install("comfyui", folder, "--uninstall").stdout


def test_where_links_are_not_possible_it_is_copied(folder, place, monkeypatch):
    monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=OSError("no right")))
    assert "Copied" in install.put(COMFYUI, install.target(COMFYUI, folder))
    looks_right(place)


def test_a_folder_of_somebody_else_is_not_replaced(folder, place):
    place.mkdir()
    (place / "mine.txt").touch()
    for options in ((), ("--uninstall",), ("--copy",)):
        done = call_install("comfyui", folder, *options)
        assert done.returncode == 1 and "was not made by install.py" in done.stderr
    assert (place / "mine.txt").exists()


def test_a_base_directory_and_a_folder_around_comfyui_are_taken_too(folder, tmp_path):
    base = tmp_path / "base"
    for name in COMFYUI.looked_for[1]:
        (base / name).mkdir(parents=True)
    assert install.target(COMFYUI, base).parent == base / "custom_nodes"
    folder.rename(tmp_path / COMFYUI.below)
    assert install.target(COMFYUI, tmp_path).parent == (tmp_path / COMFYUI.below / "custom_nodes").resolve()


# --- what lies beside it -------------------------------------------------------------------------------------------


def test_the_english_texts_are_those_of_the_nodes_and_each_help_page_has_every_input_in_bold_type():
    """All but the advanced ones, which are in the table that is made."""
    written, page = (path.read_text(encoding="utf-8") for path in (nodedefs.PATH, nodedefs.HELP_PAGE))
    assert written == nodedefs.text(nodedefs.english()), "run: python -m tests.nodedefs"
    assert page == nodedefs.help_page(page), "run: python -m tests.nodedefs"
    for name, node in NODE_CLASS_MAPPINGS.items():
        bold = re.findall(r"\*\*(.+?)\*\*", nodedefs.HELP_PAGE.with_name(f"{name}.md").read_text(encoding="utf-8"))
        wanted = {facts.get("display_name", one) for one, (_, facts) in nodedefs.inputs_of(node).items()
                  if not facts.get("advanced")}  # fmt: skip
        assert {*bold, "model"} == {*wanted, "model"}, name


def texts_of(texts: dict, place: str = "") -> dict[str, str]:
    """The place of a text -> the text."""
    found = {}
    for key, one in texts.items():
        found |= texts_of(one, f"{place}/{key}") if isinstance(one, dict) else {f"{place}/{key}": one}
    return found


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_every_text_is_there_with_its_numbers_and_hardly_any_is_left_in_english(language):
    """A new text is in English until it is translated: `nodedefs` puts it in. Words for numbers may become digits."""
    written = (ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8")
    translated, english = (texts_of(one) for one in (json.loads(written), nodedefs.english()))
    assert [*translated] == [*english] and all(bool(translated[one]) == bool(english[one]) for one in english)
    same = [place for place, text in english.items() if text == translated[place]]
    assert len(same) <= 2, f"left in English: {same}"
    for place, text in english.items():
        if re.search("/inputs/.*/tooltip$", place):
            assert set(NUMBER.findall(text)) <= set(NUMBER.findall(translated[place])), place


@pytest.mark.parametrize("name", WORKFLOWS)
def test_an_example_workflow_fits_the_nodes(name):
    ours = [node for node in workflow(name)["nodes"] if node["type"] in NODE_CLASS_MAPPINGS]
    assert any(node["type"] == "ApplyToMe" for node in ours)
    for node in ours:
        inputs = nodedefs.inputs_of(NODE_CLASS_MAPPINGS[node["type"]])
        widgets = {name: (kind if isinstance(kind, list) else (), facts) for name, (kind, facts) in inputs.items()
                   if isinstance(kind, list) or kind in ("INT", "FLOAT", "BOOLEAN")}  # fmt: skip
        values = dict(zip(widgets, node.get("widgets_values", []), strict=True))
        assert node.get("widgets_values_named", {}) == values
        for (choices, facts), value in zip(widgets.values(), values.values(), strict=True):
            assert value in choices if choices else facts.get("min", value) <= value <= facts.get("max", value)
