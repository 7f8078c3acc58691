"""A sampling's noise levels are read once; no step waits for the device where the sampler is known."""

from __future__ import annotations

import types

import pytest
import torch

import tome_core
from comfy_nodes.sampling import HostSampling, timestep_of
from tests.comfy_doubles import DiscreteSampling, Executor, Guider, apply, least_checkpoint, sampler_of
from tests.comfy_transformer import FlowGuider, transformer
from tests.on_device import on_device
from tome_core.engine.state import State

RANGE = {"ratio": 0.5, "start": 0.2, "end": 0.6, "use_rand": False}
KEPT = {"ratio": 0.5, "keep": 1000.0, "use_rand": False}
PRESETS = [{**tome_core.form.fill(name), "only_if_it_pays": False} for name in tome_core.PRESETS]
KNOWN = sampler_of()
pytestmark = pytest.mark.usefixtures("waits")
UNKNOWN = {
    "no sampler": None,
    "DPM fast": sampler_of("dpm_fast_function", "comfy.samplers"),
    "DPM adaptive": sampler_of("sample_dpm_adaptive"),
    "another pack's": sampler_of("sample_euler", "custom_nodes.samplers"),
}


class DeviceGuider(Guider):
    is_on_device = True


def applied(**values):
    return apply(least_checkpoint(), **values)


@pytest.mark.parametrize("values", [RANGE, KEPT, *PRESETS], ids=["range", "kept", *tome_core.PRESETS])
def test_a_sampling_waits_once_however_many_steps_it_has(values, waits):
    for steps in (2, 6):
        waits.clear()
        DeviceGuider(applied(**values)).sample(steps=steps, size=(8, 8), sampler=KNOWN)
        assert waits == ["tolist"]


def test_settings_without_a_time_never_wait(waits):
    DeviceGuider(applied(ratio=0.5)).sample(size=(8, 8), sampler=KNOWN)
    assert waits == []


@pytest.mark.parametrize("sampler", UNKNOWN.values(), ids=UNKNOWN)
def test_a_sampler_that_is_not_known_is_waited_for_at_each_call(sampler, waits):
    DeviceGuider(applied(**KEPT)).sample(steps=5, size=(8, 8), sampler=sampler)
    assert waits == ["__float__"] * 5


@pytest.mark.parametrize("values", [RANGE, KEPT], ids=["range", "kept"])
@pytest.mark.parametrize("sampler", [KNOWN, None], ids=["known", "unknown"])
def test_the_picture_is_the_same_wherever_its_noise_levels_are(values, sampler):
    expected = Guider(applied(**values)).sample(steps=5)
    assert torch.equal(DeviceGuider(applied(**values)).sample(steps=5, sampler=sampler), expected)


class Odd(DeviceGuider):
    """Reports other steps than the next ones."""

    def _outer_sample(self, noise, latent, sampler, sigmas, *args):
        told = args[1]
        odd = (args[0], lambda step, *more: told(2 * step, *more), *args[2:])
        return super()._outer_sample(noise, latent, sampler, sigmas, *odd)


def test_a_sampler_that_leaves_its_list_is_read_from_then_on(waits):
    expected = Guider(applied(**RANGE)).sample(steps=6)
    assert torch.equal(Odd(applied(**RANGE)).sample(steps=6, sampler=KNOWN), expected)
    assert waits == ["tolist"] + ["__float__"] * 4, "steps 0 and 1 fit: 0 was reported, then 2"


def test_the_list_in_force_is_the_one_behind_all_other_wrappers():
    first = HostSampling(KNOWN, on_device(torch.tensor([9.0, 8.0, 0.0])))
    listed = {"sample_sigmas": on_device(torch.tensor([5.0, 3.0, 0.0]))}
    assert first.sigma(on_device(torch.tensor([5.0])), listed) == 5
    other = {"sample_sigmas": on_device(torch.tensor([4.0, 2.0, 0.0]))}  # a sampling inside, by the same callback
    assert first.sigma(on_device(torch.tensor([4.0])), other) == 4
    assert first.sigma(on_device(torch.tensor([7.0])), listed) == 7, "it is no longer relied on"


def test_calls_inside_a_step_have_its_end_and_none_has_no_noise():
    sampling = HostSampling(KNOWN, on_device(torch.tensor([9.0, 8.0, 7.0, 0.0])))
    heard, t, seen = sampling.heard.listening(None), on_device(torch.tensor([1.0])), []
    for step in range(3):
        seen.append(sampling.sigma(t, {}))  # the step's first call
        heard(step, None, None, 3)
        seen.append(sampling.sigma(t, {}))  # Heun's second
    assert seen == [9, 8, 8, 7, 7, 7]


@pytest.mark.parametrize(
    ("load", "guider", "first"), [(least_checkpoint, Guider, 999), (transformer, FlowGuider, 1000)]
)
def test_each_step_draws_by_its_timestep(load, guider, first, monkeypatch):
    stamps, plain = [], State.begin
    monkeypatch.setattr(State, "begin", lambda self, timestep, *more: stamps.append(timestep) or plain(
        self, timestep, *more))  # fmt: skip
    guider(apply(load(), ratio=0.5)).sample(steps=4, size=(8, 8))
    assert [one.tolist() for one in stamps] == [[round(first * share)] * 2 for share in (1, 0.75, 0.5, 0.25)]


def test_the_callback_is_called_as_ever():
    told = []
    Guider(applied(**KEPT)).sample(steps=3, size=(8, 8), callback=lambda *args: told.append((args[0], len(args))))
    assert told == [(0, 4), (1, 4), (2, 4)]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_callback_by_keyword_and_a_host_without_one(by_keyword):
    told = []

    def sample(noise, latent, sampler, sigmas, denoise_mask=None, callback=None):
        callback(0, None, None, 1)
        return noise

    wrapper = applied(**KEPT).wrappers["outer_sample"]["tome"][0]
    more = {"callback": lambda *args: told.append(args)} if by_keyword else {}
    assert Executor(sample, None, [wrapper]).execute(1, 2, None, torch.ones(2), **more) == 1
    assert told == [(0, None, None, 1)] * by_keyword


def test_the_range_is_asked_for_once_a_sampling_and_only_where_rules_have_one():
    """Each question may wait for the device."""
    for values, asked in ((RANGE, 2), (KEPT, 0)):
        branch = applied(**values)
        for guider in (Guider, DeviceGuider):
            branch.model.model_sampling.asked = 0
            guider(branch).sample(steps=6, size=(8, 8), sampler=KNOWN)
            assert branch.model.model_sampling.asked == asked


def test_the_range_is_the_asked_models_own():
    sampling, (one, other) = HostSampling(), (DiscreteSampling(), DiscreteSampling())
    other.sigmas = other.sigmas * 2
    middle = one.percent_to_sigma(0.5)
    assert [sampling.is_between(0.0, 0.5, middle, each) for each in (one, other, one)] == [True, False, True]


@pytest.mark.parametrize("sigma", [float("nan"), float("inf"), -1.0])
def test_a_noise_level_that_is_none_breaks_nothing(sigma):
    class Broken(Guider):
        def _call(self, pair, now):
            options = {**self.options, "sigmas": now[None]}
            self.model.model_sampling.timestep = lambda t: torch.full((len(pair),), 500.0)
            return self.model.apply_model(pair, torch.full((len(pair),), sigma), self.text, options)

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
