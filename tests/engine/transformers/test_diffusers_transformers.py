"""One contract for all of diffusers' transformers that `patch` takes: real classes, tiny, with random weights."""

from __future__ import annotations

import copy
import pickle

import diffusers
import pytest
import torch

import tome_core
from tests import tiny_transformers, transformer_pipelines
from tests.tiny_transformers import PRESENT, attributes, call, distance
from tome_core.sequence import handle as sequence_handle
from tome_core.sequence.matching import match
from tome_core.transformers import NAMES, handle_on

STRONG = {"ratio": 15 / 16, "side": "kv", "metric": "keys+values", "sx": 4, "sy": 4, "use_rand": False}
families = pytest.mark.parametrize("name", PRESENT)


def test_each_known_class_is_tried_where_diffusers_has_it():
    tried = {tiny_transformers.MODELS[name][0] for name in PRESENT}
    assert tried == {name for name in NAMES if hasattr(diffusers, name)}


@families
def test_merges_near_to_the_unmerged_model_and_off_again_leaves_the_same_bits(name):
    model, arguments = tiny_transformers.make(name)
    plain, before, draws = call(model, arguments), attributes(model), torch.get_rng_state()
    with tome_core.patch(model, **STRONG) as handle:
        merged = call(model, arguments)
        assert handle.is_installed
    assert torch.equal(torch.get_rng_state(), draws)
    assert not torch.equal(merged, plain) and distance(merged, plain) < 0.05
    assert torch.equal(call(model, arguments), plain)
    assert attributes(model) == before and handle_on(model) is None


@families
def test_every_attention_over_the_picture_merges_and_the_report_counts_them(name):
    model, arguments = tiny_transformers.make(name)
    with tome_core.patch(model, **STRONG) as handle:
        call(model, arguments)
    data = handle.report().as_data()
    assert "skipped" not in data or not data["skipped"], data
    assert "left out" in str(handle.report())
    assert handle.report().work_saved > 0.85


@families
@pytest.mark.parametrize("settings", [{"ratio": 0.0}, {"min_pixels": 10**7}])
def test_where_nothing_is_to_merge_the_bits_are_those_without_us(name, settings):
    model, arguments = tiny_transformers.make(name)
    plain = call(model, arguments)
    with tome_core.patch(model, **(STRONG | settings)):
        assert torch.equal(call(model, arguments), plain)


@families
def test_equal_calls_give_equal_bits_also_with_drawn_destinations(name):
    model, arguments = tiny_transformers.make(name)
    with tome_core.patch(model, **(STRONG | {"use_rand": True, "seed": 3})):
        first = call(model, arguments)
        assert torch.equal(call(model, arguments), first)


@families
def test_the_correction_brings_it_nearer(name):
    model, arguments = tiny_transformers.make(name)
    plain, off = call(model, arguments), {}
    for corrected in (False, True):
        with tome_core.patch(model, **STRONG, correction=corrected):
            off[corrected] = distance(call(model, arguments), plain)
    assert off[True] < off[False]


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


@families
def test_a_patch_within_a_patch_counts_and_leaving_it_brings_back_the_first(name):
    model, arguments = tiny_transformers.make(name)
    with tome_core.patch(model, **STRONG) as outer:
        first = call(model, arguments)
        with tome_core.patch(model, **(STRONG | {"ratio": 0.5})) as inner:
            assert not torch.equal(call(model, arguments), first)
            assert inner.is_installed and not outer.is_installed
        assert torch.equal(call(model, arguments), first)
        assert outer.is_installed


def test_taken_off_by_the_models_name():
    model, arguments = tiny_transformers.make("Flux")
    plain = call(model, arguments)
    tome_core.patch(model, **STRONG)
    assert "left out" not in str(tome_core.report(model))
    call(model, arguments)
    assert "left out" in str(tome_core.report(model))
    tome_core.remove_patch(model)
    tome_core.remove_patch(model)
    assert torch.equal(call(model, arguments), plain)


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


