"""Attentions of diffusers with any processor: merged keys give what repeated keys give, else it is left alone."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_processor
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import nn

import tome_core
from tests import conformance as laws
from tests import diffusers_processors as theirs
from tests.conformance import CHANNELS, DTYPES, KV, SIDE, UNetOf, merging_by, run, tokens, way, why_left_alone
from tests.diffusers_processors import BY_HAND, LEFT_ALONE, MERGED, PERTURBING, PLAIN, attention, batches_for, made
from tests.doubles import of_heads
from tests.models import fixed
from tome_core import MergeConfig
from tome_core.attention.merged import BIAS
from tome_core.models.intercept import way_of

UNUSUAL = {"group_norm": fixed(nn.GroupNorm(4, CHANNELS)), "residual_connection": True, "rescale_output_factor": 2.0}


@pytest.fixture(autouse=True)
def _xformers(monkeypatch):
    laws.with_xformers(monkeypatch, attention_processor)


def held(name: str, module: nn.Module, *args, **settings) -> str:
    return way(module, *args, **{"batches": batches_for(name), "alike": "CrossFrame" in name, **settings})


# --- merged -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [
    (name, dtype) for name in MERGED for dtype in DTYPES
    if "NPU" not in name or dtype.itemsize > 2  # which calls Ascend's own function for halves
], ids=str)  # fmt: skip
def test_merged_keys_give_what_repeated_keys_give(name, dtype):
    assert held(name, attention(made(name), dtype, bias=True), dtype) == MERGED[name]


@pytest.mark.parametrize("name", [one for one in MERGED if one not in BY_HAND])
def test_their_code_is_run_with_another_function_and_not_watched(name):
    """Which is slower, and no compiler follows it."""
    assert way_of(attention(made(name))) is not None


def test_an_empty_tuple_among_the_constants_of_code_is_read_over():
    class Mine:
        def __call__(self, attn, hidden_states, sizes=None):
            sizes = () if sizes is None else sizes
            return torch.nn.functional.scaled_dot_product_attention(hidden_states, hidden_states, hidden_states, *sizes)

    assert way_of(attention(Mine())) is not None


@pytest.mark.parametrize("name", MERGED)
def test_queries_may_merge_too(name):
    assert held(name, attention(made(name)), queries=True) == MERGED[name]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("variant", theirs.VARIANTS)
def test_every_variant_of_attention_gives_what_repeated_keys_give(name, variant):
    assert held(name, attention(made(name), **theirs.VARIANTS[variant])) == MERGED[name]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_an_attention_that_casts_gives_what_repeated_keys_give(name, dtype):
    module = attention(made(name), dtype, upcast_attention=True, upcast_softmax=True)
    held(name, module, dtype, tolerance=laws.TOLERANCE[torch.float32] if dtype == torch.float64 else None)


@pytest.mark.parametrize("name", PLAIN)
def test_under_autocast_merged_keys_give_what_repeated_keys_give(name):
    """As trainers run it: weights in float32, products in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        held(name, attention(made(name), bias=True), tolerance=laws.TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("name", PLAIN)
def test_one_plan_may_serve_all_samples_of_a_batch(name):
    assert held(name, attention(made(name)), batches=(4,), alike=True) == MERGED[name]


@pytest.mark.parametrize("size", [1, 2, 8, 100])
def test_slices_of_every_size_give_the_same(size):
    assert way(attention(theirs.of_diffusers("SlicedAttnProcessor")(size))) == BIAS


@pytest.mark.parametrize("name", [one for one in MERGED if one not in BY_HAND])
@pytest.mark.parametrize("what", UNUSUAL)
def test_what_comes_before_and_after_the_function_stays(name, what):
    module = attention(made(name))
    setattr(module, what, UNUSUAL[what])
    assert held(name, module) == MERGED[name]


def test_a_fused_projection_is_what_counts_whatever_it_was_fused_of():
    module = attention(made("FusedAttnProcessor2_0"), bias=True)
    for layer in (module.to_q, module.to_k, module.to_v):
        fixed(layer, seed=5)
    assert way(module) == BIAS


def test_projections_that_were_fused_once_do_not_count_under_another_processor():
    module = attention(made("FusedAttnProcessor2_0"))
    fixed(module.to_qkv, seed=5)
    module.set_processor(AttnProcessor2_0())
    assert module.fused_projections and way(module) == BIAS


def test_a_correction_is_the_same_by_every_processor():
    """Each head's, before the output projection."""
    x = torch.nn.functional.interpolate(tokens(2, count=16).mT.unflatten(2, (4, 4)), (SIDE, SIDE), mode="bilinear")
    x = x.flatten(2).mT

    def merged(name: str, correction: bool) -> torch.Tensor:
        unet = UNetOf(attention(made(name)))
        with tome_core.patch(unet, side="kv", ratio=0.75, use_rand=False, correction=correction):
            return run(unet, x)

    plain, expected = run(UNetOf(attention()), x), merged("AttnProcessor2_0", True)
    assert laws.far(expected, plain) < 0.7 * laws.far(merged("AttnProcessor2_0", False), plain)
    assert all(laws.far(merged(name, True), expected) < 1e-5 for name in PLAIN)


# --- what others have put on projections ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "role"), [
    (name, role) for name in PLAIN
    for role in (("to_qkv", "to_out.0") if "Fused" in name else ("to_q", "to_k", "to_v", "to_out.0"))
])  # fmt: skip
def test_a_hook_on_a_projection_sees_all_tokens_once_and_what_it_gives_counts(name, role):
    module, seen = attention(made(name)), []
    weights = torch.linspace(0.5, 1.5, SIDE**2)[:, None]

    def hook(layer, args, out):
        seen.append(out.shape[:2])
        return out * weights

    module.get_submodule(role).register_forward_hook(hook)
    unet = UNetOf(module)
    with merging_by(), tome_core.patch(unet, KV):
        run(unet, tokens(2))
    assert seen == [(2, SIDE**2)]
    assert way(module) == MERGED[name]


