"""Attentions that the engine does not know are called as tomesd calls them: once, on merged tokens, by their own rules.

What people write: some look whether a context was given, some count their calls, two of one class need not be alike.
Those that diffusers ships are `attention/test_processors_unknown.py`'s, but for what single ones are for.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import nn

import tome_core
from tests.diffusers_processors import of_diffusers
from tests.models import BY_NAME, call_case, call_unet, inputs, merge_with_self, on_small, small

PRESETS = ("balanced", "quality")
LATE = 100
run = partial(call_case, BY_NAME["sd15"], timestep=LATE)

every_preset = pytest.mark.parametrize("name", PRESETS)


def selves(model: nn.Module) -> list[nn.Module]:
    """The self-attentions, in the order of their calls."""
    return [module for name, module in model.named_modules() if name.endswith("attn1")]


def attentions(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(("attn1", "attn2"))]


# --- the processors --------------------------------------------------------------------------------------------------


class Storing:
    """As the processor of Prompt-to-Prompt: shows every attention map to a store that counts them.

    seen: of each call, whether it was cross-attention, and how many queries it had.
    """

    def __init__(self, seen: list[tuple[bool, int]]) -> None:
        self.seen = seen

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        batch, tokens, _ = hidden_states.shape
        mask = attn.prepare_attention_mask(attention_mask, tokens, batch)
        is_cross = encoder_hidden_states is not None
        keys = encoder_hidden_states if is_cross else hidden_states
        q, k, v = (attn.head_to_batch_dim(one) for one in (attn.to_q(hidden_states), attn.to_k(keys), attn.to_v(keys)))
        shares = attn.get_attention_scores(q, k, mask)
        self.seen.append((is_cross, tokens))
        return attn.to_out[0](attn.batch_to_head_dim(shares @ v))


class Sharpened:
    """A user's own: the scale of its logits is the instance's; None leaves it to torch, by the heads' width."""

    def __init__(self, scale: float | None) -> None:
        self.scale = scale

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **_: Any):
        keys = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (one.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
                   for one in (attn.to_q(hidden_states), attn.to_k(keys), attn.to_v(keys)))  # fmt: skip
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return attn.to_out[0](out.transpose(1, 2).flatten(2))


def with_processors(processor: Any) -> nn.Module:
    model = small()
    model.set_attn_processor(processor)
    return model


# --- what holds for all of them --------------------------------------------------------------------------------------


@every_preset
def test_patching_runs_no_module_and_a_call_runs_each_attention_once(name: str, monkeypatch):
    """Known or not: nothing is tried out on tokens that are no picture's."""
    model, calls = small(), []
    for one in (AttnProcessor2_0, AttnProcessor):

        def noted(self, attn, hidden_states, *args: Any, beneath=one.__call__, **kwargs: Any):
            calls.append(hidden_states.shape[1])
            return beneath(self, attn, hidden_states, *args, **kwargs)

        monkeypatch.setattr(one, "__call__", noted)
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, _: calls.append(type(module).__name__))
    with tome_core.patch(model, on_small(name)):
        assert not calls
        run(model)
    assert 0 < len([one for one in calls if isinstance(one, int)]) <= len(attentions(model))


# --- what single ones are for ----------------------------------------------------------------------------------------


@every_preset
def test_a_store_counts_the_calls_of_the_layers_and_holds_maps_of_the_picture(name: str):
    """Prompt-to-Prompt tells layers and steps apart by counting."""
    seen: list[tuple[bool, int]] = []
    model = with_processors(Storing(seen))
    for _ in range(2):
        run(model)
    expected = list(seen)
    seen.clear()
    with tome_core.patch(model, on_small(name)):
        assert not seen
        for _ in range(2):
            run(model)
    assert [is_cross for is_cross, _ in seen] == [is_cross for is_cross, _ in expected]
    assert all(whole / 2 <= found <= whole for (_, found), (_, whole) in zip(seen, expected, strict=True))


def test_attend_and_excite_stores_maps_of_the_prompt_that_gradients_flow_through():
    """Its pipeline changes the latent so that each word finds a place; the maps it asks are of every token."""
    kind = of_diffusers("AttendExciteAttnProcessor")
    store = sys.modules[kind.__module__].AttentionStore((16, 16))
    model = with_processors(kind(store, "up"))
    store.num_att_layers = len(attentions(model))

    def maps_and_gradient() -> tuple[list[torch.Size], torch.Tensor]:
        store.reset()
        x, text = inputs(4, 1, 16, 16)
        x.requires_grad_()
        call_unet(model, x, LATE, text)
        maps = [one for place in store.attention_store.values() for one in place]
        (gradient,) = torch.autograd.grad(sum(one[..., 1].square().sum() for one in maps), x)
        return [one.shape for one in maps], gradient

    expected, _ = maps_and_gradient()
    with tome_core.patch(model, on_small("balanced")) as handle:
        shapes, gradient = maps_and_gradient()
    assert handle.report().levels[0].calls_merged and shapes == expected
    assert gradient.isfinite().all() and gradient.abs().max() > 0


# --- whether an attention is known is asked at each call -------------------------------------------------------------


def test_two_processors_of_one_class_behave_as_themselves_and_may_change_their_mind_between_calls(monkeypatch):
    """What is found out about one is not true of the other, nor of itself at another time."""
    model, scales = small(), [0.9, None]

    def mixed() -> torch.Tensor:
        for number, one in enumerate(selves(model)):
            one.processor.scale = scales[number % 2]
        return run(model)

    for one in selves(model):
        one.set_processor(Sharpened(0.9))
    expected = mixed()
    merge_with_self(monkeypatch)
    with tome_core.patch(model, on_small("balanced")):
        for _ in range(2):
            assert (mixed() - expected).abs().max() <= 1e-3  # other sums at most
            scales.reverse()
            mixed()
            scales.reverse()


# --- other people's replacements of forward --------------------------------------------------------------------------


class Caching:
    """What DeepCache's helper does to a UNet: others for its forward and its transformers', and back what was found."""

    def __init__(self, model: nn.Module) -> None:
        transformers = [one for one in model.modules() if type(one).__name__ == "Transformer2DModel"]
        self.found = {module: module.forward for module in (model, *transformers)}
        for module, forward in self.found.items():
            module.forward = lambda *args, forward=forward, **kwargs: forward(*args, **kwargs)

    def disable(self) -> None:
        for module, forward in self.found.items():
            module.forward = forward


def test_merging_goes_on_after_a_cache_that_was_there_before_us_is_switched_off():
    model = small()
    with tome_core.patch(model, on_small("balanced")):
        merged = run(model)
    cache = Caching(model)
    with tome_core.patch(model, on_small("balanced")) as handle:
        assert torch.equal(run(model), merged)
        cache.disable()
        run(model)
        assert any("taken the patch off" in reason for reason in handle.report().levels[0].reasons)
        handle.reset_counts()
        assert torch.equal(run(model), merged)
        level = handle.report().levels[0]
        assert level.calls_merged and not level.calls_skipped
