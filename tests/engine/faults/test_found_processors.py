"""Attentions that the engine does not know are called as tomesd calls them: once, on merged tokens, by their own rules.

What people write: some look whether a context was given, some count their calls, two of one class need not be alike.
Those that diffusers ships are `attention/test_conformance_diffusers_unknown.py`'s, but for what single ones are for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import nn

import tome_core
from tests.diffusers_processors import of_diffusers
from tests.models import call_unet, inputs, merge_with_self, on_small, small

PRESETS = ("balanced", "quality")
EARLY, LATE = 900, 100
SAMPLES = 6  # halves, thirds, and pairs of frames: what processors cut a batch into

every_preset = pytest.mark.parametrize("name", PRESETS)


def run(model: nn.Module, timestep: int = LATE, batch: int = SAMPLES, first: torch.Tensor | None = None):
    """The picture; first: another latent for the first sample."""
    x, text = inputs(4, batch, 16, 16)
    if first is not None:
        x[0] = first
    with torch.no_grad():
        return call_unet(model, x, timestep, text)


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


class Derived(AttnProcessor2_0):
    """A known class with something of a user's own in it: where no context is given, it looks at another sample."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *args: Any, **kwargs: Any):
        if encoder_hidden_states is None:
            encoder_hidden_states = hidden_states.roll(1, 0)
        return super().__call__(attn, hidden_states, encoder_hidden_states, *args, **kwargs)


UNKNOWN: dict[str, Callable[[], Any]] = {
    "Storing": lambda: Storing([]), "Sharpened": lambda: Sharpened(0.7), "Derived": Derived}  # fmt: skip
every_unknown = pytest.mark.parametrize("kind", UNKNOWN)


def with_processors(processor: Any) -> nn.Module:
    model = small()
    model.set_attn_processor(processor)
    return model


# --- what holds for all of them --------------------------------------------------------------------------------------


@every_unknown
def test_an_unknown_attention_merges_queries_keys_and_values_together_and_is_named(kind: str):
    """At most half of them at any time, because its merged keys do not know how many tokens they stand for."""
    model = with_processors(UNKNOWN[kind]())
    plain = run(model, LATE)
    with tome_core.patch(model, on_small("balanced")) as handle:
        run(model, EARLY)
        merged = run(model, LATE)
        report = handle.report()
    level = report.levels[0]
    assert level.tokens and all(tokens / 2 <= queries == keys < tokens for tokens, queries, keys in level.tokens)
    assert not torch.equal(merged, plain)
    assert kind in str(report) and any(kind in route for route in level.routes)


@every_unknown
def test_an_unknown_attention_whose_tokens_merge_with_themselves_alone_changes_no_bit(kind: str, monkeypatch):
    """What it is called with is what it is called with without us."""
    model = with_processors(UNKNOWN[kind]())
    plain = run(model)
    merge_with_self(monkeypatch)
    with tome_core.patch(model, on_small("balanced")) as handle:
        assert torch.equal(run(model), plain)
    assert handle.report().merged_anything


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
@pytest.mark.parametrize("kind", ["CrossFrameAttnProcessor", "CrossFrameAttnProcessor2_0"])
@pytest.mark.parametrize("timestep", [EARLY, LATE])
def test_the_first_frame_goes_on_deciding_about_the_second(kind: str, name: str, timestep: int):
    """Text2Video-Zero: every frame looks at the first one's keys. Samples are frames of a prompt and of none."""
    model = with_processors(of_diffusers(kind)(batch_size=2))
    other = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(9))

    def influence() -> float:
        one, two = (run(model, timestep, 4, first)[1] for first in (None, other))
        return ((one - two).norm() / one.norm()).item()

    unmerged = influence()
    with tome_core.patch(model, on_small(name)):
        assert influence() > 0.3 * unmerged > 0


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


@every_preset
def test_projections_may_be_fused_and_unfused_while_a_patch_is_on(name: str):
    model = small()
    with tome_core.patch(model, on_small(name)) as handle:
        first, level = run(model), handle.report().levels[0]
        model.fuse_qkv_projections()
        handle.reset_counts()
        run(model)
        assert handle.report().levels[0].calls_merged
        model.unfuse_qkv_projections()
        handle.reset_counts()
        assert torch.equal(run(model), first)
        assert handle.report().levels[0] == level


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
