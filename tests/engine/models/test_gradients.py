"""Gradients through a merged model do not depend on gradient checkpointing (the 11th of tomesd's faults).

A checkpoint runs its blocks once more during the backward pass. They have to merge the same tokens then, though the
model may have been called at another size and time since.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from tests import tiny_transformers
from tests.models import call_ldm, call_unet, inputs, ldm_sd1, sd15, sgm_double
from tests.thoroughness import some_quick
from tome_core import MergeConfig, MergeRule, patch

# LDM's own checkpoint function calls what torch renamed since
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.*autocast")

Call = tuple[int, int, float]  # height and width of the latent, timestep


class Setup(NamedTuple):
    """A model, how it is called with inputs of a number's seed, and how its checkpointing is switched."""

    build: Callable[[], Any]
    call: Callable[[Any, Call, int], torch.Tensor]
    switch: Callable[[Any, bool], None]


def _as_unet(call: Callable) -> Callable:
    def run(model, size: Call, number: int) -> torch.Tensor:
        x, text = inputs(4, 2, *size[:2], seed=number)
        return call(model, x, size[2], text)

    return run


def _as_flux(model, size: Call, number: int) -> torch.Tensor:
    height, width, timestep = size
    given = tiny_transformers.at(tiny_transformers.arguments_of("Flux"), timestep / 500)
    tokens = torch.randn(1, height * width, 16, generator=torch.Generator().manual_seed(number))
    ids = tiny_transformers.flux_ids(height, width)
    return model(**{**given, "hidden_states": tokens, "img_ids": ids}, return_dict=False)[0]


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
    "diffusers": Setup(sd15, _as_unet(call_unet), _switch_diffusers),
    "ldm": Setup(ldm_sd1, _as_unet(call_ldm), _switch_ldm),
    "sgm": Setup(sgm_double, _as_unet(call_ldm), _switch_blocks),
    "Flux": Setup(lambda: tiny_transformers.build("Flux"), _as_flux, _switch_diffusers),
}
every_setup = pytest.mark.parametrize("setup", some_quick(SETUPS.values()), ids=list(SETUPS))
CALLS = {
    "one call": [(16, 16, 500)],
    "two sizes and times": [(16, 16, 10), (24, 16, 900)],
    "two shapes of equally many tokens": [(32, 16, 10), (16, 32, 10)],
    "the same size at two times": [(16, 16, 10), (16, 16, 900)],
    "the same call twice": [(16, 16, 10), (16, 16, 10)],
}
CONFIGS = {
    "random destinations": MergeConfig(merge_mlp=True, max_downsample=2),
    "tomesd's": MergeConfig(merge_crossattn=True, merge_mlp=True, max_downsample=2, proportional=False),
    "keys": MergeConfig(side="kv", sx=4, sy=4, ratio=0.9, refine=1),
    "rules by time": MergeConfig(rules=(MergeRule(ratio=0.75, min_timestep=500), MergeRule(ratio=0.25, seed=3))),
}
every_config = pytest.mark.parametrize("config", some_quick(CONFIGS.values(), 2), ids=list(CONFIGS))
A, B = (16, 16, 10), (24, 16, 900)


def grads(model) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def made(setup: Setup, checkpointing: bool, train: bool = True, only: str = "") -> Any:
    """The model, with gradients for the parameters whose names contain ``only``."""
    model = setup.build()
    setup.switch(model, checkpointing)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(only in name)
    return model.train(train)


def loss_of(setup: Setup, model, size: Call, number: int = 0) -> torch.Tensor:
    return (setup.call(model, size, number) * (number + 1)).square().mean()