@pytest.mark.parametrize("name", ["AttnProcessor", "AttnProcessor2_0"])
@pytest.mark.parametrize("config", [
    MergeConfig(side="kv", only_if_it_pays=True), MergeConfig(side="kv", ratio=0.01), MergeConfig(min_timestep=990),
], ids=["would not pay", "too little", "at other times"])  # fmt: skip
def test_a_hook_on_a_projection_sees_all_tokens_once_if_nothing_merges(name, config):
    module, seen = attention(made(name)), []
    module.to_k.register_forward_hook(lambda layer, args, out: seen.append(out.shape[1]))
    unet = UNetOf(module)
    with tome_core.patch(unet, config) as handle:
        run(unet, tokens(1))
    assert seen == [SIDE**2] and not handle.report().merged_anything


def test_what_a_processor_leaves_behind_is_there():
    class Keeping:
        calls = 0

        def __call__(self, attn, x, **_):
            self.calls += 1
            attn.last_seen = x
            q, k, v = (of_heads(layer(x), attn.heads) for layer in (attn.to_q, attn.to_k, attn.to_v))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    module, x = attention(Keeping()), tokens(2)
    unet = UNetOf(module)
    with merging_by(), tome_core.patch(unet, KV) as handle:
        run(unet, x)
    assert handle.report().merged_anything and module.processor.calls == 1
    assert torch.equal(module.last_seen, x)


# --- left alone -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_scores_by_hand_without_a_description_are_left_alone_and_the_function_is_named(name):
    """Self-attention guidance cuts what it finds in `attention_probs` to the size of the picture."""
    module = attention(made(name))
    reason = why_left_alone(module, batch=4)
    assert f"{name}.__call__ calls no attention function that is known" in reason
    maps = getattr(module.processor, "attention_probs", None)
    assert (maps is not None) == ("Store" in name)
    assert maps is None or maps.shape == (4 * laws.HEADS, SIDE**2, SIDE**2)


