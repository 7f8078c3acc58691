"""Attentions of diffusers with any processor: merged keys give what repeated keys give, else it is left alone.

No class of processors is known to the engine but those that compute by hand, with a description.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_processor
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import nn

import tome_core
from tests import conformance as laws
from tests.conformance import CHANNELS, KV, SIDE, UNetOf, attention, merging_by, run, tokens, way, why_left_alone
from tests.doubles import of_heads
from tests.models import fixed
from tome_core import MergeConfig
from tome_core.attention.merged import BIAS, OWN_BIAS
from tome_core.models.intercept import way_of

MERGED = {  # and how each is told of sizes
    "AttnProcessor2_0": BIAS,
    "FusedAttnProcessor2_0": BIAS,
    "XFormersAttnProcessor": OWN_BIAS,
    "AttnProcessor": BIAS,  # by hand
    "SlicedAttnProcessor": BIAS,  # by hand
    "CustomDiffusionAttnProcessor2_0": BIAS,  # projections of its own
    "CustomDiffusionXFormersAttnProcessor": OWN_BIAS,
    "CrossFrameAttnProcessor2_0": BIAS,  # every frame attends to the first one's keys
    "DreamLiteAttnProcessor2_0": BIAS,  # by diffusers' dispatcher
    "AttnProcessorNPU": BIAS,  # on a CPU and for few tokens these two compute what AttnProcessor2_0 does
    "XLAFlashAttnProcessor2_0": BIAS,
}
BY_HAND = ("AttnProcessor", "SlicedAttnProcessor")
PLAIN = (*BY_HAND, "AttnProcessor2_0", "FusedAttnProcessor2_0", "XFormersAttnProcessor")  # attention and nothing else
# by hand, without a description
LEFT_ALONE = (
    "CustomDiffusionAttnProcessor", "CrossFrameAttnProcessor", "AttendExciteAttnProcessor", "Pix2PixZeroAttnProcessor",
    "CrossAttnStoreProcessor",
)  # fmt: skip
# the last part of a batch, of so many, is not attended at all, each token as it is
PERTURBING = {"PAGIdentitySelfAttnProcessor2_0": 2, "PAGCFGIdentitySelfAttnProcessor2_0": 3}
# a prompt and images have to come along, which are not the picture's tokens; else they raise
OF_IMAGE_PROMPTS = ("IPAdapterAttnProcessor", "IPAdapterAttnProcessor2_0", "IPAdapterXFormersAttnProcessor")
# settings of diffusers' attention, and of `conformance.way`
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one head": ({"heads": 1, "dim_head": 40}, {}),
    "many heads": ({"heads": 8, "dim_head": 5}, {}),
    "norms": ({"qk_norm": "layer_norm"}, {}),
    "root mean square norms": ({"qk_norm": "rms_norm", "bias": True}, {}),
    "unscaled": ({"scale_qk": False}, {}),
    "no bias": ({"out_bias": False}, {}),
    "upcast": ({"upcast_attention": True, "upcast_softmax": True}, {}),
    "upcast halves": ({"upcast_attention": True, "upcast_softmax": True}, {"dtype": torch.bfloat16}),
    "one plan for all samples": ({}, {"batches": (4,), "alike": True}),
}
UNUSUAL = {"group_norm": fixed(nn.GroupNorm(4, CHANNELS)), "residual_connection": True, "rescale_output_factor": 2.0}
_CLASS = re.compile(r"^\s*class (\w*Attn\w*Processor\w*|\w*AttentionProcessor[\d_]*)\b", re.MULTILINE)


def classes_of_diffusers() -> dict[str, str]:
    """Every class of processors -> a module that has it, read in diffusers' sources: not all can be imported."""
    root, classes = Path(diffusers.__file__).parent, {}
    for path in sorted(root.rglob("*.py")):
        module = ".".join(("diffusers", *path.relative_to(root).with_suffix("").parts))
        for name in _CLASS.findall(path.read_text(encoding="utf-8")):
            classes.setdefault(name, module)
    return classes


HOMES = classes_of_diffusers()


