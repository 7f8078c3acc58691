"""Gradients through a merged model do not depend on checkpointing, whose second run has to merge the same tokens."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.small_models import dits
from tests.small_models.unets import call_ldm, call_unet, inputs, ldm_sd1, sd15, sgm_double
from tests.thoroughness import some_quick
from tome_core import MergeConfig, MergeRule, patch

# LDM's own checkpoint function calls what torch renamed since
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.*autocast")

Call = tuple[int, int, float]  # height and width of the latent, timestep
A, B = (16, 16, 10), (24, 16, 900)
CALLS = [A, B, (16, 32, 10), (16, 16, 900), A]
Gradients = dict[str, torch.Tensor]

BUILD = {"diffusers": sd15, "Flux": dits.Transformer("Flux").build, "ldm": ldm_sd1, "sgm": sgm_double}
DRAWN, TOMESDS, KEYS, IN_TIME = (
    MergeConfig(merge_mlp=True, max_downsample=2),
    MergeConfig(merge_crossattn=True, merge_mlp=True, max_downsample=2, proportional=False),
    MergeConfig(side="kv", sx=4, sy=4, ratio=0.9, refine=1),
    MergeConfig(rules=(MergeRule(ratio=0.75, min_timestep=500), MergeRule(ratio=0.25, seed=3))))  # fmt: skip
OFF = MergeConfig(ratio=0)


def built(name: str, checkpoints: bool = True, only: str = "") -> Any:
    """The model in training. only: part of the names of the trained parameters; all others are frozen."""
    model = BUILD[name]().train()
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(only in path)
    if checkpoints and hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    for module in model.modules():
        for switch in ("checkpoint",) if name == "sgm" else ("use_checkpoint", "checkpoint"):
            if isinstance(getattr(module, switch, None), bool):
                setattr(module, switch, checkpoints)
    return model


def loss_of(name: str, model: Any, size: Call, number: int = 0) -> torch.Tensor:
    height, width, timestep = size
    if name != "Flux":
        x, text = inputs(4, 2, height, width, seed=number)
        out = (call_unet if name == "diffusers" else call_ldm)(model, x, timestep, text)
    else:
        given = dits.at(dits.arguments_of("Flux"), timestep / 500)
        tokens = torch.randn(1, height * width, 16, generator=torch.Generator().manual_seed(number))
        ids = dits.flux_ids(height, width)
        out = model(**{**given, "hidden_states": tokens, "img_ids": ids}, return_dict=False)[0]
    return (out * (number + 1)).square().mean()


def gradients_of(model: Any) -> Gradients:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def gradients(name: str, calls: list[Call], config: MergeConfig, at_once: bool = False, **how: Any) -> Gradients:
    """Gradients of the sum of all losses: one backward pass for each loss, or one for all."""
    model = built(name, **how)
    with patch(model, config):
        losses = (loss_of(name, model, size, number) for number, size in enumerate(calls))
        for loss in [sum(losses)] if at_once else losses:
            loss.backward()
    return gradients_of(model)


def assert_same(some: Gradients, others: Gradients) -> None:
    """Assert that gradients are equal except for rounding, a share of the largest gradient."""
    assert some.keys() == others.keys() and some
    largest = max(gradient.abs().max().item() for gradient in some.values())
    for name, gradient in some.items():
        scale = gradient.abs().max().item()
        assert (gradient - others[name]).abs().max().item() <= 1e-4 * scale + 3e-8 * largest, name


@pytest.mark.parametrize("case", some_quick([
    ("diffusers", DRAWN, ""), ("Flux", KEYS, ""), ("diffusers", IN_TIME, "attn1.to_q"), ("ldm", TOMESDS, ""),
    ("sgm", DRAWN, ""),
], 2), ids=["sd15, drawn", "Flux, keys", "sd15, in time, the rest frozen", "ldm, tomesd's", "sgm, drawn"])  # fmt: skip
def test_checkpointing_changes_no_gradient_and_one_backward_pass_may_go_through_several_calls(case):
    name, config, only = case
    plain = gradients(name, CALLS, config, checkpoints=False, only=only)
    assert_same(plain, gradients(name, CALLS, config, only=only))
    assert_same(plain, gradients(name, CALLS, config, at_once=True, only=only))
    unmerged = gradients(name, CALLS, OFF, checkpoints=False, only=only)
    assert any((plain[path] - unmerged[path]).abs().max() > 1e-3 * plain[path].abs().max() for path in plain)


@pytest.mark.parametrize("name", some_quick(["diffusers", "Flux"]))
def test_what_happens_between_a_call_and_its_backward_pass_changes_nothing_but_another_patch_stops_it(name: str):
    def call_without_gradients() -> None:
        with torch.no_grad():
            loss_of(name, model, B)

    def call_unmerged() -> None:
        with handle.unmerged():
            loss_of(name, model, A)

    plain, model = gradients(name, [A], DRAWN, checkpoints=False), built(name)
    with patch(model, DRAWN) as handle:
        for between in (call_without_gradients, call_unmerged, partial(loss_of, name, model, B)):
            model.zero_grad()
            loss = loss_of(name, model, A)
            between()
            loss.backward()
            assert_same(plain, gradients_of(model))
        loss = loss_of(name, model, A)
        with patch(model, KEYS), pytest.raises(RuntimeError, match="before a patch is put on or taken off"):
            loss.backward()
