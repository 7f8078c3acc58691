"""Ways in: cloned into `extensions/`, as "Install from URL" does too, and `install.py webui DIR`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from install import WEBUI
from tests.host_folders import Installed, make_folder
from tests.webui_doubles import Webui, custom
from tests.webui_modules import ROOT


@pytest.fixture
def webui(monkeypatch):
    made = Webui(monkeypatch)
    yield made
    made.call("script_unloaded")


def works(webui, place: Path) -> None:
    """The extension that lies there merges, with the engine that lies there."""
    webui.start(place)
    assert "75% of attention left out" in webui.job(custom()).comments and not webui.errors
    assert Path(webui.part("script").__file__).samefile(place / "extension" / "script.py")
    assert Path(webui.engine("hosting").__file__).samefile(place / "tome_core" / "hosting.py")


def test_a_clone_in_extensions_works(webui, tmp_path):
    place = make_folder(WEBUI, tmp_path) / "extensions" / "sd-tome.core"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "tests", "demo", "shared", "benchmarks")
    shutil.copytree(ROOT, place, ignore=left_out)
    works(webui, place)


class TestInstall(Installed):
    host = WEBUI

    @pytest.fixture
    def works(self, webui):
        return lambda place: works(webui, place)
