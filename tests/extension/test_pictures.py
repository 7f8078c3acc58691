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
    answer = webui.part("measuring").answer
    wish = webui.part("job_settings").read(ON, webui.part("settings_tab").default_of)
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


STRANGER = SimpleNamespace(x=None, sigma=torch.ones(1), denoiser=SimpleNamespace(p=object()))
HYPERTILE = {"__webui_hypertile_params": SimpleNamespace(enabled=True)}
# what each does to the webui; what the job is given besides
SPOILING = {
    "stopped": lambda webui: setattr(webui.shared, "state", SimpleNamespace(interrupted=True)),
    "skipped": lambda webui: setattr(webui.shared, "state", SimpleNamespace(skipped=True)),
    "another samples inside of a step": lambda webui: {
        "at_step": lambda step: step == 1 and webui.call("cfg_denoiser", STRANGER)},
    "a refiner goes on": lambda webui: {"refiner": ldm_of_one_level()},
    "HyperTile is on": lambda webui: webui.shared.opts.data.update(hypertile_enable_unet=True),
    "HyperTile stays on": lambda webui: vars(webui.unet).update(HYPERTILE),
}  # fmt: skip


@pytest.mark.parametrize("args", [(), ON], ids=["off", "on"])
@pytest.mark.parametrize("spoil", SPOILING.values(), ids=SPOILING)
def test_what_was_not_whole_or_not_one_models_own_time_counts_for_nothing(webui, monkeypatch, spoil, args):
    monkeypatch.setattr(webui.engine("measuring.pictures"), "_CALLS", 1)
    more = spoil(webui) or {}
    assert webui.job(*args, **more).latents.isfinite().all()
    assert not known(webui)


def test_neither_does_what_failed_was_to_merge_and_did_not_is_merged_by_the_webui_or_unknown(webui, monkeypatch):
    monkeypatch.setattr(webui.engine("measuring.pictures"), "_CALLS", 1)
    for args in ((), ON):
        with pytest.raises(ZeroDivisionError):
            webui.job(*args, at_step=lambda step: step < 3 or 1 / 0)
    assert "so few tokens" in webui.job(True, 0.5).comments
    webui.shared.opts.data["token_merging_ratio"] = 0.9
    webui.job()
    webui.shared.opts.data["token_merging_ratio"] = 0.0

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
