"""The webuis' own pictures say what merging gains, without a button: what counts as one, and where it is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.models import ldm_of_one_level
from tests.webui_doubles import Processing, custom, merges, report

ON = (custom(),)


@pytest.fixture(autouse=True)
def timed(webui, monkeypatch, small):
    """Every step takes a second, a merged one a half. The double's four steps are enough."""
    clock = SimpleNamespace(now=0.0)

    def tell():
        clock.now += 0.5 if merges(webui.unet) else 1.0
        return clock.now

    pictures = webui.engine("measuring.pictures")
    monkeypatch.setattr(pictures, "_CALLS", 3)
    monkeypatch.setattr(pictures.Steps, "clock", staticmethod(tell))


def known(webui):
    return webui.engine("hosting").gains.KNOWN.pictures


TOLD = "about 2.0x faster, from your own pictures (3 with merging, 3 without)"


@pytest.mark.parametrize("flavour", ["a1111", "reforge", "forge"], indirect=True)
def test_the_report_and_the_panel_tell_it_after_three_of_both_kinds(webui):
    for _ in range(3):
        assert "faster" not in webui.job().comments
    comments = [webui.job(*ON).comments for _ in range(3)]
    assert "own pictures" not in "".join(comments[:2]) and "left out" in comments[1]
    assert comments[2] == f"ToMe: strength 0.5, own settings, 4 steps, {TOLD}\n"


def test_each_pass_is_a_case_of_its_own(webui):
    for args in ((), ON):
        done = [webui.job(*args, enable_hr=True) for _ in range(3)][-1]
    assert done.comments.count(TOLD) == 2 and len(known(webui)) == 4


def test_off_pictures_stay_as_they_are_and_leave_nothing(webui):
    samplers = []

    class Seen(Processing):
        def at_step(self, step):
            samplers.append(self.sampler)

    plain = webui.process(Seen(webui, ()))
    assert torch.equal(plain.latents, webui.job(*ON, seed=7).latents) is False
    assert torch.equal(plain.latents, webui.job().latents)
    assert "callback_state" not in vars(samplers[0]) and samplers[0].steps == [0, 1, 2, 3]
    assert "ToMe report" not in plain.extra_generation_params and plain.comments == ""


def test_a_pass_left_alone_is_an_unmerged_one_and_is_told_nothing(webui):
    for _ in range(3):
        done = webui.job(custom(where="hires pass"), enable_hr=True)
        assert "first pass: left alone" in done.comments and list(report(done)["passes"]) == ["hires pass"]
    for _ in range(3):
        done = webui.job(custom(where="first pass"), enable_hr=True)
    assert f"first pass: 4 steps, {TOLD}" in done.comments


@pytest.mark.parametrize("flag", ["interrupted", "skipped"])
@pytest.mark.parametrize("args", [(), ON], ids=["off", "on"])
def test_what_was_stopped_or_failed_counts_for_nothing(webui, monkeypatch, flag, args):
    monkeypatch.setattr(webui.engine("measuring.pictures"), "_CALLS", 1)
    webui.shared.state = SimpleNamespace(**{flag: True})
    webui.job(*args)
    webui.shared.state = SimpleNamespace(interrupted=False, skipped=False)

    def fail(step):
        if step == 3:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        webui.job(*args, at_step=fail)
    assert not known(webui)
    webui.job(*args)
    assert len(known(webui)) == 1


def somebody_samples(webui, monkeypatch):
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


WHATEVER = [somebody_samples, a_refiner_goes_on, hypertile_is_on, hypertile_stays_on, the_webui_merges]


@pytest.mark.parametrize("what", WHATEVER)
@pytest.mark.parametrize("args", [(), ON], ids=["off", "on"])
def test_what_is_not_one_models_own_time_counts_for_nothing(webui, monkeypatch, what, args):
    webui.job(*args, **what(webui, monkeypatch))
    assert not known(webui)


def test_what_was_to_merge_and_did_not_is_no_unmerged_picture(webui):
    assert "so few tokens" in webui.job(True, 0.5).comments and not known(webui)


def test_a_model_that_we_do_not_know_is_left_alone(webui, monkeypatch):
    def unknown(p):
        raise TypeError("no UNet")

    monkeypatch.setattr(webui.part("host"), "running_unet", unknown)
    assert webui.job().latents.isfinite().all() and not known(webui)


def test_the_panel_tells_it(webui):
    webui.script.ui(False)  # imports it
    measuring, wish, read = webui.part("measuring"), webui.part("wish"), webui.part("options").of_dial
    asked = wish.read((custom(),), read)
    sizes = {False: (64, 64)}
    assert measuring.answer(asked, sizes) == "64x64: not measured yet"
    for args in ((), ON):
        for _ in range(3):
            webui.job(*args)
    assert measuring.answer(asked, sizes) == f"64x64: {TOLD}"
    assert measuring.answer(wish.read((custom(0.6),), read), sizes) == "64x64: not measured yet"
    assert measuring.answer(asked, {False: (72, 64)}) == "72x64: not measured yet"


def test_other_prompts_and_extensions_are_other_cases(webui):
    webui.job()
    webui.job(extra_generation_params={"ControlNet 0": "canny"})
    webui.job(batch_size=2)
    assert len(known(webui)) == 3
    p = Processing(webui, ())
    params = [SimpleNamespace(text_cond=torch.zeros(1, tokens, 8), text_uncond={"crossattn": torch.zeros(1, 77, 8)})
              for tokens in (77, 154)]  # fmt: skip
    assert [webui.part("host").beside(p, one) for one in params] == [
        [(1, 77, 8), (1, 77, 8)], [(1, 154, 8), (1, 77, 8)]]
    assert webui.part("host").beside(p, SimpleNamespace()) == [None, None]