def one_by_one(setup: Setup, calls: list[Call], config, checkpointing: bool, **how: Any) -> dict[str, torch.Tensor]:
    """Gradients of the sum of all losses, each of which is followed by its backward pass."""
    model = made(setup, checkpointing, **how)
    with patch(model, config):
        for number, size in enumerate(calls):
            loss_of(setup, model, size, number).backward()
    return grads(model)


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys() and one
    for name, gradient in one.items():
        scale = gradient.abs().max().item()
        assert (gradient - other[name]).abs().max().item() <= 1e-4 * scale + 1e-7, name


@every_setup
@every_config
@pytest.mark.parametrize("calls", CALLS.values(), ids=list(CALLS))
def test_checkpointing_changes_no_gradient(setup: Setup, calls, config):
    plain = one_by_one(setup, calls, config, checkpointing=False)
    assert_same(plain, one_by_one(setup, calls, config, checkpointing=True))
    unmerged = one_by_one(setup, calls, MergeConfig(ratio=0), checkpointing=False)
    assert any((plain[name] - unmerged[name]).abs().max() > 1e-3 * plain[name].abs().max() for name in plain)


@every_setup
@every_config
@pytest.mark.parametrize("calls", [calls for calls in CALLS.values() if len(calls) > 1], ids=lambda one: str(one[1:]))
def test_one_backward_pass_may_go_through_several_calls(setup: Setup, calls, config):
    model = made(setup, True)
    with patch(model, config):
        sum(loss_of(setup, model, size, number) for number, size in enumerate(calls)).backward()
    assert_same(one_by_one(setup, calls, config, checkpointing=False), grads(model))


def _calls_without_gradients(setup: Setup, model, handle) -> None:
    with torch.no_grad():
        setup.call(model, B, 1)


def _copies(setup: Setup, model, handle) -> None:
    copy.deepcopy(model)


def _calls_at_another_time_and_size(setup: Setup, model, handle) -> None:
    setup.call(model, B, 1)


def _calls_unmerged(setup: Setup, model, handle) -> None:
    with handle.unmerged():
        setup.call(model, A, 1)


@every_setup
@pytest.mark.parametrize("between", [
    _calls_without_gradients, _copies, _calls_at_another_time_and_size, _calls_unmerged,
], ids=lambda one: one.__name__.strip("_"))  # fmt: skip
def test_what_happens_between_a_call_and_its_backward_pass_changes_nothing(setup: Setup, between):
    config = CONFIGS["random destinations"]
    model = made(setup, True)
    with patch(model, config) as handle:
        loss = loss_of(setup, model, A)
        between(setup, model, handle)
        loss.backward()
    assert_same(one_by_one(setup, [A], config, checkpointing=False), grads(model))


@every_setup
def test_a_call_of_another_patch_is_not_run_again(setup: Setup):
    model = made(setup, True)
    with patch(model, CONFIGS["tomesd's"]):
        loss = loss_of(setup, model, A)
        with patch(model, CONFIGS["keys"]):
            with pytest.raises(RuntimeError, match="before a patch is put on or taken off"):
                loss.backward()
            model.zero_grad()
            loss_of(setup, model, A).backward()
    assert_same(one_by_one(setup, [A], CONFIGS["keys"], checkpointing=False), grads(model))


@every_setup
@pytest.mark.parametrize("off", [False, True], ids=["no rule holds", "merging is off"])
def test_a_call_that_merges_nothing_is_run_again_like_that_after_one_that_merged(setup: Setup, off: bool):
    config, model = MergeConfig(min_timestep=500), made(setup, True)
    size = (16, 16, 800 if off else 300)
    with patch(model, config) as handle:
        setup.call(model, (16, 16, 800), 0)
        assert handle.report().merged_anything
        with handle.unmerged() if off else nullcontext():
            loss = loss_of(setup, model, size)
        loss.backward()
    assert_same(one_by_one(setup, [size], MergeConfig(ratio=0), checkpointing=False), grads(model))


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
        one_by_one(SETUPS[name], CALLS["two sizes and times"], CONFIGS["rules by time"], on, train=False, only=only)
        for on in (False, True)
    )
    assert_same(plain, checkpointed)
