"""A pass gets its times from its sampler; no step waits for the device if the sampler is known."""

import inspect

import pytest
import torch

from tests.host_doubles.webuis import FLAVOURS, ON, CFGDenoiserTimesteps, Denoiser, Processing, custom, sample_euler
from tests.thoroughness import some_quick
from tests.watching.on_device import on_device

RANGE = (custom(end=0.6),)  # timesteps 999, 800 and 500 of 999 come before its end


@pytest.fixture
def flavour():
    """A webui whose samplers have their list on the device."""
    return "forge"


@pytest.fixture(autouse=True)
def far(webui, waits):
    webui.place = on_device


@pytest.mark.parametrize("flavour", some_quick(FLAVOURS, 2))
def test_a_pass_waits_once_at_most_however_many_steps_it_has_and_its_picture_is_the_same(webui, waits):
    once = ["tolist"] if webui.is_forge else []  # A1111's list is on the CPU
    for denoiser in (Denoiser, CFGDenoiserTimesteps):
        waits.clear()
        webui.place = on_device
        job = webui.job(*RANGE, denoiser=denoiser, enable_hr=True, n_iter=2)
        assert "first pass: 3 of 4 steps, " in job.comments and waits == once * 4, "each pass of each batch has a list"
        webui.place = lambda x: x
        assert torch.equal(webui.job(*RANGE, denoiser=denoiser, enable_hr=True, n_iter=2).latents, job.latents)


def test_a_sampler_of_another_pack_is_waited_for_at_each_step(webui, waits, monkeypatch):
    monkeypatch.setattr(sample_euler, "__module__", "another.pack")
    assert "own settings, 3 of 4 steps, " in webui.job(*RANGE).comments and waits == ["__float__"] * 4


def test_a_sampler_keeps_its_parameters_and_is_left_as_it_was_found(webui, waits):
    webui.job(*ON)
    assert waits == [], "settings without a time"
    seen = []
    p = Processing(webui, RANGE, at_step=lambda step: seen.append(p.sampler.func))
    webui.process(p)
    assert seen[0] is not sample_euler and inspect.signature(seen[0]) == inspect.signature(sample_euler)
    assert p.sampler.func is sample_euler and p.sampler.steps == [0, 1, 2, 3]
    assert "callback_state" not in vars(p.sampler)
