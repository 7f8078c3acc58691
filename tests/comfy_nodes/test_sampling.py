"""A sampling's noise levels are read once, and no step waits for the device if the sampler is known."""

from __future__ import annotations

import types

import pytest
import torch

import tome_core
from comfy_nodes import host
from comfy_nodes.sampling import HostSampling, timestep_of
from tests.comfy_doubles import DiscreteSampling, Executor, Guider, apply, least_checkpoint, sampler_of
from tests.comfy_transformer import FlowGuider, transformer
from tests.models import inputs
from tests.on_device import on_device
from tome_core.engine.state import State

RANGE = {"ratio": 0.5, "start": 0.2, "end": 0.6, "use_rand": False}
KEPT = {"ratio": 0.5, "keep": 1000.0, "use_rand": False}
BALANCED = {**tome_core.form.fill("balanced"), "only_if_it_pays": False}
KNOWN = sampler_of()
pytestmark = pytest.mark.usefixtures("waits")
UNKNOWN = (
    None, sampler_of("dpm_fast_function", "comfy.samplers"), sampler_of("sample_dpm_adaptive"),
    sampler_of("sample_euler", "custom_nodes.samplers"),
)  # fmt: skip


class DeviceGuider(Guider):
    is_on_device = True


def applied(**values):
    return apply(least_checkpoint(), **values)


def test_a_sampling_waits_once_however_many_steps_it_has(waits):
    for steps, values in ((2, RANGE), (6, RANGE), (3, KEPT), (3, BALANCED)):
        waits.clear()
        DeviceGuider(applied(**values)).sample(steps=steps, size=(8, 8), sampler=KNOWN)
        assert waits == ["tolist"], values


def test_settings_without_a_time_never_wait_and_a_sampler_that_is_not_known_is_waited_for_at_each_call(waits):
    DeviceGuider(applied(ratio=0.5)).sample(size=(8, 8), sampler=KNOWN)
    assert waits == []
    for sampler in UNKNOWN:
        DeviceGuider(applied(**KEPT)).sample(steps=3, size=(8, 8), sampler=sampler)
        assert waits == ["__float__"] * 3, sampler
        waits.clear()


@pytest.mark.parametrize("values", [RANGE, KEPT], ids=["range", "kept"])
def test_the_picture_is_the_same_wherever_its_noise_levels_are(values):
    expected = Guider(applied(**values)).sample(size=(8, 8))
    for sampler in (KNOWN, None):
        assert torch.equal(DeviceGuider(applied(**values)).sample(size=(8, 8), sampler=sampler), expected)


class Odd(DeviceGuider):
    """Reports other steps than the next ones."""

    def _outer_sample(self, noise, latent, sampler, sigmas, *args):
        told = args[1]
        odd = (args[0], lambda step, *more: told(2 * step, *more), *args[2:])
        return super()._outer_sample(noise, latent, sampler, sigmas, *odd)


def test_a_sampler_that_leaves_its_list_is_read_from_then_on(waits):
    expected = Guider(applied(**RANGE)).sample(steps=6, size=(8, 8))
    assert torch.equal(Odd(applied(**RANGE)).sample(steps=6, size=(8, 8), sampler=KNOWN), expected)
    assert waits == ["tolist"] + ["__float__"] * 4, "steps 0 and 1 fit: 0 was reported, then 2"


def test_the_list_in_force_is_the_one_behind_all_other_wrappers():
    first = HostSampling(KNOWN, on_device(torch.tensor([9.0, 8.0, 0.0])))
    listed = {"sample_sigmas": on_device(torch.tensor([5.0, 3.0, 0.0]))}
    assert first.sigma(on_device(torch.tensor([5.0])), listed) == 5
    other = {"sample_sigmas": on_device(torch.tensor([4.0, 2.0, 0.0]))}  # a sampling inside, by the same callback
    assert first.sigma(on_device(torch.tensor([4.0])), other) == 4
    assert first.sigma(on_device(torch.tensor([7.0])), listed) == 7, "it is no longer relied on"


def test_calls_inside_a_step_have_its_end():
    sampling = HostSampling(KNOWN, on_device(torch.tensor([9.0, 8.0, 7.0, 0.0])))
    heard, t, seen = sampling.heard.listening(None), on_device(torch.tensor([1.0])), []
    for step in range(3):
        seen.append(sampling.sigma(t, {}))  # the step's first call
        heard(step, None, None, 3)
        seen.append(sampling.sigma(t, {}))  # Heun's second
    assert seen == [9, 8, 8, 7, 7, 7]


def test_steps_that_easycache_leaves_out_are_told_of_a_sampler_that_reports_its_steps():
    leaves_out = {"easycache": types.SimpleNamespace(name="EasyCache", skip_current_step=True)}
    sampling = HostSampling(KNOWN, torch.ones(4))
    sampling.note_call({})
    assert sampling.text == "3 steps"
    heard = sampling.heard.listening(None)
    for step, options in enumerate(({}, leaves_out, {})):
        sampling.note_call(options)
        heard(step, None, None, 3)
    assert sampling.text == "3 steps, 2 of them computed"


