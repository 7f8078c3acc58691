"""A pass's times are heard from its sampler; no step waits for the device where the sampler is known."""

from __future__ import annotations

import gc
import inspect
import types
import weakref

import pytest
import torch

from tests.on_device import on_device
from tests.webui_doubles import FLAVOURS, CFGDenoiserTimesteps, Denoiser, Processing, custom, ddim, sample_euler

RANGE = (custom(end=0.6),)  # before it lie 999, 800 and 500 of 999
ON = (custom(),)


def of_another_pack(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return sample_euler(model, x, sigmas, extra_args, callback, disable)


def sample_dpm_fast(model, x, sigma_min=0.1, extra_args=None, callback=None, disable=None):
    return sample_euler(model, x, (0.0,) * 9, extra_args, callback, disable)


sample_dpm_fast.__module__ = sample_euler.__module__


def backwards(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """Reports other steps than the next ones."""
    return sample_euler(model, x, sigmas, extra_args, lambda d: callback({**d, "i": 3 - d["i"]}), disable)


backwards.__module__, backwards.__name__ = sample_euler.__module__, "sample_heun"


pytestmark = pytest.mark.usefixtures("small", "waits")


@pytest.fixture
def flavour():
    """Whose list is on the device."""
    return "forge"


@pytest.fixture(autouse=True)
def far(webui):
    webui.is_on_device = True


all_webuis = pytest.mark.parametrize("flavour", FLAVOURS)


def expected_waits(webui):
    """A1111's list is on the CPU."""
    return ["tolist"] if webui.has_uncond_first else []


@all_webuis
@pytest.mark.parametrize("denoiser", [Denoiser, CFGDenoiserTimesteps])
def test_a_pass_waits_once_at_most_however_many_steps_it_has(webui, waits, denoiser):
    done = webui.job(*RANGE, denoiser=denoiser)
    assert "own settings, 3 of 4 steps, " in done.comments
    assert waits == expected_waits(webui)


@all_webuis
def test_each_pass_of_each_batch_has_its_own_list(webui, waits):
    webui.job(*RANGE, enable_hr=True, n_iter=2)
    assert waits == expected_waits(webui) * 4


def test_settings_without_a_time_never_wait(webui, waits):
    webui.job(*ON)
    assert waits == []


@pytest.mark.parametrize("function", [of_another_pack, sample_dpm_fast])
def test_a_sampler_that_is_not_known_is_waited_for_at_each_step(webui, waits, function):
    done = webui.job(*RANGE, sampler_function=function)
    assert "own settings, 3 of 4 steps, " in done.comments and waits == ["__float__"] * 4


def test_a_sampler_that_leaves_its_list_is_read_from_then_on(webui, waits):
    done = webui.job(*RANGE, sampler_function=backwards)
    assert "own settings, 3 of 4 steps, " in done.comments and waits == ["tolist"] + ["__float__"] * 3


@all_webuis
@pytest.mark.parametrize("denoiser", [Denoiser, CFGDenoiserTimesteps])
def test_the_picture_is_the_same_wherever_its_times_are(webui, denoiser):
    far = webui.job(*RANGE, denoiser=denoiser).latents
    webui.is_on_device = False
    assert torch.equal(webui.job(*RANGE, denoiser=denoiser).latents, far)


@all_webuis
def test_the_sampler_reports_its_steps_as_ever_and_is_itself_again_afterwards(webui):
    seen = []

    def look(step):
        seen.append((inspect.signature(p.sampler.func), p.sampler.func is sample_euler))

    p = Processing(webui, RANGE, at_step=look)
    webui.process(p)
    assert p.sampler.steps == [0, 1, 2, 3] and p.sampler.func is sample_euler
    assert all(one[0] == inspect.signature(sample_euler) for one in seen)
    assert not seen[0][1]


def test_what_somebody_puts_over_the_sampler_stays(webui):
    def theirs(*args, **kwargs):
        return sample_euler(*args, **kwargs)

    def put(step):
        p.sampler.func = theirs

    p = Processing(webui, RANGE, at_step=put)
    webui.process(p)
    assert p.sampler.func is theirs


def test_an_aborted_jobs_sampler_is_let_go(webui):
    def fail(step):
        raise RuntimeError

    p = Processing(webui, RANGE, at_step=fail)
    with pytest.raises(RuntimeError):
        webui.process(p)
    left = weakref.ref(p.sampler)
    del p
    gc.collect()
    assert left() is None
    webui.part("merging").armed.disarm()


@all_webuis
def test_sigmas_are_told_as_if_pictures_varied_by_one(webui):
    model = webui.shared.sd_model
    relative = webui.part("host").relative
    p = Processing(webui, ON)
    assert relative(p, {"sigma": 3.0}) == {"sigma": 3.0}
    if webui.has_uncond_first:
        prediction = types.SimpleNamespace(sigma_data=0.5)
        name = "predictor" if webui.flavour == "forge" else "model_sampling"
        inner = types.SimpleNamespace(**{name: prediction})
        webui.shared.sd_model = types.SimpleNamespace(
            forge_objects=types.SimpleNamespace(unet=types.SimpleNamespace(model=inner))
        )
        assert relative(p, {"sigma": 3.0}) == {"sigma": 6.0} and relative(p, {"timestep": 9.0}) == {"timestep": 9.0}
        webui.shared.sd_model = model


def test_a_time_just_below_zero_is_zero(webui):
    """UniPC's last, by a rounding."""
    params = types.SimpleNamespace(sigma=on_device(torch.tensor([-1e-7])), denoiser=None)
    assert webui.part("host").read_time(params) == {"sigma": 0.0}


def test_ddim_is_the_webuis_own(webui):
    assert webui.part("pace")._list_of(ddim) == "timesteps" and webui.part("pace")._list_of(None) == ""
