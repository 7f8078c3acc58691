"""The webuis' own pictures say what merging gains, without a button: what counts, and where it is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.models import ldm_of_one_level
from tests.webui_doubles import FLAVOURS, ON, Processing, custom, merges, report

GAIN = "about 2.0x faster, from your own pictures (3 with merging, 3 without)"


@pytest.fixture(autouse=True)
def timed(webui, monkeypatch):
    """Every step takes a second, a merged one a half. The double's four steps are enough."""
    clock, pictures = SimpleNamespace(now=0.0), webui.engine("measuring.pictures")

    def now():
        clock.now += 0.5 if merges(webui.unet) else 1.0
        return clock.now

    monkeypatch.setattr(pictures, "_CALLS", 3)
    monkeypatch.setattr(pictures.Steps, "clock", staticmethod(now))


def known(webui):
    return webui.engine("hosting").gains.KNOWN.pictures


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_report_and_the_panel_tell_it_after_three_of_both_kinds(webui):
    webui.script.ui(False)  # imports the panel
    answer, wish = webui.part("measuring").answer, webui.part("wish").read(ON, webui.part("options").of_dial)
    assert answer(wish, {False: (64, 64)}) == "64x64: not measured yet"
    for _ in range(3):
        assert "faster" not in webui.job().comments
    comments = [webui.job(*ON).comments for _ in range(3)]
    assert "own pictures" not in "".join(comments[:2])
    assert comments[2] == f"ToMe: strength 0.5, own settings, 4 steps, {GAIN}\n"
    assert answer(wish, {False: (64, 64)}) == f"64x64: {GAIN}"
    assert answer(wish, {False: (72, 64)}) == "72x64: not measured yet"


def test_each_pass_is_a_case_of_its_own_and_a_pass_left_alone_an_unmerged_case(webui):
    for where in ("hires pass", "first pass"):
        for _ in range(3):
            job = webui.job(custom(where=where), enable_hr=True)
            assert list(report(job)["passes"]) == [where]
    assert f"first pass: 4 steps, {GAIN}" in job.comments and len(known(webui)) == 4


def test_off_pictures_stay_as_they_are_and_leave_nothing(webui):
    p = Processing(webui, ())
    plain = webui.process(p)
    assert torch.equal(plain.latents, webui.plain().latents)
    assert "callback_state" not in vars(p.sampler) and p.sampler.steps == [0, 1, 2, 3]
    assert "ToMe report" not in plain.extra_generation_params and plain.comments == ""


@pytest.mark.parametrize("args", [(), ON], ids=["off", "on"])
def test_what_was_stopped_or_failed_counts_for_nothing(webui, monkeypatch, args):
    monkeypatch.setattr(webui.engine("measuring.pictures"), "_CALLS", 1)
    for flag in ("interrupted", "skipped"):
        webui.shared.state = SimpleNamespace(**{flag: True})
        webui.job(*args)
    webui.shared.state = SimpleNamespace(interrupted=False, skipped=False)
    with pytest.raises(ZeroDivisionError):
        webui.job(*args, at_step=lambda step: step < 3 or 1 / 0)
    assert not known(webui)
    webui.job(*args)
    assert len(known(webui)) == 1


@pytest.mark.parametrize("args", [(), ON], ids=["off", "on"])
@pytest.mark.parametrize("disturbance", [
    "another samples", "a refiner goes on", "HyperTile is on", "HyperTile stays on", "the webui merges better"])
def test_what_is_not_one_models_own_time_counts_for_nothing(webui, monkeypatch, disturbance, args):
    more, settings = {}, webui.shared.opts.data
    if disturbance == "another samples":  # inside of a step, which takes longer by that
        other = SimpleNamespace(x=None, sigma=torch.ones(1), denoiser=SimpleNamespace(p=object()))
        more["at_step"] = lambda step: step == 1 and webui.call("cfg_denoiser", other)
    elif disturbance == "a refiner goes on":
        more["refiner"] = ldm_of_one_level()
    elif disturbance == "HyperTile is on":
        settings["hypertile_enable_unet"] = True
    elif disturbance == "HyperTile stays on":
        vars(webui.unet)["__webui_hypertile_params"] = SimpleNamespace(enabled=True)
    else:
        monkeypatch.setattr(webui.part("merging").Job, "why_left", lambda self, hires: "theirs is better")
        settings["token_merging_ratio"] = 0.9
    assert webui.job(*args, **more).latents.isfinite().all() and not known(webui)


def test_an_unknown_model_and_what_was_to_merge_and_did_not_are_no_unmerged_picture(webui, monkeypatch):
    assert "so few tokens" in webui.job(True, 0.5).comments and not known(webui)

    def unknown(p):
        raise TypeError("no UNet")

    monkeypatch.setattr(webui.part("host"), "running_unet", unknown)
    assert webui.job().latents.isfinite().all() and not known(webui)


def test_other_prompts_and_extensions_are_other_cases(webui):
    webui.job()
    webui.job(extra_generation_params={"ControlNet 0": "canny"})
    webui.job(batch_size=2)
    assert len(known(webui)) == 3
    p, beside, short = Processing(webui, ()), webui.part("host").beside, (1, 77, 8)
    for length in (77, 154):
        texts = {"text_cond": torch.zeros(1, length, 8), "text_uncond": {"crossattn": torch.zeros(short)}}
        assert beside(p, SimpleNamespace(**texts)) == [(1, length, 8), short]
