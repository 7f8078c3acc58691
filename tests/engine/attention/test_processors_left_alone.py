"""Where nothing merges, or a processor must see every token, attentions of diffusers give the bits they gave before."""

from __future__ import annotations

import functools

import pytest
import torch

import tome_core
from tests.conformance import assert_equal_calls, assert_left_alone, given, reasons_of, self_attentions, tokens, watched
from tests.conformance_diffusers import HEADS, KV, batch_for, call, model_with, plain_calls
from tests.diffusers_processors import KNOWN, LEFT_ALONE, OF_IMAGE_PROMPTS, TOGETHER
from tome_core import MergeConfig

pytestmark = pytest.mark.usefixtures("plain_xformers")
CALLABLE = [*KNOWN, *TOGETHER, *LEFT_ALONE]
OFF = {
    "ratio_0": MergeConfig(side="kv", ratio=0.0),
    "other_times": MergeConfig(side="kv", ratio=0.75, min_timestep=1000),
}


@pytest.mark.parametrize("name", CALLABLE)
@pytest.mark.parametrize("off", OFF)
def test_where_nothing_merges_every_attention_gives_the_same_bits(name, off):
    model = model_with(name)
    out, plain = plain_calls(model, batch=batch_for(name))
    with tome_core.patch(model, OFF[off]), watched(model) as seen:
        again = call(model, batch_for(name))
    assert_equal_calls(seen, plain)
    assert torch.equal(again, out)


@pytest.mark.parametrize("name", CALLABLE)
def test_an_attached_handle_that_nobody_names_changes_no_bit_and_neither_does_a_removed_one(name):
    model = model_with(name)
    out, plain = plain_calls(model, batch=batch_for(name))
    handle = tome_core.patch(model, KV)
    assert torch.equal(call(model, batch_for(name)), out) == (name in LEFT_ALONE)
    handle.uninstall()
    handle.attach()
    for off in (lambda: None, handle.detach, handle.remove):
        off()
        with watched(model) as seen:
            assert torch.equal(call(model, batch_for(name)), out)
        assert_equal_calls(seen, plain)


@pytest.mark.parametrize("name", KNOWN)
def test_a_call_with_a_mask_is_left_alone(name):
    model = model_with(name)
    mask = torch.ones(2, 64)
    mask[:, 40:] = 0
    masked = functools.partial(call, attention_mask=mask)
    assert not torch.equal(masked(model), call(model))
    assert_left_alone(masked, model, KV, "mask")


@pytest.mark.parametrize(("name", "counts"), [
    *((name, (count,)) for name in KNOWN if "Fused" not in name for count in (5, 63, 100)),  # which takes no context
    *((name, (5, 4)) for name in OF_IMAGE_PROMPTS),
])  # fmt: skip
def test_a_call_with_other_tokens_than_the_pictures_is_left_alone(name, counts):
    """The prompt's, and those of an image prompt."""
    model, (first, *others) = model_with(name), (tokens(2, count, seed=count) for count in counts)
    given(model, encoder_hidden_states=(first, others) if others else first)
    assert_left_alone(call, model, KV)


def test_blocks_that_attend_to_the_prompt_alone_are_left_alone():
    assert_left_alone(call, model_with(None, only_cross_attention=True), KV)


@pytest.mark.parametrize("name", OF_IMAGE_PROMPTS)
def test_an_adapter_on_self_attention_without_an_image_prompt_raises_as_it_does_without_a_patch(name):
    """Should a newer diffusers let it pass: describe it in the engine and put it into KNOWN."""
    model = model_with(name)
    with pytest.raises(UnboundLocalError):
        call(model)
    with tome_core.patch(model, KV), pytest.raises(UnboundLocalError):
        call(model)


@pytest.mark.parametrize("name", LEFT_ALONE)
@pytest.mark.parametrize("config", [KV, MergeConfig(ratio=0.5, proportional=False)], ids=["kv", "as_tomesd"])
def test_a_processor_that_must_see_every_token_does(name, config):
    """Self-attention guidance cuts what it finds in `attention_probs` to the size of the picture."""
    model, batch = model_with(name), batch_for(name)
    out, plain = plain_calls(model, batch=batch)
    with tome_core.patch(model, config) as handle, watched(model) as seen:
        assert torch.equal(call(model, batch), out)
    for module in self_attentions(model).values():
        maps = getattr(module.processor, "attention_probs", None)
        assert (maps is not None) == ("Store" in name)
        assert maps is None or maps.shape == (batch * HEADS, 64, 64)
    assert_equal_calls(seen, plain)
    assert reasons_of(handle) and all(name in reason for reason in reasons_of(handle)), handle.report()
