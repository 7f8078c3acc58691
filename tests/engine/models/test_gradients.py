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
A, B = (16, 16, 10), (24, 16, 900)
# another size and time, two shapes of equally many tokens, the same size at another time, the same call again
CALLS = [A, B, (32, 16, 10), (16, 32, 10), (16, 16, 900), A]
Gradients = dict[str, torch.Tensor]


class Setup(NamedTuple):
    """A model, how it is called with inputs of a number's seed, and how its checkpointing is switched on."""

    build: Callable[[], Any]
    call: Callable[[Any, Call, int], torch.Tensor]
    checkpoint: Callable[[Any], None]


def _as_unet(call: Callable) -> Callable:
    def run(model: Any, size: Call, number: int) -> torch.Tensor:
        x, text = inputs(4, 2, *size[:2], seed=number)
        return call(model, x, size[2], text)

    return run


def _as_flux(model: Any, size: Call, number: int) -> torch.Tensor:
    height, width, timestep = size
    given = tiny_transformers.at(tiny_transformers.arguments_of("Flux"), timestep / 500)
    tokens = torch.randn(1, height * width, 16, generator=torch.Generator().manual_seed(number))
    ids = tiny_transformers.flux_ids(height, width)
    return model(**{**given, "hidden_states": tokens, "img_ids": ids}, return_dict=False)[0]


def _of_diffusers(model: Any) -> None:
    model.enable_gradient_checkpointing()


def _by(*names: str) -> Callable[[Any], None]:
    """The attributes of modules that switch it on."""

    def switch(model: Any) -> None:
        for module in model.modules():
            for name in names:
                if isinstance(getattr(module, name, None), bool):
                    setattr(module, name, True)

    return switch


SETUPS = {
    "diffusers": Setup(sd15, _as_unet(call_unet), _of_diffusers),
    "Flux": Setup(lambda: tiny_transformers.build("Flux"), _as_flux, _of_diffusers),
    "ldm": Setup(ldm_sd1, _as_unet(call_ldm), _by("use_checkpoint", "checkpoint")),
    "sgm": Setup(sgm_double, _as_unet(call_ldm), _by("checkpoint")),
}
DRAWN, TOMESDS, KEYS, IN_TIME = (
    MergeConfig(merge_mlp=True, max_downsample=2),
    MergeConfig(merge_crossattn=True, merge_mlp=True, max_downsample=2, proportional=False),
    MergeConfig(side="kv", sx=4, sy=4, ratio=0.9, refine=1),
    MergeConfig(rules=(MergeRule(ratio=0.75, min_timestep=500), MergeRule(ratio=0.25, seed=3))),
)
OFF = MergeConfig(ratio=0)
either_setup = pytest.mark.parametrize("name", some_quick(["diffusers", "Flux"]))