def test_a_processor_of_somebody_else_is_left_alone_and_named():
    model, arguments = tiny_transformers.make("Flux")
    kind = type(model.transformer_blocks[0].attn.processor)

    class Mine(kind):
        """The same under another name."""

    model.single_transformer_blocks[0].attn.processor = Mine()
    with tome_core.patch(model, **STRONG) as handle:
        call(model, arguments)
    assert "Mine is no processor that is known" in str(handle.report())
    assert handle.report().work_saved > 0.5  # the others merge


def test_what_is_put_on_an_attention_before_us_is_left_in_charge():
    model, arguments = tiny_transformers.make("Flux")
    attention = model.single_transformer_blocks[0].attn
    attention.forward = lambda *args, **kwargs: 2 * type(attention).forward(attention, *args, **kwargs)
    plain = call(model, arguments)
    with tome_core.patch(model, **STRONG) as handle:
        assert distance(call(model, arguments), plain) < 0.05
    assert "something else runs in its place" in str(handle.report())
    assert torch.equal(call(model, arguments), plain)


def test_grids_that_are_none_are_left_alone_and_told():
    model, arguments = tiny_transformers.make("Flux")
    arguments["img_ids"] = arguments["img_ids"].flip(0).roll(5, 0)
    plain = call(model, arguments)
    with tome_core.patch(model, **STRONG) as handle:
        assert torch.equal(call(model, arguments), plain)
    assert "no grid" in str(handle.report())


def test_a_class_that_is_not_known_is_refused_with_a_sentence():
    model = diffusers.AuraFlowTransformer2DModel(
        sample_size=8, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16, out_channels=4,
        pos_embed_max_size=64,
    )  # fmt: skip
    with pytest.raises(tome_core.UnsupportedModelError, match="AuraFlowTransformer2DModel"):
        tome_core.patch(model)


def pipeline() -> diffusers.FluxPipeline:
    model, _ = tiny_transformers.make("Flux")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.FluxPipeline(scheduler, transformer_pipelines.decoder(), None, None, None, None, model)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: diffusers.FluxPipeline, steps: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    words = torch.randn(1, 20, 32, generator=generator), torch.randn(1, 32, generator=generator)
    return pipe(prompt_embeds=words[0], pooled_prompt_embeds=words[1], height=512, width=512, output_type="latent",
                num_inference_steps=steps, generator=generator).images  # fmt: skip


def test_a_pipeline_keeps_matches_over_its_steps_and_is_the_same_afterwards():
    pipe = pipeline()
    plain = draw(pipe)
    with tome_core.patch(pipe, **STRONG, keep=400.0) as handle:
        merged = draw(pipe)
        kept = handle.report().as_data()
        assert torch.equal(draw(pipe), merged)
    assert distance(merged, plain) < 0.05 and not torch.equal(merged, plain)
    assert kept["calls"] == 4
    assert torch.equal(draw(pipe), plain)


def matches_of(keep: float, monkeypatch) -> int:
    asked = []
    with monkeypatch.context() as patched:
        patched.setattr(sequence_handle, "match", lambda *args: asked.append(1) or match(*args))
        pipe = pipeline()
        with tome_core.patch(pipe, **STRONG, keep=keep):
            draw(pipe)
    return len(asked)


def test_kept_matches_save_matches(monkeypatch):
    assert 0 < matches_of(400.0, monkeypatch) < matches_of(0.0, monkeypatch)


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_first_block_cache(ours_first):
    from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache

    pipe = pipeline()
    if not ours_first:
        apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.0))
    with tome_core.patch(pipe, **STRONG) as handle:
        if ours_first:
            apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.0))
        both = draw(pipe)
    other = pipeline()
    with tome_core.patch(other, **STRONG):
        alone = draw(other)
    torch.testing.assert_close(both, alone)
    assert handle.report().work_saved > 0.85
