"""A pass that begins late leaves the work that its mark promises."""

from __future__ import annotations

import pytest
import torch

from tests import models
from tests.comfy_doubles import Guider, apply, least_checkpoint, sampler_of
from tome_core import form


def share_late(report):
    """Of the finest level's merged calls: late ones keep more keys."""
    (_, early), (_, late) = sorted((keys, calls) for (*_, keys), calls in report.levels[0].merged.items())
    return late / (early + late)


def comfy_share(continues, steps=20):
    applied = apply(least_checkpoint(), **{**form.fill("balanced"), "only_if_it_pays": False})
    merging = applied.wrappers["outer_sample"]["tome"][0].__self__
    guider = Guider(applied)
    sigma = guider.model.model_sampling.sigma
    levels = torch.tensor([*(sigma(999 * (1 - step / steps)) for step in range(steps)), 0.0])
    noise, text = models.inputs(4, 2, 16, 16)
    noise, guider.text, guider.stop = noise[:1], text, None
    late = levels[steps // 2 :]
    guider.options = {"wrappers": {"apply_model": applied.wrappers["apply_model"]}, "sample_sigmas": late}
    began = torch.zeros_like(noise) if continues else noise

    def executor(*args, **kwargs):
        return guider._outer_sample(noise, *args[1:], **kwargs)

    with torch.no_grad():
        merging.outer_sample(executor, began, torch.zeros_like(noise), sampler_of(), late, None, None, True, 0)
    return share_late(merging.latest.report)


def test_comfyui_at_a_denoise_of_a_half():
    assert comfy_share(continues=False) == pytest.approx(0.4)
    assert comfy_share(continues=True) == pytest.approx(0.7), "an advanced sampler goes on with a picture"
