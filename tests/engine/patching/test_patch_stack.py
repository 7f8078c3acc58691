"""Patches on one model, one inside the other: a UNet and a transformer keep the same laws."""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests import models, tiny_transformers


def unet():
    model, (x, text) = models.small(), models.inputs(4, 1, 16, 16)
    return model, torch.no_grad()(lambda: models.call_unet(model, x, 500, text))


def transformer():
    model, arguments = tiny_transformers.make("Flux")
    return model, lambda: tiny_transformers.call(model, arguments)


on_either = pytest.mark.parametrize("build", [unet, transformer])


def merging(model, ratio):
    return tome_core.patch(model, ratio=ratio, proportional=True)


@on_either
@pytest.mark.parametrize("entered", [False, True])
def test_leaving_an_inner_patch_brings_back_the_outer_one(build, entered):
    model, call = build()
    plain, outer = call(), merging(model, 0.25)
    if entered:
        outer.__enter__()
    first = call()
    with merging(model, 0.75) as inner:
        assert not torch.equal(call(), first)
        assert inner.is_installed and not outer.is_installed
        with merging(model, 0.5):
            assert not inner.is_installed
        assert inner.is_installed
    assert outer.is_installed and torch.equal(call(), first)
    outer.remove()
    assert torch.equal(call(), plain)


@on_either
def test_what_was_removed_meanwhile_does_not_come_back(build):
    model, call = build()
    plain = call()
    with merging(model, 0.25) as outer, merging(model, 0.75):
        outer.remove()
    assert torch.equal(call(), plain)


@on_either
def test_patches_put_on_inside_a_with_end_with_it(build):
    model, call = build()
    plain = call()
    with merging(model, 0.25):
        merging(model, 0.75)
        assert not torch.equal(call(), plain)
    assert torch.equal(call(), plain)


@on_either
def test_taking_merging_off_a_model_ends_all_of_its_patches(build):
    model, call = build()
    plain = call()
    with merging(model, 0.25), merging(model, 0.75):
        tome_core.remove_patch(model)
        assert torch.equal(call(), plain)
    assert torch.equal(call(), plain)


@on_either
def test_patches_in_a_row_do_not_pile_up(build):
    model, _ = build()
    for _ in range(3):
        latest = merging(model, 0.25)
    assert latest._previous._previous is None
