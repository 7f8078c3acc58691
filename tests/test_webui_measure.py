"""Whether merging pays is measured after a picture where the user asked for it, and kept where the webui keeps such."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from tests.webui_doubles import FLAVOURS, Processing, Webui


@pytest.fixture(params=FLAVOURS)
def webui(request, monkeypatch, tmp_path):
    made = Webui(monkeypatch, request.param)
    made.put("modules.paths_internal", data_path=str(tmp_path))
    monkeypatch.setattr(Processing, "size", 16)
    yield made.start()
    made.call("script_unloaded")


def engine(webui, name):
    return sys.modules[f"{webui.part('merging').Patch.__module__.rpartition('.')[0]}.{name}"]


@pytest.fixture
def costs(webui, monkeypatch):
    """Says what a merged call takes, an unmerged one 1; counts the measurements."""
    measured, measure, made = engine(webui, "measured"), engine(webui, "measure"), []

    def say(merged):
        plain = measure.time_calls

        def time_calls(*args, **more):
            plain(*args[:4], steps=2, rounds=1)
            made.append(args)
            return measure.Seconds(1.0, merged, 0.0)

        monkeypatch.setattr(measured, "time_calls", time_calls)
        return made

    return say


def args(webui):
    return [True, 0.5]


def test_nothing_is_measured_unasked(webui, costs, tmp_path):
    made = costs(0.5)
    webui.job(*args(webui))
    assert not made and not list(tmp_path.rglob("*.json")) and not webui.errors


def test_what_pays_merges_from_the_next_picture_on_and_after_a_restart(webui, costs, tmp_path, caplog):
    made = costs(0.5)
    plain = webui.job().latents
    first = webui.job(*args(webui))
    assert torch.equal(first.latents, plain) and "so few tokens" in first.comments
    webui.shared.opts.data["tome_measure"] = True
    assert torch.equal(webui.job(*args(webui)).latents, plain), "a picture is not changed by what is measured after it"
    second, third = webui.job(*args(webui)), webui.job(*args(webui))
    assert len(made) == 1, "once"
    assert not torch.equal(second.latents, plain) and torch.equal(second.latents, third.latents)
    assert "measured 128x128: about 100 % faster" in second.comments
    (file,) = tmp_path.rglob("*.json")
    assert file.parent.name == "cache"
    webui.reload()
    assert torch.equal(webui.job(*args(webui)).latents, second.latents) and not webui.errors


def test_what_does_not_pay_is_off_and_the_note_says_why(webui, costs):
    costs(1.07)
    webui.shared.opts.data["tome_measure"] = True
    plain = webui.job().latents
    webui.job(*args(webui))
    after = webui.job(*args(webui))
    assert torch.equal(after.latents, plain) and not webui.errors
    assert "nothing merged: measured: a merged call took 1.07 times an unmerged one at 16x16" in after.comments


def test_passes_are_measured_each_and_what_fails_costs_no_picture(webui, costs, monkeypatch):
    made = costs(0.5)
    webui.shared.opts.data["tome_measure"] = True
    webui.job(*args(webui), enable_hr=True)
    assert len(made) == 2
    log = logging.getLogger(webui.part("measuring").__name__)
    told = []
    monkeypatch.setattr(log, "warning", lambda *text: told.append(text))

    def fails(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine(webui, "measured"), "time_calls", fails)
    monkeypatch.setattr(Processing, "size", 12)
    done = webui.job(*args(webui))
    assert told and "out of memory" in str(told) and len(done.images) == 1 and not webui.errors
