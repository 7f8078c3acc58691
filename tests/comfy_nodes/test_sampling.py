"""A sampling's noise levels are read once, and no step waits for the device if the sampler is known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tome_core
from comfy_nodes.sampling import HostSampling, timestep_of
from tests import comfy_doubles
from tests.comfy_doubles import DiscreteSampling, Guider, apply, latest, least_checkpoint, sampler_of
from tests.models import inputs
from tests.on_device import on_device
from tome_core.engine.state import State

RANGE = {"ratio": 0.5, "start": 0.2, "end": 0.6, "use_rand": False}
KEPT = {"ratio": 0.5, "keep": 1000.0, "use_rand": False}
BALANCED = {**tome_core.form.fill("balanced"), "only_if_it_pays": False}
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
    return guider(apply(least_checkpoint(), **values)).sample(steps=steps, size=(8, 8), sampler=sampler)


def test_a_sampling_waits_once_however_many_steps_it_has_and_at_each_call_if_its_sampler_is_not_known(waits):
    for sampler, steps, values, waited in (
        (KNOWN, 2, RANGE, ["tolist"]), (KNOWN, 6, RANGE, ["tolist"]), (KNOWN, 3, KEPT, ["tolist"]),
        (KNOWN, 3, BALANCED, ["tolist"]), (KNOWN, 3, {"ratio": 0.5}, []),
        *((sampler, 3, KEPT, ["__float__"] * 3) for sampler in UNKNOWN),
    ):  # fmt: skip
        waits.clear()
        sample(sampler=sampler, steps=steps, **values)
        assert waits == waited, (sampler, values)


def test_a_picture_is_the_same_wherever_its_noise_levels_are():
    for values in (RANGE, KEPT):
        expected = sample(Guider, **values)
        assert all(torch.equal(sample(sampler=sampler, **values), expected) for sampler in (KNOWN, None))


class Odd(DeviceGuider):
    """Reports other steps than the next ones."""

    def _outer_sample(self, noise, latent, sampler, sigmas, mask, told, *more):
        return super()._outer_sample(noise, latent, sampler, sigmas, mask, lambda step, *args: told(2 * step, *args))


def test_a_sampler_that_leaves_its_list_is_read_from_then_on(waits):
    expected = sample(Guider, steps=6, **RANGE)
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
    leaves_out = {"easycache": SimpleNamespace(name="EasyCache", skip_current_step=True)}
    sampling = HostSampling(KNOWN, torch.ones(4))
    sampling.note_call({})
    assert sampling.text == "3 steps"
    heard = sampling.timed_steps.counting_callback(None)
    for step, options in enumerate(({}, leaves_out, {})):
        sampling.note_call(options)
        heard(step, None, None, 3)
    assert sampling.text == "3 steps, 2 of them computed"


@pytest.mark.parametrize(
    ("load", "guider", "first"),
    [(least_checkpoint, Guider, 999), (comfy_doubles.transformer, comfy_doubles.FlowGuider, 1000)],
)
def test_each_step_draws_by_its_timestep(load, guider, first, monkeypatch):
    stamps, plain = [], State.begin
    monkeypatch.setattr(State, "begin", lambda self, timestep, *more: stamps.append(timestep) or plain(
        self, timestep, *more))  # fmt: skip
    guider(apply(load(), ratio=0.5)).sample(steps=4, size=(8, 8))
    assert [stamp.tolist() for stamp in stamps] == [[round(first * share)] * 2 for share in (1, 0.75, 0.5, 0.25)]


def test_a_range_holds_the_steps_whose_sigma_lies_in_it():
    """And those of the ends themselves, of which 0 and 1 are beyond every step."""
    sampling, model = HostSampling(), DiscreteSampling()
    for start, end in ((0.0, 0.5), (0.3, 0.6), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)):
        for time in (999, 749.25, 699.3, 499.5, 250, 0.001, 0):
            within = start <= 1 - time / 999 <= end and start < 1 and end > 0
            assert sampling.is_between(start, end, model.sigma(time), model) == within, (start, end, time)


def test_a_noise_level_that_is_none_breaks_nothing():
    class Broken(Guider):
        def _call(self, pair, now):
            self.model.model_sampling.timestep = lambda t: torch.full((len(pair),), 500.0)
            return super()._call(pair, torch.tensor(self.level))

    for Broken.level in (float("nan"), float("inf"), -1.0):
        assert sample(Broken, **RANGE).isfinite().all()


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
            return super()._outer_sample(inputs(4, 1, 16, 16)[0], *args)

    branch = apply(least_checkpoint(), **BALANCED)
    first = {"first": [lambda run, noise, *args: run(noise * (not continues), *args)]}
    branch.wrappers["outer_sample"] = first | branch.wrappers["outer_sample"]
    Late(branch).sample(steps=10, sampler=KNOWN)
    merged = latest(branch).report.levels[0].merged
    (_, early), (_, late) = sorted((keys, calls) for (*_, keys), calls in merged.items())  # late ones keep more keys
    assert late / (early + late) == pytest.approx(share)