def made(name: str) -> Any:
    """A processor with settings of its own, and weights if it has some."""
    if name not in HOMES:
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    kind = getattr(importlib.import_module(HOMES[name]), name)
    if name in ("AttnProcessorNPU", "XLAFlashAttnProcessor2_0"):
        return unmade(kind)
    if name.startswith("Sliced"):
        return kind(3)
    if name.startswith("IPAdapter"):
        return fixed(kind(CHANNELS, CHANNELS, num_tokens=(4,)), seed=1)
    if name.startswith("CustomDiffusion"):
        return fixed(kind(train_kv=True, train_q_out=True, hidden_size=CHANNELS), seed=1)
    if name == "AttendExciteAttnProcessor":
        return kind(attnstore=lambda *_: None, place_in_unet="down")
    return kind(is_pix2pix_zero=False) if name == "Pix2PixZeroAttnProcessor" else kind()


def unmade(kind: type) -> Any:
    """An object whose own ``__init__`` did not run: it may ask for a device."""
    processor = object.__new__(kind)
    if isinstance(processor, nn.Module):
        nn.Module.__init__(processor)
    return processor


@pytest.fixture(autouse=True)
def _xformers(monkeypatch):
    laws.with_xformers(monkeypatch, attention_processor)


def held(name: str, module: nn.Module, dtype: torch.dtype = torch.float32, **settings) -> str:
    batches = (4,) if "CrossFrame" in name else (3,)
    return way(module, dtype, **{"batches": batches, "alike": "CrossFrame" in name, **settings})


# --- merged -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MERGED)
def test_merged_keys_give_what_repeated_keys_give_and_queries_may_merge_too(name):
    for dtype in laws.DTYPES:
        if "NPU" not in name or dtype.itemsize > 2:  # it calls Ascend's own function for halves
            assert held(name, attention(made(name), dtype, bias=True), dtype) == MERGED[name]
    module = attention(made(name))
    assert held(name, module, queries=True) == MERGED[name]
    # their code is run with another function, and not watched, which is slower and which no compiler follows
    assert (way_of(module) is not None) == (name not in BY_HAND)


@pytest.mark.parametrize("name", PLAIN)
def test_every_variant_of_attention_gives_what_repeated_keys_give(name):
    for settings, call in CALLS.values():
        dtype = call.get("dtype", torch.float32)
        assert held(name, attention(made(name), dtype, **settings), **call) == MERGED[name], (settings, call)
    with torch.autocast("cpu", torch.bfloat16):  # as trainers run it: weights in float32, products in bfloat16
        held(name, attention(made(name), bias=True), tolerance=laws.TOLERANCE[torch.bfloat16])


def test_slices_of_every_size_give_the_same():
    for size in (1, 8, 100):
        assert way(attention(attention_processor.SlicedAttnProcessor(size))) == BIAS


@pytest.mark.parametrize("name", PLAIN)
def test_operations_before_and_after_the_function_stay_and_beside_scores_by_hand_nothing_merges(name):
    for unusual, value in UNUSUAL.items():
        module = attention(made(name))
        setattr(module, unusual, value)
        if name in BY_HAND:
            assert "it norms, scales or adds its input" in why_left_alone(module)
        else:
            assert held(name, module) == MERGED[name], unusual


def test_a_fused_projection_counts_whatever_it_was_fused_of_and_not_under_another_processor():
    module = attention(made("FusedAttnProcessor2_0"), bias=True)
    fixed(module.to_qkv, seed=5)
    assert way(module) == BIAS
    module.set_processor(AttnProcessor2_0())
    assert module.fused_projections and way(module) == BIAS


def test_a_correction_is_the_same_by_every_processor():
    """Each head's, before the output projection."""
    x = F.interpolate(tokens(2, count=16).mT.unflatten(2, (4, 4)), (SIDE, SIDE), mode="bilinear").flatten(2).mT

    def merged(name: str, correction: bool) -> torch.Tensor:
        unet = UNetOf(attention(made(name)))
        with tome_core.patch(unet, side="kv", ratio=0.75, use_rand=False, correction=correction):
            return run(unet, x)

    plain, expected = run(UNetOf(attention()), x), merged("AttnProcessor2_0", True)
    assert laws.far(expected, plain) < 0.7 * laws.far(merged("AttnProcessor2_0", False), plain)
    assert all(laws.far(merged(name, True), expected) < 1e-5 for name in PLAIN)