@pytest.mark.parametrize(
    ("load", "guider", "first"), [(least_checkpoint, Guider, 999), (transformer, FlowGuider, 1000)]
)
def test_each_step_draws_by_its_timestep(load, guider, first, monkeypatch):
    stamps, plain = [], State.begin
    monkeypatch.setattr(State, "begin", lambda self, timestep, *more: stamps.append(timestep) or plain(
        self, timestep, *more))  # fmt: skip
    guider(apply(load(), ratio=0.5)).sample(steps=4, size=(8, 8))
    assert [one.tolist() for one in stamps] == [[round(first * share)] * 2 for share in (1, 0.75, 0.5, 0.25)]


def test_the_callback_is_called_as_ever_by_place_or_by_keyword_or_is_none():
    seen = []
    branch = applied(**KEPT)
    Guider(branch).sample(steps=3, size=(8, 8), callback=lambda *args: seen.append((args[0], len(args))))
    assert seen == [(0, 4), (1, 4), (2, 4)]

    def sample(noise, latent, sampler, sigmas, denoise_mask=None, callback=None):
        callback(0, None, None, 1)
        return noise

    chain = Executor(sample, None, branch.wrappers["outer_sample"]["tome"])
    assert chain.execute(1, 2, None, torch.ones(2)) == 1 and len(seen) == 3
    chain.execute(1, 2, None, torch.ones(2), callback=lambda *args: seen.append(args))
    assert seen[3:] == [(0, None, None, 1)]


# --- start and end ---------------------------------------------------------------------------------------------------


def test_a_range_holds_the_steps_whose_sigma_lies_in_it():
    """And those of the ends themselves, of which 0 and 1 are beyond every step."""
    sampling, levels = HostSampling(), DiscreteSampling()
    for start, end in ((0.0, 0.5), (0.3, 0.6), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)):
        for time in (999, 749.25, 699.3, 499.5, 250, 0.001, 0):
            within = start <= 1 - time / 999 <= end and start < 1 and end > 0
            assert sampling.is_between(start, end, levels.sigma(time), levels) == within, (start, end, time)


def test_the_range_is_asked_for_once_a_sampling_and_only_where_rules_have_one():
    """Each question may wait for the device."""
    for values, asked in ((RANGE, 2), (KEPT, 0)):
        branch = applied(**values)
        DeviceGuider(branch).sample(steps=6, size=(8, 8), sampler=KNOWN)
        assert branch.model.model_sampling.asked == asked


def test_the_range_is_the_asked_models_own():
    sampling, (one, other) = HostSampling(), (DiscreteSampling(), DiscreteSampling())
    other.sigmas = other.sigmas * 2
    middle = one.percent_to_sigma(0.5)
    assert [sampling.is_between(0.0, 0.5, middle, each) for each in (one, other, one)] == [True, False, True]


# --- timesteps -------------------------------------------------------------------------------------------------------


def test_a_noise_level_that_is_none_breaks_nothing():
    class Broken(Guider):
        sigma: float

        def _call(self, pair, now):
            options = {**self.options, "sigmas": now[None]}
            self.model.model_sampling.timestep = lambda t: torch.full((len(pair),), 500.0)
            return self.model.apply_model(pair, torch.full((len(pair),), self.sigma), self.text, options)

    for sigma in (float("nan"), float("inf"), -1.0):
        Broken.sigma = sigma
        assert Broken(applied(**RANGE)).sample(steps=2, size=(8, 8)).isfinite().all()


def test_sigmas_are_told_as_if_pictures_varied_by_one():
    eps = types.SimpleNamespace(sigma_data=1.0)
    edm = types.SimpleNamespace(sigma_data=0.5)
    flow = type("ModelSampling", (type("Flow", (), {}), type("CONST", (), {})), {})()

    def told(sigma, model_sampling, flows=False):
        return timestep_of(sigma, model_sampling, flows)

    assert told(3.0, object()) == told(3.0, eps) and told(3.0, edm) == told(6.0, eps)
    assert told(0.75, flow) == told(3.0, eps) and told(0.0, flow) == told(0.0, eps)
    assert told(1.0, flow) == told(1e5, eps) > told(6.0, eps)
    assert told(0.75, flow, flows=True) == 750 and told(3.0, eps, flows=True) == told(3.0, eps)


@pytest.mark.parametrize(("continues", "share"), [(False, 0.4), (True, 0.7)])
def test_a_sampling_that_begins_late_leaves_the_work_that_its_mark_promises(continues, share):
    """At a denoise of a half; an advanced sampler goes on with a picture, without noise of its own."""

    class Late(Guider):
        def sigmas(self, steps):
            return super().sigmas(2 * steps)[steps:]

        def _outer_sample(self, noise, *args):
            return super()._outer_sample(inputs(4, 1, 16, 16)[0], *args)

    branch = applied(**BALANCED)
    first = {"first": [lambda run, noise, *args: run(noise * (not continues), *args)]}
    branch.wrappers["outer_sample"] = first | branch.wrappers["outer_sample"]
    Late(branch).sample(steps=10, sampler=KNOWN)
    merged = host.find_attached(branch).latest.report.levels[0].merged
    (_, early), (_, late) = sorted((keys, calls) for (*_, keys), calls in merged.items())  # late ones keep more keys
    assert late / (early + late) == pytest.approx(share)
