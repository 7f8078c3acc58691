"""Three ways in: cloned into `extensions/`, "Install from URL", and `install.py webui DIR`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import install
from install import WEBUI
from tests.webui_doubles import Webui, custom
from tests.webui_modules import ROOT

NOT_CLONED = shutil.ignore_patterns(".*", "__pycache__", "tests", "demo", "shared", "benchmarks")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder like a webui's, in a path with a space."""
    made = tmp_path / "stable diffusion webui"
    for name in ("modules", "extensions"):
        (made / name).mkdir(parents=True)
    for name in ("launch.py", "webui.py"):
        (made / name).touch()
    return made


@pytest.fixture
def webui(monkeypatch):
    made = Webui(monkeypatch)
    yield made
    made.call("script_unloaded")


def call_install(*arguments, cwd=ROOT, root=ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, str(root / "install.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def works(webui, place: Path) -> None:
    """The extension that lies there merges, with the engine that lies there."""
    webui.start(place)
    assert "75 % of attention left out" in webui.job(custom()).comments and not webui.errors
    assert Path(webui.part("script").__file__).samefile(place / "extension" / "script.py")
    assert Path(sys.modules["_tome_core_webui.tome_core"].__file__).samefile(place / "tome_core" / "__init__.py")


def test_a_clone_in_extensions_works(webui, folder):
    place = folder / "extensions" / "sd-tome.core"
    shutil.copytree(ROOT, place, ignore=NOT_CLONED)
    works(webui, place)


def test_install_from_url_calls_install_py_bare_with_the_webuis_folder_as_its_own(folder):
    place = folder / "extensions" / "tome_core"
    shutil.copytree(ROOT, place, ignore=NOT_CLONED)
    done = call_install(cwd=folder, root=place)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (ROOT / "requirements.txt").exists()


@pytest.mark.parametrize("options", [(), ("--copy",)], ids=["link", "copy"])
def test_install_py_puts_it_there_and_takes_it_away(webui, folder, options):
    place = folder / "extensions" / "tome_core"
    for _ in range(2):  # again is no mistake
        done = call_install("webui", folder, *options)
        assert done.returncode == 0 and str(place) in done.stdout, done.stderr
    assert place.is_symlink() != bool(options)
    works(webui, place)
    done = call_install("webui", folder, "--uninstall")
    assert done.returncode == 0 and not os.path.lexists(place) and (ROOT / "extension").is_dir()
    assert "nothing to undo" in call_install("webui", folder, "--uninstall").stdout


def test_where_links_are_not_possible_it_is_copied(webui, folder, monkeypatch):
    monkeypatch.setattr(Path, "symlink_to", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("no right")))
    place = install.target(WEBUI, folder)
    assert "Copied" in install.put(WEBUI, place)
    works(webui, place)


def test_a_folder_that_is_no_webui_is_refused_with_what_was_looked_for(tmp_path):
    done = call_install("webui", tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert all(name in done.stderr for name in ("launch.py", "webui.py", "modules", "extensions"))
    assert not list(tmp_path.iterdir())


def test_what_somebody_else_put_there_is_not_removed(folder):
    place = folder / "extensions" / "tome_core"
    place.mkdir()
    (place / "precious.txt").touch()
    for options in ((), ("--uninstall",), ("--copy",)):
        done = call_install("webui", folder, *options)
        assert done.returncode == 1 and "was not made by install.py" in done.stderr
    assert (place / "precious.txt").exists()


def test_the_one_click_package_has_it_one_folder_down(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "package" / "webui")
    place = install.target(WEBUI, tmp_path / "package")
    assert place.parent == (tmp_path / "package" / "webui" / "extensions").resolve()
