"""Matches kept over the steps of a pass, and never over passes, batches, tiles or the halves of a split batch."""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests.thoroughness import some_quick
from tests.webui_doubles import FLAVOURS, SIGMAS, TIMESTEPS, CFGDenoiserTimesteps, Denoiser, custom, report
from tome_core import form

KEPT = {"ratio": 0.5, "keep": 1000.0, "use_rand": False}


class SplitDenoiser(Denoiser):
    """Prompt and negative prompt in calls of their own: batch_cond_uncond is off, or memory is short.

    shift: what the second call's latents are beside the first's; of one picture they are the same.
    """

    shift = 1.0

    def guided(self, x, timestep):
        halves = ((0.0, self.p.text), (self.shift, torch.zeros_like(self.p.text)))
        cond, uncond = (self.run(x + shift, timestep, text) for shift, text in halves)
        return uncond + 2 * (cond - uncond)


class CutDenoiser(SplitDenoiser):
    """Of one picture."""

    shift = 0.0


class TiledDenoiser(Denoiser):
    """Tiled Diffusion: a call for each of a step's tiles, all of one shape, once the step was announced."""

    place = None  # of the one tile that is computed; None computes all

    def guided(self, x, timestep):
        tiles = [tile if self.place not in (None, number) else self.run(tile, timestep, self.p.text)
                 for number, tile in enumerate(x.split(8, dim=3))]  # fmt: skip
        return torch.cat(tiles, dim=3)


@pytest.fixture(params=FLAVOURS)
def flavour(request):
    return request.param


only_a1111 = pytest.mark.parametrize("flavour", ["a1111"])


def args(webui, preset="", **values):
    """The list of values; of a preset without its consideration for small pictures, which these are."""
    return [custom(**{**(form.fill(preset) if preset else {}), **values, "only_if_it_pays": False})]


def few_steps(monkeypatch, steps):
    monkeypatch.setattr("tests.webui_doubles.SIGMAS", SIGMAS[:steps])
    monkeypatch.setattr("tests.webui_doubles.TIMESTEPS", TIMESTEPS[:steps])


@pytest.mark.parametrize("denoiser", [Denoiser, CFGDenoiserTimesteps])
def test_a_match_is_kept_over_the_steps_of_a_pass(webui, monkeypatch, denoiser):
    kept, anew = args(webui, **KEPT), args(webui, **{**KEPT, "keep": 0.001})
    both = [webui.job(*one, denoiser=denoiser).latents for one in (kept, anew)]
    assert not torch.equal(*both)
    few_steps(monkeypatch, 1)
    both = [webui.job(*one, denoiser=denoiser).latents for one in (kept, anew)]
    assert torch.equal(*both)


@pytest.mark.parametrize(("denoiser", "matches"), [(Denoiser, 1), (CutDenoiser, 1), (SplitDenoiser, 2)])
def test_both_prompts_have_one_match_however_the_batch_is_cut(webui, monkeypatch, denoiser, matches):
    few_steps(monkeypatch, 1)
    state, made = webui.engine("engine.state"), []
    match = state.match
    monkeypatch.setattr(state, "match", lambda *args: made.append(args) or match(*args))
    done = webui.job(*args(webui, **KEPT), denoiser=denoiser, batch_size=2)
    (level,) = report(done)["passes"]["first pass"]["levels"]
    assert len(made) == matches * level["blocks"] > 0


@only_a1111
@pytest.mark.parametrize("what", some_quick(["kept", *tome_core.PRESETS], 2))
@pytest.mark.parametrize("steps", some_quick([4, 1]))
@pytest.mark.parametrize("denoiser", [Denoiser, SplitDenoiser, TiledDenoiser])
def test_a_picture_is_the_same_after_another_and_after_a_fresh_start(webui, monkeypatch, denoiser, steps, what):
    few_steps(monkeypatch, steps)
    given = args(webui, **KEPT) if what == "kept" else args(webui, what)
    facts = {"enable_hr": denoiser is Denoiser, "denoiser": denoiser}
    first = webui.job(*given, seed=8, **facts)
    webui.job(*given, seed=3, **facts)
    assert torch.equal(webui.job(*given, seed=8, **facts).latents, first.latents)
    webui.reload()
    assert torch.equal(webui.job(*given, seed=8, **facts).latents, first.latents)


def test_a_batch_is_what_it_is_alone_and_draws_from_its_own_first_seed(webui):
    given = args(webui, **{**KEPT, "use_rand": True})
    both = webui.job(*given, n_iter=2, seed=7).latents
    assert torch.equal(both[1:], webui.job(*given, seed=8).latents)


def test_every_pass_is_a_sampling_of_its_own(webui):
    armed, seen = webui.part("merging").armed, {}

    def look(step):
        if step in range(len(SIGMAS)):
            seen[id(armed._pace)] = armed._pace  # kept, so that no other gets its id

    webui.job(*args(webui, **KEPT), enable_hr=True, n_iter=2, at_step=look)
    assert len(seen) == 4, "two batches of two passes"


@only_a1111
@pytest.mark.parametrize("place", [0, 1])
def test_a_tile_is_what_it_is_alone(webui, place):
    given = args(webui, **KEPT)
    together = webui.job(*given, denoiser=TiledDenoiser).latents
    alone = webui.job(*given, denoiser=type("One", (TiledDenoiser,), {"place": place})).latents
    ours = slice(8 * place, 8 * place + 8)
    assert torch.equal(together[..., ours], alone[..., ours]) and not torch.equal(together, alone)