def built(setup: Setup, checkpoints: bool, train: bool = True, only: str = "") -> Any:
    """The model, with gradients for the parameters whose names contain ``only``."""
    model = setup.build()
    if checkpoints:
        setup.checkpoint(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(only in name)
    return model.train(train)


def loss_of(setup: Setup, model: Any, size: Call, number: int = 0) -> torch.Tensor:
    return (setup.call(model, size, number) * (number + 1)).square().mean()


def gradients(
    name: str, calls: list[Call], config: MergeConfig, checkpoints: bool = False, at_once: bool = False, **how: Any
) -> Gradients:
    """Of the sum of all losses: each is followed by its backward pass, or one goes through all."""
    setup = SETUPS[name]
    model = built(setup, checkpoints, **how)
    with patch(model, config):
        if at_once:
            sum(loss_of(setup, model, size, number) for number, size in enumerate(calls)).backward()
        else:
            for number, size in enumerate(calls):
                loss_of(setup, model, size, number).backward()
    return gradients_of(model)


def gradients_of(model: Any) -> Gradients:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_same(some: Gradients, others: Gradients) -> None:
    assert some.keys() == others.keys() and some
    for name, gradient in some.items():
        scale = gradient.abs().max().item()
        assert (gradient - others[name]).abs().max().item() <= 1e-4 * scale + 1e-7, name


@pytest.mark.parametrize("of", some_quick([
    ("diffusers", DRAWN), ("diffusers", TOMESDS), ("Flux", KEYS), ("diffusers", KEYS), ("diffusers", IN_TIME),
    ("ldm", TOMESDS), ("sgm", DRAWN),
], 3), ids=["sd15, drawn", "sd15, tomesd's", "Flux, keys", "sd15, keys", "sd15, in time", "ldm", "sgm"])  # fmt: skip
def test_checkpointing_changes_no_gradient_and_one_backward_pass_may_go_through_several_calls(of):
    name, config = of
    plain = gradients(name, CALLS, config)
    assert_same(plain, gradients(name, CALLS, config, checkpoints=True))
    assert_same(plain, gradients(name, CALLS, config, checkpoints=True, at_once=True))
    unmerged = gradients(name, CALLS, OFF)
    assert any((plain[one] - unmerged[one]).abs().max() > 1e-3 * plain[one].abs().max() for one in plain)


def _calls_without_gradients(setup: Setup, model: Any, handle: Any) -> None:
    with torch.no_grad():
        setup.call(model, B, 1)


def _calls_unmerged(setup: Setup, model: Any, handle: Any) -> None:
    with handle.unmerged():
        setup.call(model, A, 1)


BETWEEN = (_calls_without_gradients, _calls_unmerged, lambda setup, model, handle: setup.call(model, B, 1),
           lambda setup, model, handle: copy.deepcopy(model))  # fmt: skip


@either_setup
def test_what_happens_between_a_call_and_its_backward_pass_changes_nothing(name: str):
    setup, plain = SETUPS[name], gradients(name, [A], DRAWN)
    model = built(setup, checkpoints=True)
    with patch(model, DRAWN) as handle:
        for between in BETWEEN:
            model.zero_grad()
            loss = loss_of(setup, model, A)
            between(setup, model, handle)
            loss.backward()
            assert_same(plain, gradients_of(model))


@either_setup
def test_a_call_of_another_patch_is_not_run_again(name: str):
    setup = SETUPS[name]
    model = built(setup, checkpoints=True)
    with patch(model, TOMESDS):
        loss = loss_of(setup, model, A)
        with patch(model, KEYS):
            with pytest.raises(RuntimeError, match="before a patch is put on or taken off"):
                loss.backward()
            model.zero_grad()
            loss_of(setup, model, A).backward()
    assert_same(gradients(name, [A], KEYS), gradients_of(model))


@either_setup
@pytest.mark.parametrize("off", [False, True], ids=["no rule holds", "merging is off"])
def test_a_call_that_merges_nothing_is_run_again_like_that_after_one_that_merged(name: str, off: bool):
    setup, size = SETUPS[name], (16, 16, 800 if off else 300)
    model = built(setup, checkpoints=True)
    with patch(model, MergeConfig(min_timestep=500)) as handle:
        setup.call(model, (16, 16, 800), 0)
        assert handle.report().merged_anything
        with handle.unmerged() if off else nullcontext():
            loss = loss_of(setup, model, size)
        loss.backward()
    assert_same(gradients(name, [size], OFF), gradients_of(model))


@pytest.mark.parametrize("of", some_quick([
    ("diffusers", "attn1.to_q"),
    ("ldm", ""),  # its checkpoint function wants a gradient of every parameter
    ("sgm", "input_blocks.1.1.transformer_blocks.0.attn1"),
]))  # fmt: skip
def test_checkpointing_changes_no_gradient_of_a_model_in_eval_mode(of: tuple[str, str]):
    """With the rest frozen, the first block's input needs no gradient itself."""
    name, how = of[0], {"train": False, "only": of[1]}
    assert_same(gradients(name, [A, B], IN_TIME, **how), gradients(name, [A, B], IN_TIME, checkpoints=True, **how))
