"""One contract for all of diffusers' transformers that `patch` takes: real classes, tiny, with random weights."""

from __future__ import annotations

import copy
import pickle

import diffusers
import pytest
import torch
from tome_core.sequence import handle as sequence_handle
from tome_core.transformers import NAMES, handle_on

import tome_core
from tests import tiny_transformers, transformer_pipelines
from tests.tiny_transformers import PRESENT, STRONG, attributes, call, distance
from tests.transformer_pipelines import draw
from tome_core.engine.match import match

families = pytest.mark.parametrize("name", PRESENT)


def test_each_known_class_is_tried_where_diffusers_has_it():
    tried = {tiny_transformers.MODELS[name][0] for name in PRESENT}
    assert tried == {name for name in NAMES if hasattr(diffusers, name)}


@families
def test_every_attention_over_the_picture_merges_near_to_the_unmerged_model_and_off_again_leaves_the_same_bits(name):
    model, arguments = tiny_transformers.make(name)
    plain, before, draws = call(model, arguments), attributes(model), torch.get_rng_state()
    with tome_core.patch(model, **STRONG) as handle:
        merged = call(model, arguments)
        assert handle.is_installed
    assert torch.equal(torch.get_rng_state(), draws)
    assert not torch.equal(merged, plain) and distance(merged, plain) < 0.05
    with tome_core.patch(model, **STRONG, correction=False):
        assert distance(call(model, arguments), plain) > distance(merged, plain), "the correction brings it nearer"
    assert torch.equal(call(model, arguments), plain)
    assert attributes(model) == before and handle_on(model) is None
    data = handle.report().as_data()
    assert "skipped" not in data or not data["skipped"], data
    assert "left out" in str(handle.report()) and handle.report().work_saved > 0.85


@families
def test_where_nothing_is_to_merge_the_bits_are_those_without_us(name):
    model, arguments = tiny_transformers.make(name)
    plain = call(model, arguments)
    for settings in ({"ratio": 0.0}, {"min_pixels": 10**7}):
        with tome_core.patch(model, **(STRONG | settings)):
            assert torch.equal(call(model, arguments), plain)


@families
def test_equal_calls_give_equal_bits_also_with_drawn_destinations(name):
    model, arguments = tiny_transformers.make(name)
    with tome_core.patch(model, **(STRONG | {"use_rand": True, "seed": 3})):
        first = call(model, arguments)
        assert torch.equal(call(model, arguments), first)


@families
def test_an_error_in_mid_call_leaves_nothing_going_on(name):
    model, arguments = tiny_transformers.make(name)
    attention = next(one for _, one in model.named_modules() if hasattr(one, "to_q"))
    with tome_core.patch(model, **STRONG) as handle:
        good = call(model, arguments)
        hook = attention.to_q.register_forward_hook(_fail)
        with pytest.raises(ArithmeticError):
            call(model, arguments)
        hook.remove()
        assert torch.equal(call(model, arguments), good)
    assert not handle.is_installed


def _fail(*_):
    raise ArithmeticError("in mid-call")


@families
def test_copies_and_pickles_of_a_patched_model_are_whole_and_merge_nothing(name):
    model, arguments = tiny_transformers.make(name)
    plain = call(model, arguments)
    with tome_core.patch(model, **STRONG):
        merged = call(model, arguments)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(call(other, arguments), plain)
        assert torch.equal(call(model, arguments), merged)


def test_padding_that_a_mask_hides_changes_nothing():
    """Of the text that is left, the merged model sees what it sees of a shorter text."""
    model, arguments = tiny_transformers.make("Qwen-Image, padded")
    shorter = arguments | {"encoder_hidden_states": arguments["encoder_hidden_states"][:, :15],
                           "encoder_hidden_states_mask": None}  # fmt: skip
    with tome_core.patch(model, **STRONG):
        torch.testing.assert_close(call(model, arguments), call(model, shorter), rtol=1e-4, atol=1e-5)


def test_masks_that_differ_within_a_batch_are_left_alone_and_told():
    model, arguments = tiny_transformers.make("Qwen-Image")
    twice = {key: torch.cat([one, one]) if torch.is_tensor(one) else one * 2 for key, one in arguments.items()}
    twice["encoder_hidden_states_mask"][1, 10:] = 0
    plain = call(model, twice)
    with tome_core.patch(model, **STRONG) as handle:
        assert torch.equal(call(model, twice), plain)
    assert "a mask hides other tokens in each picture" in str(handle.report())


def test_a_processor_of_somebody_else_and_what_is_put_on_an_attention_before_us_are_left_in_charge_and_named():
    model, arguments = tiny_transformers.make("Flux")

    class Mine(type(model.transformer_blocks[0].attn.processor)):
        """The same under another name."""

    model.single_transformer_blocks[0].attn.processor = Mine()
    attention = model.single_transformer_blocks[1].attn
    attention.forward = lambda *args, **kwargs: 2 * type(attention).forward(attention, *args, **kwargs)
    plain = call(model, arguments)
    with tome_core.patch(model, **STRONG) as handle:
        assert distance(call(model, arguments), plain) < 0.05
    for why in ("Mine is no processor that is known", "something else runs in its place"):
        assert why in str(handle.report())
    assert handle.report().work_saved > 0.25, "the third merges"
    assert torch.equal(call(model, arguments), plain)


def test_grids_that_are_none_are_left_alone_and_told():
    model, arguments = tiny_transformers.make("Flux")
    arguments["img_ids"] = arguments["img_ids"].flip(0).roll(5, 0)
    plain = call(model, arguments)
    with tome_core.patch(model, **STRONG) as handle:
        assert torch.equal(call(model, arguments), plain)
    assert "no grid" in str(handle.report())


def test_kept_matches_save_matches(monkeypatch):
    def matches_of(keep: float) -> int:
        asked = []
        with monkeypatch.context() as patched:
            patched.setattr(sequence_handle, "match", lambda *args: asked.append(1) or match(*args))
            pipe, words = transformer_pipelines.make("Flux")
            with tome_core.patch(pipe, **STRONG, keep=keep) as handle:
                draw(pipe, words, num_inference_steps=4)
        assert handle.report().calls == 4
        return len(asked)

    assert 0 < matches_of(400.0) < matches_of(0.0)


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_first_block_cache(ours_first):
    from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache

    (pipe, words), (other, _) = (transformer_pipelines.make("Flux") for _ in range(2))
    if not ours_first:
        apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.0))
    with tome_core.patch(pipe, **STRONG) as handle:
        if ours_first:
            apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.0))
        both = draw(pipe, words)
    with tome_core.patch(other, **STRONG):
        torch.testing.assert_close(both, draw(other, words))
    assert handle.report().work_saved > 0.85
