"""Gradients through a merged model do not depend on gradient checkpointing (the 11th of tomesd's faults).

A checkpoint runs its blocks once more during the backward pass. They have to merge the same tokens then, though the
model may have been called at another size and time since.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

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

BUILD = {"diffusers": sd15, "Flux": tiny_transformers.Transformer("Flux").build, "ldm": ldm_sd1, "sgm": sgm_double}
DRAWN, TOMESDS, KEYS, IN_TIME = (
    MergeConfig(merge_mlp=True, max_downsample=2),
    MergeConfig(merge_crossattn=True, merge_mlp=True, max_downsample=2, proportional=False),
    MergeConfig(side="kv", sx=4, sy=4, ratio=0.9, refine=1),
    MergeConfig(rules=(MergeRule(ratio=0.75, min_timestep=500), MergeRule(ratio=0.25, seed=3))),
)
OFF = MergeConfig(ratio=0)
either_model = pytest.mark.parametrize("name", some_quick(["diffusers", "Flux"]))


def called(name: str, model: Any, size: Call, number: int = 0) -> torch.Tensor:
    """What the model gives for inputs of a number's seed."""
    height, width, timestep = size
    if name != "Flux":
        x, text = inputs(4, 2, height, width, seed=number)
        return (call_unet if name == "diffusers" else call_ldm)(model, x, timestep, text)
    given = tiny_transformers.at(tiny_transformers.arguments_of("Flux"), timestep / 500)
    tokens = torch.randn(1, height * width, 16, generator=torch.Generator().manual_seed(number))
    ids = tiny_transformers.flux_ids(height, width)
    return model(**{**given, "hidden_states": tokens, "img_ids": ids}, return_dict=False)[0]


def built(name: str, checkpoints: bool = True, only: str | None = None) -> Any:
    """The model as it is trained. only: in eval mode, with gradients for the parameters whose names contain this."""
    model = BUILD[name]()
    if checkpoints and hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    for module in model.modules() if checkpoints else ():
        for switch in ("checkpoint",) if name == "sgm" else ("use_checkpoint", "checkpoint"):
            if isinstance(getattr(module, switch, None), bool):
                setattr(module, switch, True)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_((only or "") in path)
    return model.train(only is None)


def gradients_of(model: Any) -> Gradients:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def gradients(name: str, calls: list[Call], config: MergeConfig, at_once: bool = False, **how: Any) -> Gradients:
    """Of the sum of all losses: each is followed by its backward pass, or one goes through all."""
    model = built(name, **how)
    with patch(model, config):
        losses = ((called(name, model, size, number) * (number + 1)).square().mean()
                  for number, size in enumerate(calls))  # fmt: skip
        for loss in [sum(losses)] if at_once else losses:
            loss.backward()
    return gradients_of(model)


def assert_same(some: Gradients, others: Gradients) -> None:
    assert some.keys() == others.keys() and some
    for name, gradient in some.items():
        scale = gradient.abs().max().item()
        assert (gradient - others[name]).abs().max().item() <= 1e-4 * scale + 3e-7, name


@pytest.mark.parametrize("of", some_quick([
    ("diffusers", DRAWN, None), ("diffusers", TOMESDS, None), ("Flux", KEYS, None), ("diffusers", IN_TIME, None),
    ("ldm", TOMESDS, None), ("sgm", DRAWN, None),
    # in eval mode; with the rest frozen, the first block's input needs no gradient itself
    ("diffusers", IN_TIME, "attn1.to_q"), ("sgm", IN_TIME, "input_blocks.1.1.transformer_blocks.0.attn1"),
    ("ldm", IN_TIME, ""),  # its checkpoint function wants a gradient of every parameter
], 3), ids=["sd15, drawn", "sd15, tomesd's", "Flux, keys", "sd15, in time", "ldm", "sgm", "sd15, eval", "sgm, eval",
            "ldm, eval"])  # fmt: skip
def test_checkpointing_changes_no_gradient_and_one_backward_pass_may_go_through_several_calls(of):
    name, config, only = of
    plain = gradients(name, CALLS, config, checkpoints=False, only=only)
    assert_same(plain, gradients(name, CALLS, config, only=only))
    assert_same(plain, gradients(name, CALLS, config, at_once=True, only=only))
    unmerged = gradients(name, CALLS, OFF, checkpoints=False, only=only)
    assert any((plain[one] - unmerged[one]).abs().max() > 1e-3 * plain[one].abs().max() for one in plain)


@either_model
def test_what_happens_between_a_call_and_its_backward_pass_changes_nothing(name: str):
    def call_without_gradients() -> None:
        with torch.no_grad():
            called(name, model, B)

    def call_unmerged() -> None:
        with handle.unmerged():
            called(name, model, A)

    plain, model = gradients(name, [A], DRAWN, checkpoints=False), built(name)
    with patch(model, DRAWN) as handle:
        for between in (call_without_gradients, call_unmerged, partial(called, name, model, B),
                        partial(copy.deepcopy, model)):  # fmt: skip
            model.zero_grad()
            loss = called(name, model, A).square().mean()
            between()
            loss.backward()
            assert_same(plain, gradients_of(model))


@either_model
def test_a_call_of_another_patch_is_not_run_again(name: str):
    model = built(name)
    with patch(model, TOMESDS):
        loss = called(name, model, A).square().mean()
        with patch(model, KEYS):
            with pytest.raises(RuntimeError, match="before a patch is put on or taken off"):
                loss.backward()
            model.zero_grad()
            called(name, model, A).square().mean().backward()
    assert_same(gradients(name, [A], KEYS, checkpoints=False), gradients_of(model))


@either_model
def test_a_call_that_merges_nothing_is_run_again_like_that_after_one_that_merged(name: str):
    merging, closed = (16, 16, 800), (16, 16, 300)
    for size in (merging, closed):
        model = built(name)
        with patch(model, MergeConfig(min_timestep=500)) as handle:
            called(name, model, merging)
            assert handle.report().merged_anything
            with handle.unmerged() if size is merging else nullcontext():
                loss = called(name, model, size).square().mean()
            loss.backward()
        assert_same(gradients(name, [size], OFF, checkpoints=False), gradients_of(model))
