"""A sampling's noise levels, which are read once if its sampler is known, and the matches that are kept over its steps.

Matches are never kept over samplings, tiles or the halves of a split batch.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tome_core
from comfy_nodes.sampling import HostSampling, timestep_of
from tests.comfy_doubles import DiscreteSampling, Guider, apply, latest, least_checkpoint, sampler_of, transformer
from tests.models import inputs
from tests.on_device import on_device
from tome_core.engine import state

RANGE = {"ratio": 0.5, "start": 0.2, "end": 0.6, "use_rand": False}
KEPT = {"ratio": 0.5, "keep": 1000.0, "use_rand": False}
BALANCED = {**tome_core.form.fill("balanced"), "only_if_it_pays": False}  # the pictures are small ones
KNOWN = sampler_of()
UNKNOWN = (
    None, sampler_of("dpm_fast_function", "comfy.samplers"), sampler_of("sample_dpm_adaptive"),
    sampler_of("sample_euler", "custom_nodes.samplers"),
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("waits")


class DeviceGuider(Guider):
    """Its levels are on the device, where reading them is counted."""

    place = staticmethod(on_device)


def sample(guider=DeviceGuider, sampler=KNOWN, steps=3, **values) -> torch.Tensor:
    return guider(apply(least_checkpoint(), **values)).sample(steps=steps, sampler=sampler)


# --- noise levels ----------------------------------------------------------------------------------------------------


def test_a_sampling_waits_once_however_many_steps_it_has_and_at_each_call_if_its_sampler_is_not_known(waits):
    for sampler, steps, values, waited in (
        (KNOWN, 2, RANGE, ["tolist"]), (KNOWN, 6, RANGE, ["tolist"]), (KNOWN, 3, KEPT, ["tolist"]),
        (KNOWN, 3, BALANCED, ["tolist"]), (KNOWN, 3, {"ratio": 0.5}, []),
        *((sampler, 3, KEPT, ["__float__"] * 3) for sampler in UNKNOWN),
    ):  # fmt: skip
        waits.clear()
        sample(sampler=sampler, steps=steps, **values)
        assert waits == waited, (sampler, values)


class Odd(DeviceGuider):
    """Reports other steps than the next ones."""

    def _outer_sample(self, noise, latent, sampler, sigmas, mask, told, *more):
        return super()._outer_sample(noise, latent, sampler, sigmas, mask, lambda step, *args: told(2 * step, *args))


def test_a_picture_is_the_same_wherever_its_noise_levels_are_and_whatever_its_sampler_reports(waits):
    expected = sample(Guider, steps=6, **RANGE)
    assert all(torch.equal(sample(sampler=sampler, steps=6, **RANGE), expected) for sampler in (KNOWN, None))
    waits.clear()
    assert torch.equal(sample(Odd, steps=6, **RANGE), expected)
    assert waits == ["tolist"] + ["__float__"] * 4, "steps 0 and 1 fit: 0 was reported, then 2"


def test_the_list_in_force_is_the_one_behind_all_other_wrappers():
    listed, inside, stray = (on_device(torch.tensor(levels)) for levels in ([5.0, 3.0, 0.0], [4.0, 2.0, 0.0], [7.0]))
    sampling = HostSampling(KNOWN, on_device(torch.tensor([9.0, 8.0, 0.0])))
    for levels, used in ((listed, listed), (inside, inside), (stray, listed)):  # from the second on it is not relied on
        assert sampling.sigma(levels[:1], {"sample_sigmas": used}) == levels.tolist()[0]


def test_calls_inside_a_step_have_its_end():
    sampling, level = HostSampling(KNOWN, on_device(torch.tensor([9.0, 8, 7, 0]))), on_device(torch.ones(1))
    heard, seen = sampling.timed_steps.counting_callback(None), []
    for step in range(3):
        seen.append(sampling.sigma(level, {}))  # the step's first call
        heard(step, None, None, 3)
        seen.append(sampling.sigma(level, {}))  # Heun's second
    assert seen == [9, 8, 8, 7, 7, 7]


def test_steps_that_easycache_leaves_out_are_told_of_a_sampler_that_reports_its_steps():
    sampling = HostSampling(KNOWN, torch.ones(4))
    heard = sampling.timed_steps.counting_callback(None)
    for step in range(3):
        sampling.note_call({"easycache": SimpleNamespace(name="EasyCache", skip_current_step=step == 1)})
        heard(step, None, None, 3)
    assert sampling.text == "3 steps, 2 of them computed"


@pytest.mark.parametrize(("load", "first"), [(least_checkpoint, 999), (transformer, 1000)])
def test_each_step_draws_by_its_timestep(load, first, monkeypatch):
    stamps, plain = [], state.State.begin
    monkeypatch.setattr(state.State, "begin", lambda self, timestep, *more: stamps.append(timestep) or plain(
        self, timestep, *more))  # fmt: skip
    Guider(apply(load(), ratio=0.5)).sample(steps=4)
    assert torch.stack(stamps)[:, 0].tolist() == pytest.approx([first, 0.75 * first, first / 2, first / 4], abs=1)


def test_a_range_holds_the_steps_whose_sigma_lies_in_it():
    """And those of the ends themselves, of which 0 and 1 are beyond every step."""
    sampling, model = HostSampling(), DiscreteSampling()
    for start, end in ((0.0, 0.5), (0.3, 0.6), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)):
        for time in (999, 749.25, 699.3, 499.5, 250, 0.001, 0):
            within = start <= 1 - time / 999 <= end and start < 1 and end > 0
            assert sampling.is_between(start, end, model.sigma(time), model) == within, (start, end, time)


def test_sigmas_are_told_as_if_pictures_varied_by_one():
    eps, edm = SimpleNamespace(sigma_data=1.0), SimpleNamespace(sigma_data=0.5)
    flow = type("ModelSampling", (type("Flow", (), {}), type("CONST", (), {})), {})()

    def told(sigma, model_sampling):
        return timestep_of(sigma, model_sampling, flows=False)

    assert told(3.0, object()) == told(3.0, eps) and told(3.0, edm) == told(6.0, eps)
    assert told(0.75, flow) == told(3.0, eps) and told(0.0, flow) == told(0.0, eps)
    assert told(1.0, flow) == told(1e5, eps) > told(6.0, eps)
    assert timestep_of(0.75, flow, flows=True) == 750 and timestep_of(3.0, eps, flows=True) == told(3.0, eps)


@pytest.mark.parametrize(("continues", "share"), [(False, 0.4), (True, 0.7)])
def test_a_sampling_that_begins_late_leaves_the_work_that_its_mark_promises(continues, share):
    """At a denoise of a half; an advanced sampler goes on with a picture, without noise of its own."""

    class Late(Guider):
        def sigmas(self, steps):
            return super().sigmas(2 * steps)[steps:]

        def _outer_sample(self, noise, *args):
            return super()._outer_sample(inputs(4, 1, 8, 8)[0], *args)

    branch = apply(least_checkpoint(), **BALANCED)
    first = {"first": [lambda run, noise, *args: run(noise * (not continues), *args)]}
    branch.wrappers["outer_sample"] = first | branch.wrappers["outer_sample"]
    Late(branch).sample(steps=10, sampler=KNOWN)
    merged = latest(branch).report.levels[0].merged
    (_, early), (_, late) = sorted((keys, calls) for (*_, keys), calls in merged.items())  # late ones keep more keys
    assert late / (early + late) == pytest.approx(share)


# --- matches ---------------------------------------------------------------------------------------------------------


class SplitGuider(Guider):
    """Both prompts in calls of their own, as if memory were short."""

    shift, order, turns = 0.0, (0, 1), False  # turns: the order changes at each step

    def _call(self, pair, now):
        outs = {}
        for half in self.order:
            x, text = pair.chunk(2)[half] + half * self.shift, self.text.chunk(2)[half]
            options = {**self.options, "cond_or_uncond": [1 - half], "uuids": [self.options["uuids"][half]]}
            outs[half] = self.model.apply_model(x, now.expand(len(x)), text, options)
        self.order = self.order[::-1] if self.turns else self.order
        return torch.cat([outs[0], outs[1]])


class ShiftedGuider(SplitGuider):
    """The two prompts have pictures of their own."""

    shift = 1.0


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


def fresh():
    return apply(least_checkpoint(), **KEPT)


@pytest.mark.parametrize(("guider", "matches"), [
    (Guider, 1), (SplitGuider, 1), (ShiftedGuider, 2), (PerturbingGuider, 1 + 3),
])  # fmt: skip
def test_both_prompts_have_one_match_however_the_batch_is_cut_and_a_perturbed_call_its_own(work, guider, matches):
    """Token Perturbation Guidance draws another order of the tokens at each step."""
    patcher = fresh()
    guider(patcher).sample(steps=3, batch=1 if guider is PerturbingGuider else 2)
    assert work == ["match"] * matches * latest(patcher).report.levels[0].blocks


def test_a_call_is_known_by_its_conditions_and_not_by_its_place_in_the_step():
    turning = ShiftedGuider(fresh())
    turning.turns = True
    assert torch.equal(turning.sample(), ShiftedGuider(fresh()).sample())


def test_a_transformers_matches_are_kept_by_block_and_one_serves_both_conditions(work, monkeypatch):
    rows, plain = [], state.match
    monkeypatch.setattr(state, "match", lambda k, *args: rows.append(len(k)) or plain(k, *args))
    patcher = apply(transformer(), merge_what="k+v", ratio=0.75, use_rand=False, keep=400.0, refine=1)
    Guider(patcher).sample(steps=4)  # at 1000, 750, 500, 250
    assert work == ["match", "match", "renew", "renew"] and rows == [1] * 4, "of two in a batch"


def test_a_window_of_a_film_keeps_its_matches_to_itself():
    """A window of some of the frames, for both prompts, is as large a batch as all frames for one."""
    sampling = HostSampling(noise=torch.zeros(4, 4, 8, 8))
    for batch, conditions, pictures in ((8, [1, 0], 4), (4, [1], 4), (4, [1, 0], None), (4, None, None)):
        options = {} if conditions is None else {"cond_or_uncond": conditions}
        assert sampling.pictures_in(torch.zeros(batch, 4, 8, 8), options) == pictures


@pytest.mark.parametrize(("guider", "values"), [(ShiftedGuider, KEPT), (TiledGuider, BALANCED)])
def test_a_picture_is_the_same_after_others_and_after_a_fresh_start(guider, values):
    """Ultimate SD Upscale: many samplings with one model, tile after tile."""
    applied, again = (guider(apply(least_checkpoint(), **values)) for _ in range(2))
    large = {"steps": 4, "size": (8, 16)}
    applied.sample(seed=1, **large)
    applied.sample(steps=1)
    assert torch.equal(applied.sample(seed=2, **large), again.sample(seed=2, **large))


def test_a_tile_is_what_it_is_alone():
    class Alone(Guider):
        def _outer_sample(self, noise, *args):
            return super()._outer_sample(noise.split(8, dim=3)[self.place_of_tile], *args)

    size, alone = (8, 20), []  # the last one is smaller
    for Alone.place_of_tile in range(3):
        alone.append(Alone(fresh()).sample(size=size))
    assert torch.equal(TiledGuider(fresh()).sample(size=size), torch.cat(alone, dim=3))
