"""Gradients through a merged UNet do not depend on gradient checkpointing (the 11th of tomesd's faults).

A checkpoint runs its blocks once more during the backward pass. They have to merge the same tokens then, though
the UNet may have been called at another size and time since.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch

from tests.models import call_ldm, call_unet, inputs, ldm_sd1, sd15, sgm_double
from tests.thoroughness import some_quick
from tome_core import MergeConfig, MergeRule, patch

# LDM's own checkpoint function calls what torch renamed since
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.*autocast")


class Setup(NamedTuple):
    """A model, how it is called, and how its checkpointing is switched."""

    build: object
    call: object
    switch: object


def _switch_diffusers(model, on: bool) -> None:
    (model.enable_gradient_checkpointing if on else model.disable_gradient_checkpointing)()


def _switch_ldm(model, on: bool) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "use_checkpoint", None), bool):
            module.use_checkpoint = on
    _switch_blocks(model, on)


def _switch_blocks(model, on: bool) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "checkpoint", None), bool):
            module.checkpoint = on


SETUPS = {
    "diffusers": Setup(sd15, call_unet, _switch_diffusers),
    "ldm": Setup(ldm_sd1, call_ldm, _switch_ldm),
    "sgm": Setup(sgm_double, call_ldm, _switch_blocks),
}
CALLS = {
    "one call": [(16, 16, 500)],
    "two sizes and times": [(16, 16, 10), (24, 16, 900)],
    "two shapes of equally many tokens": [(32, 16, 10), (16, 32, 10)],
    "the same size at two times": [(16, 16, 10), (16, 16, 900)],
    "the same call twice": [(16, 16, 10), (16, 16, 10)],
}
CONFIGS = {
    "random destinations": MergeConfig(merge_mlp=True, max_downsample=2),
    "keys": MergeConfig(side="kv", refine=1),
    "rules by time": MergeConfig(rules=(MergeRule(ratio=0.75, min_timestep=500), MergeRule(ratio=0.25, seed=3))),
}
# random destinations, which a second pass must not draw anew, with all calls; other settings with those that tell most
_TELLING = ("two sizes and times", "the same size at two times")
EACH_CONFIG_AND_CALLS = [
    pytest.param(CONFIGS[config], CALLS[calls], id=f"{config}-{calls}",
                 marks=[pytest.mark.slow] * (config != "random destinations" and calls not in _TELLING))
    for config in CONFIGS for calls in CALLS
]  # fmt: skip


def grads(model) -> dict:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(setup: Setup, calls, config, checkpointing: bool, *, train: bool = True, only: str = "") -> dict:
    """Gradients of the parameters whose names contain ``only``, of a loss over all the calls."""
    model = setup.build()
    setup.switch(model, checkpointing)
    model.train(train)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(only in name)
    loss = 0
    with patch(model, config):
        for number, (height, width, timestep) in enumerate(calls):
            x, text = inputs(4, 2, height, width, seed=number)
            loss = loss + (setup.call(model, x, timestep, text) * (number + 1)).square().mean()
        loss.backward()
    return grads(model)


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys() and one
    for name, gradient in one.items():
        scale = gradient.abs().max().item()
        assert (gradient - other[name]).abs().max().item() <= 1e-4 * scale + 1e-7, name


@pytest.mark.parametrize("setup", some_quick(SETUPS.values()), ids=list(SETUPS))
@pytest.mark.parametrize(("config", "calls"), EACH_CONFIG_AND_CALLS)
def test_checkpointing_changes_no_gradient(setup: Setup, calls, config):
    plain = gradients(setup, calls, config, checkpointing=False)
    assert_same(plain, gradients(setup, calls, config, checkpointing=True))
    unmerged = gradients(setup, calls, MergeConfig(ratio=0), checkpointing=False)
    assert any((plain[name] - unmerged[name]).abs().max() > 1e-3 * plain[name].abs().max() for name in plain)


@pytest.mark.parametrize(
    "name, only",
    [
        ("ldm", ""),  # its checkpoint function wants a gradient of every parameter
        ("sgm", "input_blocks.1.1.transformer_blocks.0.attn1"),
        ("diffusers", "down_blocks.0.attentions.0.transformer_blocks.0.attn1"),
        ("diffusers", "attn1.to_q"),
    ],
)
def test_checkpointing_changes_no_gradient_of_a_model_in_eval_mode(name: str, only: str):
    """With the rest frozen, the first block's input needs no gradient itself."""
    plain, checkpointed = (
        gradients(SETUPS[name], CALLS["two sizes and times"], CONFIGS["rules by time"], on, train=False, only=only)
        for on in (False, True)
    )
    assert_same(plain, checkpointed)


def test_a_model_copied_between_forward_and_backward_keeps_its_gradients():
    setup, config = SETUPS["diffusers"], CONFIGS["random destinations"]
    plain = gradients(setup, CALLS["one call"], config, checkpointing=False)
    model = setup.build().train()
    setup.switch(model, True)
    x, text = inputs(4, 2, 16, 16)
    with patch(model, config):
        loss = setup.call(model, x, 500, text).square().mean()
        copy.deepcopy(model)
        loss.backward()
    assert_same(plain, grads(model))


@pytest.mark.parametrize("name", ["ldm", "sgm"])
def test_a_call_that_does_not_merge_is_not_repeated_as_one_that_did_where_its_tensors_lie_now(name, monkeypatch):
    """Memory that a merged call has given back is the next one's."""
    setup, early = SETUPS[name], MergeConfig(min_timestep=500)
    plain = gradients(setup, [(16, 16, 300)], early, checkpointing=True)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda x: 0)  # all of them at one address
    model = setup.build()
    setup.switch(model, True)
    x, text = inputs(4, 2, 16, 16, seed=0)
    with patch(model.train(), early) as handle:
        setup.call(model, x, 800, text)
        assert handle.report().merged_anything
        setup.call(model, x, 300, text).square().mean().backward()
    assert_same(plain, grads(model))


@pytest.mark.parametrize("name", list(SETUPS))
def test_an_unmerged_call_of_a_model_in_training_is_nobodys_repetition(name, monkeypatch):
    """A measurement calls in turns, merged and not, and memory that the one has given back is the other's."""
    setup = SETUPS[name]
    model = setup.build().train()
    x, text = inputs(4, 2, 16, 16, seed=0)
    with torch.no_grad():
        plain = setup.call(model, x, 500, text)
        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda x: 0)  # all of them at one address
        with patch(model, MergeConfig()) as handle:
            assert not torch.equal(setup.call(model, x, 500, text), plain)
            with handle.unmerged():
                assert torch.equal(setup.call(model, x, 500, text), plain)
