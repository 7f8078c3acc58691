"""Three ways in: cloned into `extensions/`, "Install from URL", and `install.py webui DIR`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from install import WEBUI
from tests.host_folders import Installed, call_install, make_folder
from tests.webui_doubles import Webui, custom
from tests.webui_modules import ROOT

NOT_CLONED = shutil.ignore_patterns(".*", "__pycache__", "tests", "demo", "shared", "benchmarks")


@pytest.fixture
def webui(monkeypatch):
    made = Webui(monkeypatch)
    yield made
    made.call("script_unloaded")


def works(webui, place: Path) -> None:
    """The extension that lies there merges, with the engine that lies there."""
    webui.start(place)
    assert "75 % of attention left out" in webui.job(custom()).comments and not webui.errors
    assert Path(webui.part("script").__file__).samefile(place / "extension" / "script.py")
    assert Path(sys.modules["_tome_core_webui.tome_core"].__file__).samefile(place / "tome_core" / "__init__.py")


def test_a_clone_in_extensions_works(webui, tmp_path):
    place = make_folder(WEBUI, tmp_path) / "extensions" / "sd-tome.core"
    shutil.copytree(ROOT, place, ignore=NOT_CLONED)
    works(webui, place)


def test_install_from_url_calls_install_py_bare_with_the_webuis_folder_as_its_own(tmp_path):
    folder = make_folder(WEBUI, tmp_path)
    place = folder / "extensions" / "tome_core"
    shutil.copytree(ROOT, place, ignore=NOT_CLONED)
    done = call_install(cwd=folder, root=place)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (ROOT / "requirements.txt").exists()


class TestInstall(Installed):
    host = WEBUI

    @pytest.fixture
    def works(self, webui):
        return lambda place: works(webui, place)
