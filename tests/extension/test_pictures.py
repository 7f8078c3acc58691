"""The gain of merging from the webuis' own pictures: which pictures count, where it is shown, and where it is kept."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.host_doubles.webuis import ASKED, FLAVOURS, ON, SAVED, merges
from tests.small_models.unets import ldm_of_one_level
from tests.thoroughness import some_quick

GAIN = "2.0x faster in your pictures (3 with merging, 3 without)"


@pytest.fixture
def place(monkeypatch, tmp_path):
    """The webui's folder for files, which the webui reads at its start."""
    monkeypatch.setitem(sys.modules, "modules.paths_internal", SimpleNamespace(data_path=str(tmp_path)))
    return tmp_path


@pytest.fixture(autouse=True)
def timed(place, webui, monkeypatch):
    """A clock: every step takes a second, a merged step half. The double's four steps are enough."""
    clock = SimpleNamespace(now=0.0)

    def now():
        clock.now += 0.5 if merges(webui.unet) else 1.0
        return clock.now

    monkeypatch.setattr(webui.engine("measuring.pictures"), "_CALLS", 3)
    monkeypatch.setattr(webui.engine("engine.steps").Steps, "clock", staticmethod(now))


@pytest.mark.parametrize("flavour", some_quick(FLAVOURS, 2))
def test_the_report_and_the_panel_tell_it_after_three_of_both_kinds_and_after_a_restart(place, webui):
    def answer(width, height):
        webui.script.ui(False)  # imports the panel
        wish = webui.part("job_settings").read(ON, webui.part("settings_tab").default_of)
        return webui.part("panel_line").answer(wish, {False: (width, height)})

    assert answer(64, 64).startswith("64x64: about 4% less work expected") and not list(place.rglob("*.json"))
    for _ in range(3):
        assert "faster" not in webui.job().comments
    comments = [webui.job(*ON).comments for _ in range(3)]
    assert "faster" not in "".join(comments[:2])
    assert comments[2] == f"ToMe: {ASKED}, 4 steps, {SAVED}, {GAIN}\n"
    assert answer(64, 64) == f"64x64: {GAIN}" and "in your pictures" not in answer(72, 64)
    (file,) = place.rglob("*.json")
    assert file.parent.name == "cache"
    webui.reload()
    assert answer(64, 64) == f"64x64: {GAIN}"


STRANGER = SimpleNamespace(x=None, sigma=torch.ones(1), denoiser=SimpleNamespace(p=object()))
# each changes the webui, or gives further arguments of the job
SPOILING = {"stopped": lambda webui: setattr(webui.shared, "state", SimpleNamespace(interrupted=True)),
            "another samples inside of a step": lambda webui: {"at_step": lambda step: step == 1
                                                               and webui.call("cfg_denoiser", STRANGER)},
            "a refiner goes on": lambda webui: {"refiner": ldm_of_one_level()}}  # fmt: skip


@pytest.mark.parametrize("args", [(), ON], ids=["off", "on"])
@pytest.mark.parametrize("spoil", SPOILING.values(), ids=SPOILING)
def test_what_was_not_whole_or_not_one_models_own_time_counts_for_nothing(webui, monkeypatch, spoil, args):
    monkeypatch.setattr(webui.engine("measuring.pictures"), "_CALLS", 1)
    more = spoil(webui) or {}
    assert webui.job(*args, **more).latents.isfinite().all()
    assert not webui.engine("hosting").gains.KNOWN.pictures


def test_other_extensions_and_batches_are_other_cases(webui):
    for more in ({}, {"extra_generation_params": {"ControlNet 0": "canny"}}, {"batch_size": 2}):
        webui.job(**more)
    assert len(webui.engine("hosting").gains.KNOWN.pictures) == 3
