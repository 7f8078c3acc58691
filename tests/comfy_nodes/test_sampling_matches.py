"""Matches kept over the steps of a sampling, and never over samplings, tiles or the halves of a split batch."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch

import tome_core
from comfy_nodes import branch, host
from comfy_nodes.sampling import HostSampling
from tests.comfy_doubles import Guider, apply, least_checkpoint
from tests.thoroughness import some_quick

FOREVER = {"ratio": 0.5, "keep": 1000.0, "use_rand": False}


class SplitGuider(Guider):
    """Both prompts in calls of their own, as where memory is short.

    shift: what the positive one's latents are beside the other's; of one picture they are the same.
    """

    shift = 1.0

    def _call(self, pair: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        outs, options = [], {**self.options, "sigmas": now[None]}
        for which, shift, x, text in zip((1, 0), (0.0, self.shift), pair.chunk(2), self.text.chunk(2), strict=True):
            of_one = {**options, "cond_or_uncond": [which], "uuids": [self.options["uuids"][1 - which]]}
            outs.append(self.model.apply_model(x + shift, now.expand(len(x)), text, of_one))
        return torch.cat(outs)


class CutGuider(SplitGuider):
    """Of one picture."""

    shift = 0.0


class TiledGuider(Guider):
    """A step is a call for each tile: Tiled Diffusion, MultiDiffusion."""

    def _call(self, pair: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(TiledGuider, self)._call(tile, now) for tile in pair.split(8, dim=3)], dim=3)


def fresh(**values) -> Any:
    return apply(least_checkpoint(), **(values or FOREVER))


def test_a_match_is_kept_over_the_steps_of_a_sampling():
    anew = {**FOREVER, "keep": 0.001}
    assert not torch.equal(Guider(fresh()).sample(), Guider(fresh(**anew)).sample())
    assert torch.equal(Guider(fresh()).sample(steps=1), Guider(fresh(**anew)).sample(steps=1))


@pytest.mark.parametrize(("guider", "matches"), [(Guider, 1), (CutGuider, 1), (SplitGuider, 2)])
def test_both_prompts_have_one_match_however_the_batch_is_cut(work, guider, matches):
    patcher = fresh()
    guider(patcher).sample(batch=2)
    (level,) = host.find_attached(patcher).latest.report.levels
    assert work == ["match"] * matches * level.blocks


class PerturbingGuider(Guider):
    """Another call of the positive prompt at each step, told by a key of its own to shuffle its tokens."""

    def _call(self, pair: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        out, of_one = super()._call(pair, now), slice(1, 2)
        options = {**self.options, "sigmas": now[None], "cond_or_uncond": [0], "uuids": ["positive"], "tpg": True}
        self.model.apply_model(pair[of_one], now.expand(1), self.text[of_one], options)
        return out


def test_a_call_that_is_perturbed_has_a_match_of_its_own_at_every_step(work):
    """Token Perturbation Guidance draws another order of the tokens at each."""
    patcher = fresh()
    PerturbingGuider(patcher).sample(steps=3)
    (level,) = host.find_attached(patcher).latest.report.levels
    assert work == ["match"] * (1 + 3) * level.blocks


def test_a_window_of_a_film_keeps_its_matches_to_itself():
    """A window of some of the frames, for both prompts, is as large a batch as all frames for one."""
    sampling = HostSampling(noise=torch.zeros(4, 4, 8, 8))
    assert sampling.pictures_in(torch.zeros(8, 4, 8, 8), {"cond_or_uncond": [1, 0]}) == 4
    assert sampling.pictures_in(torch.zeros(4, 4, 8, 8), {"cond_or_uncond": [1]}) == 4
    assert sampling.pictures_in(torch.zeros(4, 4, 8, 8), {"cond_or_uncond": [1, 0]}) is None
    assert sampling.pictures_in(torch.zeros(4, 4, 8, 8), {}) is None
    assert HostSampling().pictures_in(torch.zeros(4, 4, 8, 8), {"cond_or_uncond": [1]}) is None


# the pictures are small ones
PRESETS = [{**tome_core.form.fill(name), "only_if_it_pays": False} for name in tome_core.PRESETS]


@pytest.mark.parametrize("values", some_quick([FOREVER, *PRESETS], 2), ids=["forever", *tome_core.PRESETS])
@pytest.mark.parametrize("steps", some_quick([4, 1]))
@pytest.mark.parametrize("guider", [Guider, SplitGuider, TiledGuider])
def test_a_picture_is_the_same_after_others_and_after_a_fresh_start(guider, steps, values):
    """Ultimate SD Upscale: many samplings with one model, tile after tile."""
    applied = fresh(**values)
    guider(applied).sample(steps=steps, seed=1)
    guider(applied).sample(steps=1, size=(8, 24))
    assert torch.equal(guider(applied).sample(steps=steps, seed=2), guider(fresh(**values)).sample(steps=steps, seed=2))


@pytest.mark.parametrize("steps", [1, 4])
def test_a_tile_is_what_it_is_alone(steps):
    size = 8, 20  # the last one is smaller
    together = TiledGuider(fresh()).sample(steps=steps, size=size)
    alone = [Guider.sample(_Cut(fresh(), place), steps=steps, size=size) for place in range(3)]
    assert torch.equal(together, torch.cat(alone, dim=3))


class _Cut(TiledGuider):
    """One tile of the picture."""

    def __init__(self, patcher: Any, place: int) -> None:
        super().__init__(patcher)
        self.place = place

    def _outer_sample(self, noise: Any, *args: Any) -> torch.Tensor:
        return super()._outer_sample(noise[..., 8 * self.place : 8 * self.place + 8], *args)


def test_a_sampling_inside_a_sampling_has_matches_of_its_own():
    applied, alone = fresh(), Guider(fresh()).sample(seed=3)
    inner = []
    outer = Guider(applied).sample(steps=2, seed=4, stop=lambda step: inner.append(Guider(applied).sample(seed=3)))
    assert all(torch.equal(one, alone) for one in inner) and outer.isfinite().all()


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_of_a_sampling_is_kept_nor_of_one_that_broke_off(error, monkeypatch):
    states, make = [], branch.Sampling._make

    def made(self, *args):
        merging = make(self, *args)
        states.append(weakref.ref(merging.state))
        return merging

    def fail(step):
        raise error

    monkeypatch.setattr(branch.Sampling, "_make", made)
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        Guider(fresh()).sample(stop=error and fail)
    gc.collect()
    assert len(states) == 1 and states[0]() is None
