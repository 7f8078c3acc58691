"""A pass's times are heard from its sampler; no step waits for the device if the sampler is known."""

from __future__ import annotations

import gc
import inspect
import types
import weakref

import pytest
import torch

from tests.on_device import on_device
from tests.webui_doubles import FLAVOURS, ON, CFGDenoiserTimesteps, Denoiser, Processing, custom, sample_euler

RANGE = (custom(end=0.6),)  # before it lie 999, 800 and 500 of 999


@pytest.fixture
def flavour():
    """Whose list is on the device."""
    return "forge"


@pytest.fixture(autouse=True)
def far(webui, waits):
    webui.place = on_device


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_pass_waits_once_at_most_however_many_steps_it_has_and_its_picture_is_the_same(webui, waits):
    once = ["tolist"] if webui.is_forge else []  # A1111's list is on the CPU
    for denoiser in (Denoiser, CFGDenoiserTimesteps):
        waits.clear()
        webui.place = on_device
        job = webui.job(*RANGE, denoiser=denoiser, enable_hr=True, n_iter=2)
        assert "first pass: 6 of 8 steps, " in job.comments and waits == once * 4, "each pass of each batch has a list"
        webui.place = lambda x: x
        assert torch.equal(webui.job(*RANGE, denoiser=denoiser, enable_hr=True, n_iter=2).latents, job.latents)


def of_another_pack(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return sample_euler(model, x, sigmas, extra_args, callback, disable)


def sample_dpm_fast(model, x, sigma_min=0.1, extra_args=None, callback=None, disable=None):
    return sample_euler(model, x, (0.0,) * 9, extra_args, callback, disable)


def backwards(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """Reports other steps than the next ones."""
    return sample_euler(model, x, sigmas, extra_args, lambda state: callback({**state, "i": 3 - state["i"]}), disable)


sample_dpm_fast.__module__ = backwards.__module__ = sample_euler.__module__


@pytest.mark.parametrize(("function", "expected"), [
    (of_another_pack, ["__float__"] * 4), (sample_dpm_fast, ["__float__"] * 4),
    (backwards, ["tolist"] + ["__float__"] * 3),
])  # fmt: skip
def test_a_sampler_that_is_not_known_or_leaves_its_list_is_waited_for_at_each_step(webui, waits, function, expected):
    job = webui.job(*RANGE, sampler_function=function)
    assert "own settings, 3 of 4 steps, " in job.comments and waits == expected


def test_a_sampler_keeps_its_parameters_and_what_others_put_there_and_is_let_go(webui, waits):
    webui.job(*ON)
    assert waits == [], "settings without a time"
    seen = []
    p = Processing(webui, RANGE, at_step=lambda step: seen.append(p.sampler.func))
    webui.process(p)
    assert seen[0] is not sample_euler and inspect.signature(seen[0]) == inspect.signature(sample_euler)
    assert p.sampler.func is sample_euler and p.sampler.steps == [0, 1, 2, 3]
    assert "callback_state" not in vars(p.sampler)
    p = Processing(webui, RANGE, at_step=lambda step: setattr(p.sampler, "func", backwards))
    webui.process(p)
    assert p.sampler.func is backwards
    p = Processing(webui, RANGE, at_step=lambda step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        webui.process(p)
    left = weakref.ref(p.sampler)
    p = None
    gc.collect()
    assert left() is None, "an aborted job's"
    webui.part("merging").armed.disarm()


@pytest.mark.parametrize(("flavour", "name"), [("reforge", "model_sampling"), ("forge", "predictor")])
def test_sigmas_are_told_as_if_pictures_varied_by_one(webui, name):
    host, p = webui.part("host"), Processing(webui, ON)
    assert host.relative(p, {"sigma": 3.0}) == {"sigma": 3.0}
    setattr(webui.shared.sd_model.forge_objects.unet.model, name, types.SimpleNamespace(sigma_data=0.5))
    assert host.relative(p, {"sigma": 3.0}) == {"sigma": 6.0} and host.relative(p, {"timestep": 9.0}) == {"timestep": 9}
    below_zero = types.SimpleNamespace(sigma=on_device(torch.tensor([-1e-7])), denoiser=None)  # UniPC's last
    assert host.read_time(below_zero) == {"sigma": 0.0}
