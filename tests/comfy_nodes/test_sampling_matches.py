"""Matches kept over the steps of a sampling, and never over samplings, tiles or the halves of a split batch."""

from __future__ import annotations

import pytest
import torch

import tome_core
from comfy_nodes.sampling import HostSampling
from tests.comfy_doubles import FlowGuider, Guider, apply, latest, least_checkpoint, transformer
from tome_core.engine import state

FOREVER = {"ratio": 0.5, "keep": 1000.0, "use_rand": False}
BALANCED = {**tome_core.form.fill("balanced"), "only_if_it_pays": False}  # the pictures are small ones


class SplitGuider(Guider):
    """Both prompts in calls of their own, as if memory were short."""

    shift, orders = 0.0, ((0, 1),)  # of the positive one's latents; of the calls, step by step

    def _call(self, pair, now):
        first, *others = self.orders
        outs, self.orders = {}, (*others, first)
        for half in first:
            x, text = pair.chunk(2)[half] + half * self.shift, self.text.chunk(2)[half]
            options = {**self.options, "cond_or_uncond": [1 - half], "uuids": [self.options["uuids"][half]]}
            outs[half] = self.model.apply_model(x, now.expand(len(x)), text, options)
        return torch.cat([outs[0], outs[1]])


class ShiftedGuider(SplitGuider):
    """Of two pictures."""

    shift = 1.0


class SwappingGuider(ShiftedGuider):
    """In another order at each step."""

    orders = ((0, 1), (1, 0))


class TiledGuider(Guider):
    """A step is a call for each tile: Tiled Diffusion, MultiDiffusion."""

    def _call(self, pair, now):
        return torch.cat([super(TiledGuider, self)._call(tile, now) for tile in pair.split(8, dim=3)], dim=3)


class PerturbingGuider(Guider):
    """Another call of the positive prompt at each step, told by a key of its own to shuffle its tokens."""

    def _call(self, pair, now):
        options = {**self.options, "cond_or_uncond": [0], "uuids": ["positive"], "tpg": True}
        out = super()._call(pair, now)
        self.model.apply_model(pair[1:], now.expand(1), self.text[1:], options)
        return out


def fresh(**values):
    return apply(least_checkpoint(), **(values or FOREVER))


@pytest.mark.parametrize(("guider", "matches"), [
    (Guider, 1), (SplitGuider, 1), (ShiftedGuider, 2), (PerturbingGuider, 1 + 3),
])  # fmt: skip
def test_both_prompts_have_one_match_however_the_batch_is_cut_and_a_perturbed_call_its_own(work, guider, matches):
    """Token Perturbation Guidance draws another order of the tokens at each step."""
    patcher = fresh()
    guider(patcher).sample(steps=3, batch=1 if guider is PerturbingGuider else 2)
    assert work == ["match"] * matches * latest(patcher).report.levels[0].blocks


def test_a_call_is_known_by_its_conditions_and_not_by_its_place_in_the_step():
    assert torch.equal(SwappingGuider(fresh()).sample(), ShiftedGuider(fresh()).sample())


def test_a_transformers_matches_are_kept_by_block_and_one_serves_both_conditions(work, monkeypatch):
    rows, plain = [], state.match
    monkeypatch.setattr(state, "match", lambda k, *args: rows.append(len(k)) or plain(k, *args))
    patcher = apply(transformer(), merge_what="k+v", ratio=0.75, use_rand=False, keep=400.0, refine=1)
    FlowGuider(patcher).sample(steps=4)  # at 1000, 750, 500, 250
    assert work == ["match", "match", "renew", "renew"] and rows == [1] * 4, "of two in a batch"


def test_a_window_of_a_film_keeps_its_matches_to_itself():
    """A window of some of the frames, for both prompts, is as large a batch as all frames for one."""
    sampling = HostSampling(noise=torch.zeros(4, 4, 8, 8))
    for batch, conditions, pictures in ((8, [1, 0], 4), (4, [1], 4), (4, [1, 0], None), (4, None, None)):
        options = {} if conditions is None else {"cond_or_uncond": conditions}
        assert sampling.pictures_in(torch.zeros(batch, 4, 8, 8), options) == pictures
    assert HostSampling().pictures_in(torch.zeros(4, 4, 8, 8), {"cond_or_uncond": [1]}) is None


@pytest.mark.parametrize(("guider", "values"), [(Guider, BALANCED), (ShiftedGuider, FOREVER), (TiledGuider, BALANCED)])
def test_a_picture_is_the_same_after_others_and_after_a_fresh_start(guider, values):
    """Ultimate SD Upscale: many samplings with one model, tile after tile."""
    applied = fresh(**values)
    guider(applied).sample(seed=1)
    guider(applied).sample(steps=1, size=(8, 24))
    assert torch.equal(guider(applied).sample(seed=2), guider(fresh(**values)).sample(seed=2))


def test_a_tile_is_what_it_is_alone():
    class Alone(Guider):
        def _outer_sample(self, noise, *args):
            return super()._outer_sample(noise.split(8, dim=3)[self.place_of_tile], *args)

    size, alone = (8, 20), []  # the last one is smaller
    for Alone.place_of_tile in range(3):
        alone.append(Alone(fresh()).sample(size=size))
    assert torch.equal(TiledGuider(fresh()).sample(size=size), torch.cat(alone, dim=3))
