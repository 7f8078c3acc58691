"""The pack as ComfyUI and its users find it: loading, locales, docs, example workflows."""

import importlib
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

import install_hosts as install
from comfy_nodes import NODE_CLASS_MAPPINGS
from install import COMFYUI
from tests.host_doubles.folders import call_install, load_pack, make_folder
from tests.hosts.comfyui.running import WORKFLOWS, workflow
from tests.project import nodedefs

ROOT = Path(__file__).parents[2]


def looks_right(place: Path) -> None:
    """The pack loads from this folder, which has all that ComfyUI looks for."""
    pack = load_pack(place)
    assert set(pack.NODE_CLASS_MAPPINGS) == set(NODE_CLASS_MAPPINGS)
    host = importlib.import_module(pack.NODE_CLASS_MAPPINGS["ApplyToMe"].__module__.rpartition(".")[0] + ".host")
    assert Path(host.hosting.__file__).parents[1].samefile(place), "another copy of the engine was found"
    files = [f"{pack.WEB_DIRECTORY}/docs/{name}.md" for name in NODE_CLASS_MAPPINGS]
    files += [f"locales/{language}/nodeDefs.json" for language in ("en", "zh", "ja")]
    files += [f"example_workflows/{name}.{kind}" for name in WORKFLOWS for kind in ("json", "jpg")]
    assert all((place / file).is_file() for file in files)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder like ComfyUI's, in a folder whose name not every terminal can show."""
    (tmp_path / "with spaces ünï 字").mkdir()
    return make_folder(COMFYUI, tmp_path / "with spaces ünï 字")


@pytest.fixture
def place(folder) -> Path:
    return folder / "custom_nodes" / "tome_core"


@pytest.mark.parametrize("options", [(), ("--copy",)], ids=["link", "copy"])
def test_install_py_puts_it_there_and_takes_it_away(folder, place, options, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    for _ in range(2):  # a second call is no mistake
        done = call_install("comfyui", folder, *options)
        assert done.returncode == 0 and r"with spaces \xfcn\xef \u5b57" in done.stdout, done.stderr
    assert place.is_symlink() != bool(options)
    looks_right(place)
    assert call_install("comfyui", folder, "--uninstall").returncode == 0 and not os.path.lexists(place)
    assert all((ROOT / name).exists() for name in COMFYUI.copied)
    assert "nothing to undo" in call_install("comfyui", folder, "--uninstall").stdout


def test_where_links_are_not_possible_it_is_copied(folder, place, monkeypatch):
    monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=OSError("no right")))
    assert "Copied" in install.link_or_copy(COMFYUI, install.target(COMFYUI, folder))
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


@pytest.mark.parametrize("language", ["en", "zh", "ja"])
def test_the_texts_of_the_nodes_are_there_and_translated(language):
    """A new text is in English until it is translated: `nodedefs` puts it in."""
    written = (nodedefs.LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8")
    english = nodedefs.english()
    texts = english if language == "en" else nodedefs.complete(json.loads(written), english)
    assert written == nodedefs.text(texts), "run: python -m tests.project.nodedefs"
    pairs = zip(written.splitlines(), nodedefs.text(english).splitlines(), strict=True)
    same = [line for line, other in pairs if line == other and '": "' in line]
    assert language == "en" or len(same) <= 2, f"left in English: {same}"


def test_the_help_page_of_the_settings_has_the_table_of_their_tooltips():
    page = nodedefs.HELP_PAGE.read_text(encoding="utf-8")
    assert page == nodedefs.help_page(page), "run: python -m tests.project.nodedefs"


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
