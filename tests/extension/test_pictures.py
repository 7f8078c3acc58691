"""The webuis' own pictures say what merging gains, without a button: what counts as one, and where it is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.models import ldm_of_one_level
from tests.webui_doubles import ON, Processing, custom, merges, report

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


@pytest.mark.parametrize("flavour", ["a1111", "reforge", "forge"])
def test_the_report_and_the_panel_tell_it_after_three_of_both_kinds(webui):
    webui.script.ui(False)  # imports the panel
    wishes, read = webui.part("wish"), webui.part("options").of_dial
    answer, wish = webui.part("measuring").answer, wishes.read(ON, read)
    assert answer(wish, {False: (64, 64)}) == "64x64: not measured yet"
    for _ in range(3):
        assert "faster" not in webui.job().comments
    comments = [webui.job(*ON).comments for _ in range(3)]
    assert "own pictures" not in "".join(comments[:2]) and "left out" in comments[1]
    assert comments[2] == f"ToMe: strength 0.5, own settings, 4 steps, {GAIN}\n"
    assert answer(wish, {False: (64, 64)}) == f"64x64: {GAIN}"
    assert answer(wishes.read((custom(0.6),), read), {False: (64, 64)}) == "64x64: not measured yet"
    assert answer(wish, {False: (72, 64)}) == "72x64: not measured yet"


def test_each_pass_is_a_case_of_its_own_and_one_left_alone_an_unmerged_one(webui):
    for where in ("hires pass", "first pass"):
        for _ in range(3):
            job = webui.job(custom(where=where), enable_hr=True)
            assert list(report(job)["passes"]) == [where]
    assert f"first pass: 4 steps, {GAIN}" in job.comments and len(known(webui)) == 4


def test_off_pictures_stay_as_they_are_and_leave_nothing(webui):
    p = Processing(webui, ())
    plain = webui.process(p)
    assert not torch.equal(plain.latents, webui.job(*ON).latents)
    assert torch.equal(plain.latents, webui.job().latents)
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


def another_samples(webui, monkeypatch):
    """Inside of a step, which takes longer by that."""
    other = SimpleNamespace(x=None, sigma=torch.ones(1), denoiser=SimpleNamespace(p=object()))
    return {"at_step": lambda step: step == 1 and webui.call("cfg_denoiser", other)}


def a_refiner_goes_on(webui, monkeypatch):
    return {"refiner": ldm_of_one_level()}


def hypertile_is_on(webui, monkeypatch):
    webui.shared.opts.data["hypertile_enable_unet"] = True
    return {}


def hypertile_stays_on(webui, monkeypatch):
    vars(webui.unet)["__webui_hypertile_params"] = SimpleNamespace(enabled=True)
    return {}


def the_webui_merges(webui, monkeypatch):
    monkeypatch.setattr(webui.part("merging").Job, "why_left", lambda self, hires: "theirs is better")
    webui.shared.opts.data["token_merging_ratio"] = 0.9
    return {}


def the_model_is_unknown(webui, monkeypatch):
    def unknown(p):
        raise TypeError("no UNet")

    monkeypatch.setattr(webui.part("host"), "running_unet", unknown)
    return {}


@pytest.mark.parametrize(("disturb", "args"), [
    (another_samples, ()), (another_samples, ON), (a_refiner_goes_on, ()), (a_refiner_goes_on, ON),
    (hypertile_is_on, ()), (hypertile_is_on, ON), (hypertile_stays_on, ()), (hypertile_stays_on, ON),
    (the_webui_merges, ()), (the_webui_merges, ON), (the_model_is_unknown, ()),
])  # fmt: skip
def test_what_is_not_one_models_own_time_counts_for_nothing(webui, monkeypatch, disturb, args):
    assert webui.job(*args, **disturb(webui, monkeypatch)).latents.isfinite().all()
    assert not known(webui)


def test_what_was_to_merge_and_did_not_is_no_unmerged_picture(webui):
    assert "so few tokens" in webui.job(True, 0.5).comments and not known(webui)


def test_other_prompts_and_extensions_are_other_cases(webui):
    webui.job()
    webui.job(extra_generation_params={"ControlNet 0": "canny"})
    webui.job(batch_size=2)
    assert len(known(webui)) == 3
    p, beside, short = Processing(webui, ()), webui.part("host").beside, (1, 77, 8)
    for length in (77, 154):
        texts = {"text_cond": torch.zeros(1, length, 8), "text_uncond": {"crossattn": torch.zeros(short)}}
        assert beside(p, SimpleNamespace(**texts)) == [(1, length, 8), short]
    assert beside(p, SimpleNamespace()) == [None, None]
