"""The real shim, run by the webui's own rule: once, twice, beside a rival, and beside a second copy of itself."""

from __future__ import annotations

import gc
import shutil
import sys
import weakref

import pytest

from tests.models import ldm_of_one_level
from tests.webui_doubles import Component, Webui, custom, merges
from tests.webui_modules import ROOT

ON = (custom(),)


def test_exactly_one_script_is_registered_and_it_is_always_visible(webui):
    assert [one.__name__ for one in webui.classes] == ["TokenMerging"]
    assert webui.script.show(False) is webui.scripts.AlwaysVisible
    assert webui.script.title() == "Token Merging (ToMe)"


def test_a_rival_extension_that_owns_our_names_does_no_harm(webui, monkeypatch, tmp_path):
    for name in ("extension", "tome_core", "install"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the rival was imported')")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    webui.reload()
    assert "75% of attention left out" in webui.job(*ON).comments


def test_reload_runs_new_code_and_leaves_the_model_clean(webui):
    before = webui.part("merging")
    with pytest.raises(ZeroDivisionError):
        webui.job(*ON, at_step=lambda step: 1 / 0)
    assert merges(webui.unet)
    webui.reload()
    assert not merges(webui.unet)
    assert webui.part("merging") is not before
    assert "75% of attention left out" in webui.job(*ON).comments
    assert all(len(listeners) == 1 for listeners in webui.callbacks.values())


def test_unload_leaves_no_module_of_ours_behind(webui):
    webui.call("script_unloaded")
    assert not [name for name in sys.modules if name.startswith("_tome_core_webui")]
    webui.callbacks.clear()


def test_being_installed_twice_is_said_and_only_one_works(webui, tmp_path, capsys):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "token_merging.py", tmp_path / "scripts")
    with pytest.raises(ValueError, match="not enough values"):  # no script was found there
        webui.start(tmp_path)
    assert "installed twice" in capsys.readouterr().out


def test_the_shim_works_without_the_webuis_settings(webui):
    """Started with --nowebui, no settings tab is ever built."""
    del webui.shared.opts
    assert "75% of attention left out" in webui.job(*ON).comments


def test_an_unloaded_engine_is_let_go_though_the_model_stays():
    """Reload UI after a merged picture: torch's operators held the old engine by what rested on the UNet."""
    model = ldm_of_one_level()
    with pytest.MonkeyPatch.context() as monkeypatch:
        webui = Webui(monkeypatch).start()
        webui.load(model)
        assert webui.job({"enabled": True, "only_if_it_pays": False}).infotexts != [""]
        kept = weakref.ref(webui.part("wish").strength.__globals__["MergeConfig"])
        assert kept() is not None
        webui.call("script_unloaded")
        del webui
    Component.made.clear()  # the double's controls know whom they call
    gc.collect()
    assert kept() is None and not merges(model.model.diffusion_model)
