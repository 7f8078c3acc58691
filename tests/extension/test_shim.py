"""The webui loads the extension by its own rule: once, twice, with a rival, with a second copy, cloned or installed."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from install_hosts import WEBUI
from tests.host_doubles.folders import call_install, make_folder
from tests.host_doubles.webui_modules import ROOT
from tests.host_doubles.webuis import ON, SAVED, Webui, merges


def test_a_rival_extension_that_owns_our_names_does_no_harm(webui, monkeypatch, tmp_path):
    for name in ("extension", "tome_core", "install"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the rival was imported')")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    webui.reload()
    assert SAVED in webui.job(*ON).comments


def test_reload_runs_new_code_and_leaves_the_model_clean(webui):
    """Even in the middle of a job."""
    before, seen = webui.part("merging"), []

    def at_step(step):
        if step == 1:
            seen.append(merges(webui.unet))
            webui.reload()
            seen.append(merges(webui.unet))

    webui.job(*ON, at_step=at_step)
    assert seen == [True, False]
    assert not merges(webui.unet) and webui.part("merging") is not before
    assert webui.script.show(False) is webui.scripts.AlwaysVisible and webui.script.title() == "Token Merging (ToMe)"
    assert SAVED in webui.job(*ON).comments
    assert all(len(listeners) == 1 for listeners in webui.callbacks.values())


def test_being_installed_twice_is_said_and_only_one_works(webui, tmp_path, capsys):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "token_merging.py", tmp_path / "scripts")
    with pytest.raises(ValueError, match="not enough values"):  # no script was found there
        webui.start(tmp_path)
    assert "installed twice" in capsys.readouterr().out


@pytest.mark.parametrize("options", [(), ("--copy",)], ids=["link", "copy"])
def test_wherever_install_puts_it_it_works_with_the_engine_that_lies_there(monkeypatch, tmp_path, options):
    folder = make_folder(WEBUI, tmp_path)
    place = folder / WEBUI.place / "tome_core"
    done = call_install(WEBUI.command, folder, *options)
    assert done.returncode == 0 and place.is_symlink() != bool(options), done.stderr
    webui = Webui(monkeypatch).start(place)
    assert SAVED in webui.job(*ON).comments and not webui.errors
    for module in (webui.part("script"), webui.engine("hosting")):
        assert Path(module.__file__).resolve().is_relative_to(place.resolve())
    webui.call("script_unloaded")
    assert call_install(WEBUI.command, folder, "--uninstall").returncode == 0 and not os.path.lexists(place)
