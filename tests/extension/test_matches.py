"""Matches are kept over the steps of a pass, and never over passes, batches, tiles or halves of a split batch."""

from __future__ import annotations

import pytest
import torch

from tests import webui_doubles
from tests.webui_doubles import FREE, PROMPT, CFGDenoiserTimesteps, Denoiser, custom, report
from tome_core import form
from tome_core.settings.schedule import STABLE_DIFFUSION

KEPT = custom(keep=1000.0, use_rand=False)
BALANCED = {**form.fill("balanced"), **FREE}


class SplitDenoiser(Denoiser):
    """Prompt and negative prompt in calls of their own, as batch_cond_uncond has it if it is off."""

    def guided(self, x, timestep):
        cond, uncond = (self.run(x, timestep, text) for text in (PROMPT, torch.zeros_like(PROMPT)))
        return uncond + 2 * (cond - uncond)


class TiledDenoiser(Denoiser):
    """Tiled Diffusion: a call for each of a step's tiles, all of one shape, once the step was announced."""

    def guided(self, x, timestep):
        return torch.cat([self.run(tile, timestep, PROMPT) for tile in x.split(8, dim=3)], dim=3)


@pytest.mark.parametrize(("flavour", "denoiser", "matches"), [
    ("forge", Denoiser, 1), ("a1111", CFGDenoiserTimesteps, 1), ("a1111", SplitDenoiser, 1),
    ("a1111", TiledDenoiser, 2),
])  # fmt: skip
def test_a_passes_steps_and_both_prompts_have_one_match_and_each_tile_its_own(webui, monkeypatch, denoiser, matches):
    state, done = webui.engine("engine.state"), []
    match = state.match
    monkeypatch.setattr(state, "match", lambda *args: done.append(args) or match(*args))
    (level,) = report(webui.job(KEPT, denoiser=denoiser, size=16))["passes"]["first pass"]["levels"]
    assert len(done) == matches * level["blocks"] > 0


@pytest.mark.parametrize(("denoiser", "args"), [(Denoiser, BALANCED), (SplitDenoiser, KEPT), (TiledDenoiser, KEPT)])
def test_a_picture_is_the_same_after_another_and_in_a_batch_of_its_own(webui, denoiser, args):
    facts = {"enable_hr": denoiser is Denoiser, "denoiser": denoiser, "size": 16}
    both = webui.job(args, seed=7, n_iter=2, **facts).latents
    webui.job(args, seed=3, **facts)
    assert torch.equal(webui.job(args, seed=8, **facts).latents, both[1:])


@pytest.mark.parametrize("flavour", ["a1111", "forge"])
def test_every_pass_is_a_sampling_of_its_own(webui, monkeypatch):
    patch, names = webui.engine("hosting").Patch, set()
    set_time = patch.set_time
    monkeypatch.setattr(patch, "set_time", lambda self, **time: names.add(time["sampling"]) or set_time(self, **time))
    webui.job(KEPT, enable_hr=True, n_iter=2)
    assert len(names) == 4, "two batches of two passes"


@pytest.mark.parametrize(("flavour", "denoiser"), [("a1111", Denoiser), ("forge", CFGDenoiserTimesteps)])
def test_a_hires_pass_which_begins_late_leaves_the_work_that_its_mark_promises(webui, monkeypatch, denoiser):
    times = tuple(500.0 - 50 * step for step in range(10))
    monkeypatch.setattr(webui_doubles, "SIGMAS", tuple(STABLE_DIFFUSION.sigma_of(time) for time in times))
    monkeypatch.setattr(webui_doubles, "TIMESTEPS", times)
    levels = report(webui.job(BALANCED, enable_hr=True, denoiser=denoiser))["passes"]["hires pass"]["levels"]
    early, late = sorted(levels[0]["merged"], key=lambda kind: kind["keys"])
    assert late["calls"] / (early["calls"] + late["calls"]) == pytest.approx(0.4)