# --- what others have put on an attention -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0"])
def test_a_hook_on_a_projection_sees_all_tokens_once_and_its_output_counts(name):
    weights, seen = torch.linspace(0.5, 1.5, SIDE**2)[:, None], []

    def hook(layer, args, out):
        seen.append(out.shape[:2])
        return out * weights

    configs = {
        "merged": KV, "would not pay": MergeConfig(side="kv", only_if_it_pays=True),
        "too little": MergeConfig(side="kv", ratio=0.01), "at other times": MergeConfig(min_timestep=990),
    }  # fmt: skip
    for role in ("to_qkv", "to_out.0") if "Fused" in name else ("to_q", "to_k", "to_v", "to_out.0"):
        module = attention(made(name))
        module.get_submodule(role).register_forward_hook(hook)
        for case, config in configs.items():
            seen.clear()
            unet = UNetOf(module)
            with tome_core.patch(unet, config) as handle:
                run(unet, tokens(2))
            assert seen == [(2, SIDE**2)] and handle.report().merged_anything == (case == "merged"), (role, case)
        assert way(module) == MERGED[name]


def test_a_processors_own_writes_are_there_after_a_merged_call():
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


def test_scores_by_hand_without_a_description_are_left_alone_and_the_function_is_named():
    """Self-attention guidance cuts what it finds in `attention_probs` to the size of the picture."""
    for name in LEFT_ALONE:
        module = attention(made(name))
        assert f"{name}.__call__ calls no attention function that is known" in why_left_alone(module, batch=4)
        maps = getattr(module.processor, "attention_probs", None)
        assert (maps is not None) == ("Store" in name)
        assert maps is None or maps.shape == (4 * laws.HEADS, SIDE**2, SIDE**2)


@pytest.mark.parametrize("name", PERTURBING)
def test_of_perturbed_guidance_the_part_that_attends_merges(name):
    x, perturbed, other = tokens(2 * PERTURBING[name]), UNetOf(attention(made(name))), UNetOf(attention())
    alone = run(perturbed, x)
    with merging_by(alike=True), tome_core.patch(perturbed, KV) as handle, tome_core.patch(other, KV):
        out, expected = run(perturbed, x), run(other, x[:-2])
    assert handle.report().merged_anything
    assert torch.equal(out[-2:], alone[-2:]) and laws.far(out[:-2], expected) < 1e-5


@pytest.mark.parametrize("name", PLAIN)
def test_a_call_with_a_mask_or_with_other_tokens_than_the_pictures_is_left_alone(name):
    mask = torch.zeros(3, 1, SIDE**2)
    mask[..., 40:] = -10.0
    module = attention(made(name))
    assert not torch.equal(run(UNetOf(module, attention_mask=mask), tokens(3)), run(UNetOf(module), tokens(3)))
    assert "mask" in why_left_alone(module, attention_mask=mask)
    for count in (5, 63, 100) if "Fused" not in name else ():  # which takes no context
        reason = why_left_alone(module, encoder_hidden_states=tokens(3, count=count))
        assert "keys and values are not the picture's tokens" in reason


@pytest.mark.parametrize("name", OF_IMAGE_PROMPTS)
def test_an_adapter_on_self_attention_does_what_it_does_without_a_patch(name):
    """Without an image it raises."""
    module = attention(made(name))
    why_left_alone(module, encoder_hidden_states=(tokens(3, count=5), [tokens(3, count=4)]))
    unet = UNetOf(module)
    for _ in range(2):  # the second time patched
        with pytest.raises(UnboundLocalError):
            run(unet, tokens(3))
        tome_core.patch(unet, KV)


# --- whatever else there is -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what is deprecated, and of kernels of other devices
def test_every_other_processor_of_diffusers_that_runs_there_merges_rightly_or_not_at_all():
    """A transformer's, an autoencoder's, or of a diffusers to come."""
    known, seen = {*MERGED, *LEFT_ALONE, *PERTURBING, *OF_IMAGE_PROMPTS}, set()
    for name in HOMES:
        module = None if name in known or name.startswith("PAG") else _running(name)
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


def _running(name: str) -> nn.Module | None:
    """An attention with this processor; None if there is none that runs."""
    try:
        kind = getattr(importlib.import_module(HOMES[name]), name)
    except Exception:
        return None
    for make in (kind, lambda: unmade(kind)):
        try:
            module = attention(make())
            out = run(UNetOf(module), tokens(2))
        except Exception:
            continue
        if torch.is_tensor(out):
            return module
    return None