@pytest.mark.parametrize("name", PERTURBING)
def test_of_perturbed_guidance_merges_what_attends(name):
    x, perturbed, other = tokens(2 * PERTURBING[name]), UNetOf(attention(made(name))), UNetOf(attention())
    alone = run(perturbed, x)
    with merging_by(alike=True), tome_core.patch(perturbed, KV) as handle, tome_core.patch(other, KV):
        out, expected = run(perturbed, x), run(other, x[:-2])
    assert handle.report().merged_anything
    assert torch.equal(out[-2:], alone[-2:]) and laws.far(out[:-2], expected) < 1e-5


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("what", UNUSUAL)
def test_scores_by_hand_with_more_around_them_are_left_alone(name, what):
    module = attention(made(name))
    setattr(module, what, UNUSUAL[what])
    assert "it norms, scales or adds its input" in why_left_alone(module)


@pytest.mark.parametrize("name", PLAIN)
def test_a_call_with_a_mask_is_left_alone(name):
    mask = torch.zeros(3, 1, SIDE**2)
    mask[..., 40:] = -10.0
    module = attention(made(name))
    assert not torch.equal(run(UNetOf(module, attention_mask=mask), tokens(3)), run(UNetOf(module), tokens(3)))
    assert "mask" in why_left_alone(module, attention_mask=mask)


@pytest.mark.parametrize("name", [name for name in PLAIN if "Fused" not in name])  # which takes no context
@pytest.mark.parametrize("count", [5, 63, 100])
def test_a_call_with_other_tokens_than_the_pictures_is_left_alone(name, count):
    reason = why_left_alone(attention(made(name)), encoder_hidden_states=tokens(3, count=count))
    assert "keys and values are not the picture's tokens" in reason


@pytest.mark.parametrize("name", theirs.OF_IMAGE_PROMPTS)
def test_an_adapter_on_self_attention_does_what_it_does_without_a_patch(name):
    """Without an image it raises."""
    module = attention(made(name))
    why_left_alone(module, encoder_hidden_states=(tokens(3, count=5), [tokens(3, count=4)]))
    unet = UNetOf(module)
    for patched in (False, True):
        if patched:
            tome_core.patch(unet, KV)
        with pytest.raises(UnboundLocalError):
            run(unet, tokens(3))


@pytest.mark.parametrize("name", [*MERGED, *LEFT_ALONE, *PERTURBING])
def test_off_and_taken_off_every_bit_is_the_same(name):
    unet, x = UNetOf(attention(made(name))), tokens(max(batches_for(name)[-1], 4))
    out = run(unet, x)
    for config in (MergeConfig(side="kv", ratio=0.0), MergeConfig(side="kv", ratio=0.75, min_timestep=900)):
        with tome_core.patch(unet, config) as handle:
            handle.set_time(timestep=500)
            assert torch.equal(run(unet, x), out)
    handle = tome_core.patch(unet, KV)
    assert torch.equal(run(unet, x), out) == (name in LEFT_ALONE)
    for off in (handle.uninstall, handle.remove):
        off()
        assert torch.equal(run(unet, x), out)


# --- whatever else there is -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what is deprecated, and of kernels of other devices
def test_every_other_processor_of_diffusers_that_runs_there_merges_rightly_or_not_at_all():
    """A transformer's, an autoencoder's, or of a diffusers to come."""
    known, seen = {*MERGED, *LEFT_ALONE, *PERTURBING, *theirs.OF_IMAGE_PROMPTS}, set()
    for name, home in theirs.found().items():
        module = None if name in known or name.startswith("PAG") else _running(name, home)
        if module is None:
            continue
        unet = UNetOf(module)
        with merging_by(), tome_core.patch(unet, KV) as handle:
            run(unet, tokens(2))
        if handle.report().merged_anything:
            way(module, batches=(2,))
        else:
            why_left_alone(module)
        seen.add(name)
    assert {"HunyuanAttnProcessor2_0", "SanaLinearAttnProcessor2_0"} <= seen


def _running(name: str, home: str) -> Attention | None:
    """An attention with this processor; None if there is none that runs."""
    try:
        kind = getattr(importlib.import_module(home), name)
    except Exception:
        return None
    for make in (kind, lambda: theirs.unmade(kind)):
        try:
            module = theirs.put(attention(), make())
            out = run(UNetOf(module), tokens(2))
        except Exception:
            continue
        if torch.is_tensor(out):
            return module
    return None
