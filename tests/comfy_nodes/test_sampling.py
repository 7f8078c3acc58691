"""A sampling's noise levels, read once if its sampler is known; matches kept over its steps and no further."""

from types import SimpleNamespace

import pytest
import torch

import tome_core
from comfy_nodes.sampling import HostSampling, timestep_of
from tests.host_doubles.comfy import Guider, apply, latest, least_checkpoint, sampler_of, transformer
from tests.small_models.unets import inputs
from tests.watching.on_device import on_device
from tome_core.engine import state

RANGE = {"ratio": 0.5, "start": 0.2, "end": 0.6, "use_rand": False}
KEPT = {"ratio": 0.5, "keep": 1000.0, "use_rand": False}
BALANCED = {**tome_core.form.values_at("balanced"), "only_if_it_pays": False}  # the pictures are small ones
KNOWN = sampler_of()
UNKNOWN = (None, sampler_of("dpm_fast_function", "comfy.samplers"), sampler_of("sample_dpm_adaptive"),
           sampler_of("sample_euler", "custom_nodes.samplers"))  # fmt: skip
pytestmark = pytest.mark.usefixtures("waits")


class DeviceGuider(Guider):
    """A guider whose levels are on the device, where each read is counted."""

    place = staticmethod(on_device)


def sample(guider=DeviceGuider, sampler=KNOWN, steps=3, **values) -> torch.Tensor:
    return guider(apply(least_checkpoint(), **values)).sample(steps=steps, sampler=sampler)


def test_a_sampling_waits_once_however_many_steps_it_has_and_at_each_call_if_its_sampler_is_not_known(waits):
    for sampler, steps, values, waited in (
        (KNOWN, 2, RANGE, ["tolist"]), (KNOWN, 6, RANGE, ["tolist"]), (KNOWN, 3, KEPT, ["tolist"]),
        (KNOWN, 3, BALANCED, ["tolist"]), (KNOWN, 3, {"ratio": 0.5}, []),
        *((sampler, 3, KEPT, ["__float__"] * 3) for sampler in UNKNOWN)):  # fmt: skip
        waits.clear()
        sample(sampler=sampler, steps=steps, **values)
        assert waits == waited, (sampler, values)


def test_a_picture_is_the_same_wherever_its_noise_levels_are_and_whether_its_sampler_is_known():
    expected = sample(Guider, steps=6, **RANGE)
    assert all(torch.equal(sample(sampler=sampler, steps=6, **RANGE), expected) for sampler in (KNOWN, None))


def test_steps_that_easycache_leaves_out_are_told_of_a_sampler_that_reports_its_steps():
    sampling = HostSampling(KNOWN, torch.ones(4))
    heard = sampling.timed_steps.counting_callback(None)
    for step in range(3):
        sampling.note_call({"easycache": SimpleNamespace(name="EasyCache", skip_current_step=step == 1)})
        heard(step, None, None, 3)
    assert sampling.text == "3 steps, 2 of them computed"


def test_sigmas_are_told_as_if_pictures_varied_by_one():
    eps, edm = SimpleNamespace(sigma_data=1.0), SimpleNamespace(sigma_data=0.5)
    flow = type("ModelSampling", (type("Flow", (), {}), type("CONST", (), {})), {})()

    def time_of(sigma, model_sampling):
        return timestep_of(sigma, model_sampling, flow_timesteps=False)

    assert time_of(3.0, object()) == time_of(3.0, eps) and time_of(3.0, edm) == time_of(6.0, eps)
    assert time_of(0.75, flow) == time_of(3.0, eps) and time_of(0.0, flow) == time_of(0.0, eps)
    assert time_of(1.0, flow) == time_of(1e5, eps) > time_of(6.0, eps)
    assert timestep_of(0.75, flow, flow_timesteps=True) == 750
    assert timestep_of(3.0, eps, flow_timesteps=True) == time_of(3.0, eps)


@pytest.mark.parametrize(("continues", "share"), [(False, 0.4), (True, 0.7)])
def test_a_sampling_that_begins_late_leaves_the_work_that_its_mark_promises(continues, share):
    """The denoise is a half; an advanced sampler continues a picture and adds no noise."""

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


class SplitGuider(Guider):
    """A guider that calls the model once for each prompt, as if memory were short."""

    shift = 0.0

    def _call(self, pair, now):
        outs = []
        for half, (x, text) in enumerate(zip(pair.chunk(2), self.text.chunk(2), strict=True)):
            options = {**self.options, "cond_or_uncond": [1 - half], "uuids": [self.options["uuids"][half]]}
            outs.append(self.model.apply_model(x + half * self.shift, now.expand(len(x)), text, options))
        return torch.cat(outs)


class ShiftedGuider(SplitGuider):
    """A guider that gives each prompt another picture."""

    shift = 1.0


class TiledGuider(Guider):
    """A guider that calls the model once for each tile, as Tiled Diffusion and MultiDiffusion do."""

    def _call(self, pair, now):
        return torch.cat([super(TiledGuider, self)._call(tile, now) for tile in pair.split(8, dim=3)], dim=3)


def fresh():
    return apply(least_checkpoint(), **KEPT)


@pytest.mark.parametrize(("guider", "matches"), [(Guider, 1), (SplitGuider, 1), (ShiftedGuider, 2)])
def test_both_prompts_have_one_match_however_the_batch_is_cut(work, guider, matches):
    patcher = fresh()
    guider(patcher).sample(steps=3, batch=2)
    assert work == ["match"] * matches * latest(patcher).report.levels[0].blocks


def test_a_transformers_matches_are_kept_by_block_and_one_serves_both_conditions(work, monkeypatch):
    rows, plain = [], state.match
    monkeypatch.setattr(state, "match", lambda k, *args: rows.append(len(k)) or plain(k, *args))
    patcher = apply(transformer(), merge_what="k+v", ratio=0.75, use_rand=False, keep=400.0, refine=1)
    Guider(patcher).sample(steps=4)  # the steps are at 1000, 750, 500, 250
    assert work == ["match", "match", "renew", "renew"] and rows == [1] * 4, "of two in a batch"


def test_a_picture_is_the_same_after_others_and_after_a_fresh_start():
    """Ultimate SD Upscale does many samplings with one model, tile after tile."""
    applied, again = (TiledGuider(apply(least_checkpoint(), **BALANCED)) for _ in range(2))
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
