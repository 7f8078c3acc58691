"""Every attention processor of diffusers: what the engine makes of it is decided in a table, and held to it.

Known: taken apart, so that merged keys know their sizes; the same as keys repeated as often as they have tokens.
Together: unknown, so queries, keys and values merge by one plan, as tomesd does it, and the processor sees a shorter
sequence. Alone: never on a UNet block's self-attention, or of no use there once tokens have merged.
A class that a newer diffusers brings is in none of them, and that fails.
"""

from __future__ import annotations

import copy
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import attention_processor
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import nn

import tome_core
from tests.conformance import (
    DTYPES,
    TOLERANCE,
    assert_all_sized,
    assert_all_together,
    assert_equal_calls,
    assert_sized,
    given,
    held,
    merge_by,
    ragged,
    reasons_of,
    routes_of,
    self_attentions,
    watched,
    with_xformers,
)
from tests.models import call_unet, fixed, inputs, unet
from tome_core import MergeConfig
from tome_core.attention import KnownAttention, LeftAlone, known_of, name_of
from tome_core.attention.core import attend_merged

HOME = "diffusers.models.attention_processor"
WIDTH, HEADS = 32, 4

# --- the table ------------------------------------------------------------------------------------------------------

KNOWN = ("AttnProcessor", "AttnProcessor2_0", "SlicedAttnProcessor", "XFormersAttnProcessor", "FusedAttnProcessor2_0")

# what is special about each: the protocol is the same for all
TOGETHER = {
    "AttnProcessorNPU": "of Ascend's devices; its function cannot be asked anywhere else",
    "XLAFlashAttnProcessor2_0": "of TPUs; its function cannot be asked anywhere else",
    "CustomDiffusionAttnProcessor": "has projections of its own",
    "CustomDiffusionAttnProcessor2_0": "has projections of its own",
    "CustomDiffusionXFormersAttnProcessor": "has projections of its own",
    "PAGIdentitySelfAttnProcessor2_0": "half of the batch is not attended at all",
    "PAGCFGIdentitySelfAttnProcessor2_0": "a third of the batch is not attended at all",
    "CrossFrameAttnProcessor": "every frame attends to the first one's keys",
    "CrossFrameAttnProcessor2_0": "every frame attends to the first one's keys",
    "AttendExciteAttnProcessor": "keeps maps, but only those of the prompt are read",
    "Pix2PixZeroAttnProcessor": "keeps maps, but only those of the prompt are read",
    "DreamLiteAttnProcessor2_0": "may have fewer heads for keys and values than for queries",
}

# may sit there, and must see every token
LEFT_ALONE = {
    "CrossAttnStoreProcessor": "keeps a map that self-attention guidance cuts to the picture's size",
}

# may sit there only where a prompt and images come along, which are not the picture's tokens; else they raise
OF_IMAGE_PROMPTS = ("IPAdapterAttnProcessor", "IPAdapterAttnProcessor2_0", "IPAdapterXFormersAttnProcessor")

NEVER_THERE = {
    "are empty classes that old code imports, and cannot be called":
        "LoRAAttnProcessor LoRAAttnProcessor2_0 LoRAXFormersAttnProcessor LoRAAttnAddedKVProcessor",
    "attend to the prompt only, where they cannot do without it":
        "LEDITSCrossAttnProcessor",
    "add the prompt's keys to a picture in 4-D, outside of transformer blocks":
        "AttnAddedKVProcessor AttnAddedKVProcessor2_0 SlicedAttnAddedKVProcessor XFormersAttnAddedKVProcessor",
    "are of autoencoders":
        "MochiVaeAttnProcessor2_0 SanaMultiscaleAttnProcessor2_0 CosmosSpatialAttentionProcessor2_0 "
        "CosmosTemporalAttentionProcessor2_0 KVAEAudioAttnProcessor LTX2VideoVaeNeighborhoodAttnProcessor "
        "MMAudioAttnProcessor MiniMaxH3AudioAttnProcessor MiniMaxH3VideoAttnProcessor SAMEAttnProcessor",
    "are of encoders of prompts and durations":
        "AnimaTextConditionerAttnProcessor LTX2DurationAttnProcessor",
    "are of diffusion transformers, which the engine refuses":
        "AceStepAttnProcessor2_0 AllegroAttnProcessor2_0 AnyFlowAttnProcessor AnyFlowCausalAttnProcessor "
        "AnyFlowCrossAttnProcessor AudioDiTCrossAttnProcessor AudioDiTSelfAttnProcessor AuraFlowAttnProcessor2_0 "
        "BriaAttnProcessor BriaFibo2AttnProcessor BriaFiboAttnProcessor CogVideoXAttnProcessor2_0 "
        "CogView4AttnProcessor CogView4TrainingAttnProcessor Cosmos3AttnProcessor CosmosAttnProcessor2_0 "
        "CosmosAttnProcessor2_5 EasyAnimateAttnProcessor2_0 ErnieImageSingleStreamAttnProcessor Flux2AttnProcessor "
        "Flux2KVAttnProcessor Flux2KVParallelSelfAttnProcessor Flux2ParallelSelfAttnProcessor Flux3AttnProcessor "
        "FluxAttnProcessor FluxAttnProcessor2_0 FluxAttnProcessor2_0_NPU FluxIPAdapterAttnProcessor "
        "FluxIPAdapterJointAttnProcessor2_0 FluxSingleAttnProcessor2_0 FusedAuraFlowAttnProcessor2_0 "
        "FusedCogVideoXAttnProcessor2_0 FusedFluxAttnProcessor2_0 FusedFluxAttnProcessor2_0_NPU "
        "FusedHunyuanAttnProcessor2_0 FusedJointAttnProcessor2_0 GlmImageAttnProcessor HeliosAttnProcessor "
        "HiDreamAttnProcessor HunyuanAttnProcessor2_0 HunyuanImageAttnProcessor HunyuanVideo15AttnProcessor2_0 "
        "HunyuanVideoAttnProcessor2_0 Ideogram4AttnProcessor JointAttnProcessor2_0 JoyImageAttnProcessor "
        "JoyImageEditPlusAttnProcessor Kandinsky5AttnProcessor Kandinsky6AttnProcessor Kandinsky6SRAttnProcessor "
        "Krea2AttnProcessor LTX2AudioVideoAttnProcessor LTX2PerturbedAttnProcessor LTXVideoAttentionProcessor2_0 "
        "LTXVideoAttnProcessor LongCatImageAttnProcessor Lumina2AttnProcessor2_0 LuminaAttnProcessor2_0 "
        "MiniMaxH3AttnProcessor MiniMaxMusic3AttnProcessor MiniMaxMusic3DepthAttnProcessor MochiAttnProcessor2_0 "
        "MotifVideoAttnProcessor2_0 MotifVideoCrossAttnProcessor2_0 NucleusMoEAttnProcessor2_0 "
        "OmniGenAttnProcessor2_0 OvisImageAttnProcessor PAGCFGHunyuanAttnProcessor2_0 PAGCFGJointAttnProcessor2_0 "
        "PAGCFGSanaLinearAttnProcessor2_0 PAGHunyuanAttnProcessor2_0 PAGIdentitySanaLinearAttnProcessor2_0 "
        "PAGJointAttnProcessor2_0 PRXAttnProcessor2_0 QwenDoubleStreamAttnProcessor2_0 QwenImage21AttnProcessor "
        "QwenImage21FlexAttnProcessor RFD4ProteinaPairAttnProcessor SD3IPAdapterJointAttnProcessor2_0 "
        "SanaAttnProcessor2_0 SanaLinearAttnProcessor2_0 SanaLinearAttnProcessor3_0 SanaWMCrossAttnProcessor "
        "SanaWMLTX2AudioVideoAttnProcessor SanaWMLTX2PerturbedAttnProcessor SanaWMLTX2RefinerAttnProcessor "
        "SkyReelsV2AttnProcessor SkyReelsV2AttnProcessor2_0 StableAudio3CrossAttnProcessor "
        "StableAudio3SelfAttnProcessor StableAudioAttnProcessor2_0 WanAnimate2AttnProcessor "
        "WanAnimate2CrossAttnProcessor WanAnimateFaceBlockAttnProcessor WanAttnProcessor WanAttnProcessor2_0 "
        "XFormersJointAttnProcessor XLAFluxFlashAttnProcessor2_0 ZSingleStreamAttnProcessor",
}  # fmt: skip

ALONE = (*LEFT_ALONE, *OF_IMAGE_PROMPTS, *(name for names in NEVER_THERE.values() for name in names.split()))

# what a test here makes one of
MADE = (*KNOWN, *TOGETHER, *LEFT_ALONE, *OF_IMAGE_PROMPTS)
_CLASS = re.compile(r"^\s*class (\w*Attn\w*Processor\w*|\w*AttentionProcessor[\d_]*)\b", re.MULTILINE)


@functools.cache
def found() -> dict[str, list[str]]:
    """Class -> modules of diffusers that have one of this name, read in their sources: not all can be imported."""
    root = Path(diffusers.__file__).parent
    classes: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "Processor" in text:
            module = ".".join(("diffusers", *path.relative_to(root).with_suffix("").parts))
            for name in _CLASS.findall(text):
                classes.setdefault(name, []).append(module)
    return classes


def of_diffusers(name: str) -> type:
    """The class, where this diffusers has it."""
    if name not in found():
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    try:
        return getattr(importlib.import_module(found()[name][0]), name)
    except ImportError as error:
        pytest.skip(f"{found()[name][0]} cannot be imported here: {error}")


def test_the_table_decides_for_every_attention_processor_of_diffusers():
    undecided = {name: modules for name, modules in found().items() if name not in (*KNOWN, *TOGETHER, *ALONE)}
    assert not undecided, (
        f"diffusers {diffusers.__version__} has attention processors that nobody has decided about: {undecided}. "
        f"Read each: if it computes plain attention of a UNet block's tokens to themselves, describe it in "
        f"tome_core/attention/processors.py and put it into KNOWN of {Path(__file__).name}; if it may sit on "
        "such a block's attn1 and is right on a shorter sequence, put it into TOGETHER; if it may, and must see every "
        "token, describe it as `LeftAlone` and put it into LEFT_ALONE; else into NEVER_THERE."
    )


def test_no_class_is_in_the_table_twice():
    names = [*KNOWN, *TOGETHER, *ALONE]
    assert len(names) == len(set(names))


def test_the_known_ones_are_where_the_engine_looks_for_them_and_nowhere_else():
    assert {name: found()[name] for name in KNOWN if name in found()} == {
        name: [HOME] for name in KNOWN if name in found()
    }


def test_reading_the_home_of_processors_finds_every_class_that_importing_it_finds():
    """No class comes about in another way, or under a name that the pattern overlooks."""
    here = {name for name, one in vars(attention_processor).items() if isinstance(one, type) and "Processor" in name}
    imported = {"IPAdapterMaskProcessor"}  # for pictures
    assert here - imported == {name for name, modules in found().items() if HOME in modules}


@pytest.mark.parametrize("name", [*KNOWN, *TOGETHER, *ALONE])
def test_the_engine_knows_what_the_table_says_it_knows(name):
    """Of a class that cannot be made here the engine sees an object that was not."""
    kind = of_diffusers(name) if name in MADE else getattr(attention_processor, name, None)
    if kind is None:
        return  # in a module of its own, which the engine does not look at
    module = Attention(WIDTH, heads=HEADS, dim_head=WIDTH // HEADS)
    module.set_processor(unmade(kind))
    known = known_of(module)
    assert isinstance(known, KnownAttention) == (name in KNOWN)
    assert isinstance(known, LeftAlone) == (name in LEFT_ALONE)
    assert (known is None) == (name not in KNOWN and name not in LEFT_ALONE)
    assert name_of(module) == name
    assert name not in KNOWN or known.name == name


def unmade(kind: type) -> Any:
    """An object whose own ``__init__`` did not run: it may ask for a device."""
    one = object.__new__(kind)
    if isinstance(one, nn.Module):
        nn.Module.__init__(one)
    return one


# --- processors, and modules to put them on -------------------------------------------------------------------------


def made(name: str) -> Any:
    """A processor with settings of its own, and weights where it has some; not the same as any other's."""
    kind = of_diffusers(name)
    if name in ("AttnProcessorNPU", "XLAFlashAttnProcessor2_0"):
        return unmade(kind)  # on a CPU, in float32, for few tokens they compute what AttnProcessor2_0 does
    if name.startswith("Sliced"):
        return kind(3)
    if name.startswith("IPAdapter"):
        return fixed(kind(WIDTH, WIDTH, num_tokens=(4,)), seed=1)
    if name.startswith("CustomDiffusion"):
        return fixed(kind(train_kv=True, train_q_out=True, hidden_size=WIDTH), seed=1)
    if name == "AttendExciteAttnProcessor":
        return kind(attnstore=lambda *_: None, place_in_unet="down")
    if name == "Pix2PixZeroAttnProcessor":
        return kind(is_pix2pix_zero=False)
    return kind()


def put(module: Attention, processor: Any) -> None:
    """Set it, as `set_attn_processor` and `fuse_qkv_projections` do."""
    if type(processor).__name__.startswith("Fused"):
        with torch.no_grad():
            module.fuse_projections()
    module.set_processor(processor)


def own(module: nn.Module, x: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
    """The processor itself, beneath everything."""
    name = type(module.processor).__name__
    if context is None:
        return module.processor(module, x)
    if name.startswith("IPAdapter"):
        return module.processor(module, x, encoder_hidden_states=(context, []))
    if name.startswith("Fused"):
        module = _unfused(module)
    return module.processor(module, x, encoder_hidden_states=context)


def _unfused(module: nn.Module) -> nn.Module:
    """With what the processor asks for where it is given a context, cut out of what it asks for where it is not."""
    module = copy.deepcopy(module)
    fused = module.to_qkv
    width = fused.out_features // 3
    for name, rows in (("to_q", slice(0, width)), ("to_kv", slice(width, None))):
        layer = nn.Linear(fused.in_features, 1, bias=fused.bias is not None)
        layer.weight.data = fused.weight.data[rows]
        if fused.bias is not None:
            layer.bias.data = fused.bias.data[rows]
        setattr(module, name, layer)
    return module


def attention(processor: Any, seed: int = 0, **settings: Any) -> Attention:
    """A self-attention with this processor. Its projections are strong, so that its weights are far from even."""
    module = Attention(WIDTH, heads=settings.pop("heads", HEADS), dim_head=settings.pop("dim_head", 8), **settings)
    fixed(module, seed)
    with torch.no_grad():
        for layer in (module.to_q, module.to_k):
            layer.weight.mul_(1.5)
    put(module, processor)
    return module


@pytest.fixture(autouse=True)
def _xformers(monkeypatch):
    with_xformers(monkeypatch, attention_processor)


def tokens(batch: int, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, WIDTH, generator=generator).to(dtype)


# --- what is known, by itself ---------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "one_head": {"heads": 1, "dim_head": 40},
    "many_heads": {"heads": 8, "dim_head": 5},
    "upcast_attention": {"upcast_attention": True},
    "upcast_softmax": {"upcast_softmax": True},
    "upcast_both": {"upcast_attention": True, "upcast_softmax": True},
    "qk_norm": {"qk_norm": "layer_norm"},
    "qk_norm_rms": {"qk_norm": "rms_norm", "bias": True},
    "unscaled": {"scale_qk": False},
    "no_out_bias": {"out_bias": False},
}

known_ones = pytest.mark.parametrize("name", KNOWN)


@known_ones
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_known_attention_gives_what_repeated_keys_give(name, variant):
    module = attention(made(name), **VARIANTS[variant])
    held(own, module, tokens(2, 11), tokens(2, 7, seed=1), ragged(2, 60, 7))


@known_ones
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("upcast", [False, True])
def test_a_known_attention_gives_what_repeated_keys_give_in_every_dtype(name, dtype, upcast):
    module = attention(made(name), upcast_attention=upcast, upcast_softmax=upcast, bias=True).to(dtype)
    tolerance = TOLERANCE[torch.float32] if upcast and dtype == torch.float64 else None
    held(own, module, tokens(2, 11, dtype), tokens(2, 7, dtype, seed=1), ragged(2, 60, 7), tolerance)


@known_ones
@pytest.mark.parametrize("batch", range(1, 7))
def test_a_known_attention_keeps_the_samples_of_a_batch_apart(name, batch):
    queries, keys = 1 + 5 * (batch % 3), 2 + 4 * (batch % 4)
    module = attention(made(name))
    plan = ragged(batch, 40, keys, seed=batch)
    held(own, module, tokens(batch, queries), tokens(batch, keys, seed=1), plan)


@known_ones
def test_one_plan_serves_all_samples_of_a_batch(name):
    plan = ragged(1, 40, 7)
    ways = held(own, attention(made(name)), tokens(4, 11), tokens(4, 7, seed=1), plan)
    assert ways <= {"bias", "wider heads"} and "wider heads" in ways


@known_ones
def test_a_known_attention_gives_what_repeated_keys_give_under_autocast(name):
    """As trainers run it: weights in float32, products in bfloat16."""
    module = attention(made(name), bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        held(own, module, tokens(2, 11), tokens(2, 7, seed=1), ragged(2, 60, 7), TOLERANCE[torch.bfloat16])


def test_a_fused_projection_is_what_counts_whatever_it_was_fused_of():
    module = attention(made("FusedAttnProcessor2_0"), bias=True)
    for layer in (module.to_q, module.to_k, module.to_v):
        fixed(layer, seed=5)
    held(own, module, tokens(2, 11), tokens(2, 7, seed=1), ragged(2, 60, 7))


def test_projections_that_were_fused_once_do_not_count_under_another_processor():
    module = attention(made("FusedAttnProcessor2_0"))
    fixed(module.to_qkv, seed=5)
    module.set_processor(AttnProcessor2_0())
    assert module.fused_projections
    held(own, module, tokens(2, 11), tokens(2, 7, seed=1), ragged(2, 60, 7))


@known_ones
def test_what_was_put_on_projections_counts(name):
    """LoRA replaces a projection, offloading wraps its forward, others hook it."""
    module = attention(made(name))
    asked = {"to_q": 0, "to_k": 0, "to_v": 0, "to_qkv": 0, "to_out": 0}

    def note(role: str, out: torch.Tensor) -> torch.Tensor:
        asked[role] += 1
        return out * 1.25

    roles = ["to_qkv"] if name.startswith("Fused") else ["to_q", "to_k", "to_v"]
    for role in roles:
        getattr(module, role).register_forward_hook(lambda layer, args, out, role=role: note(role, out))
    module.to_out[0].register_forward_hook(lambda layer, args, out: note("to_out", out))
    x, keys, plan = tokens(2, 11), tokens(2, 7, seed=1), ragged(2, 60, 7)
    with torch.no_grad():
        out = attend_merged(known_of(module), module, x, keys, keys, plan, {}).out
    assert all(asked[role] >= 1 for role in (*roles, "to_out"))
    plain = attention(made(name))
    for layer in (*(getattr(plain, role) for role in roles), plain.to_out[0]):
        for parameter in layer.parameters():
            parameter.data.mul_(1.25)
    assert_sized(own, plain, x, keys, plan.sizes, out)


@pytest.mark.parametrize("name", [name for name in KNOWN if "Sliced" in name])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
def test_slices_of_every_size_give_the_same(name, size):
    module = attention(of_diffusers(name)(size))
    held(own, module, tokens(2, 11), tokens(2, 7, seed=1), ragged(2, 60, 7))


# --- what is known, in a UNet ---------------------------------------------------------------------------------------

KV = MergeConfig(correction=False, side="kv", ratio=0.75, use_rand=False)
STRONG = MergeConfig(correction=False, side="kv", ratio=0.9375, sx=4, sy=4)


def model_with(name: str | None, **changes: Any) -> nn.Module:
    """A UNet of one level and three blocks, every self-attention with a processor of its own."""
    model = unet(
        block_out_channels=(WIDTH,), down_block_types=("CrossAttnDownBlock2D",), mid_block_type=None,
        up_block_types=("CrossAttnUpBlock2D",), attention_head_dim=HEADS, **changes,
    )  # fmt: skip
    fixed(model)
    for module in self_attentions(model).values() if name is not None else ():
        put(module, made(name))
    return model


def call(model: nn.Module, batch: int = 2, size: int = 8, timestep: Any = 500, **more: Any) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x, text = inputs(4, batch, size, size)
    with torch.no_grad():
        return call_unet(model, x.to(dtype), timestep, text.to(dtype), **more)


def plain_calls(model: nn.Module, **call_as: Any):
    """What the model without a patch gives, and every call of its self-attentions."""
    with watched(model) as seen:
        return call(model, **call_as), seen


@known_ones
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_known_attention_in_a_unet_gives_what_repeated_keys_give(name, dtype, batch, monkeypatch):
    merge_by(monkeypatch, 13)
    model = model_with(name).to(dtype)
    plain = copy.deepcopy(model)
    with tome_core.patch(model, KV) as handle, watched(model) as seen:
        call(model, batch)
    assert len(seen) == 3
    assert_all_sized(own, plain, seen)
    assert routes_of(handle) and not any("together" in route for route in routes_of(handle)), handle.report()


@known_ones
def test_a_known_attention_in_a_unet_stays_known_beside_an_adapters_masks(name, monkeypatch):
    """A UNet hands every block's attentions what is meant for those of the prompt."""
    merge_by(monkeypatch, 13)
    model = model_with(name)
    plain = copy.deepcopy(model)
    with tome_core.patch(model, KV), watched(model) as seen:
        call(model, cross_attention_kwargs={"ip_adapter_masks": [torch.ones(1, 1, 8, 8)]})
    assert_all_sized(own, plain, seen)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_attention_gives_in_a_unet_what_repeated_keys_give(variant, monkeypatch):
    """With the processor that diffusers chooses for it."""
    merge_by(monkeypatch, 13)
    model = model_with(None)
    for name, _ in list(self_attentions(model).items()):
        block = model.get_submodule(name.rsplit(".", 1)[0])
        settings = {"heads": HEADS, "dim_head": WIDTH // HEADS, **VARIANTS[variant]}
        block.attn1 = fixed(Attention(WIDTH, **settings))
    plain = copy.deepcopy(model)
    with tome_core.patch(model, KV), watched(model) as seen:
        call(model)
    assert_all_sized(own, plain, seen)


@known_ones
def test_queries_that_merge_beside_keys_give_what_they_give_for_repeated_keys(name, monkeypatch):
    merge_by(monkeypatch, 13)
    model = model_with(name)
    plain = copy.deepcopy(model)
    config = MergeConfig(correction=False, side="kv", ratio=0.75, use_rand=False, query_ratio=0.5)
    with tome_core.patch(model, config), watched(model) as seen:
        call(model)
    assert all(one.queries is not None for one in seen)
    assert_all_sized(own, plain, seen)


# --- what is left as it is ------------------------------------------------------------------------------------------

CALLABLE = [*KNOWN, *TOGETHER, *LEFT_ALONE]
OFF = {
    "ratio_0": MergeConfig(side="kv", ratio=0.0),
    "other_times": MergeConfig(side="kv", ratio=0.75, max_timestep=100),
}


def batch_for(name: str) -> int:
    """The fewest samples that a processor can be told apart by, and that it takes."""
    return 3 if "PAGCFG" in name else 4 if "CrossFrame" in name else 2


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
    out, plain = plain_calls(model, attention_mask=mask)
    assert not torch.equal(out, call(model))
    with tome_core.patch(model, KV) as handle, watched(model) as seen:
        assert torch.equal(call(model, attention_mask=mask), out)
    assert_equal_calls(seen, plain)
    assert any("mask" in reason for reason in reasons_of(handle)), handle.report()


@pytest.mark.parametrize("name", [name for name in KNOWN if "Fused" not in name])  # which takes no context here
@pytest.mark.parametrize("count", [5, 63, 100])
def test_a_call_with_other_tokens_than_the_pictures_is_left_alone(name, count):
    model = model_with(name)
    given(model, encoder_hidden_states=tokens(2, count))
    out, plain = plain_calls(model)
    with tome_core.patch(model, KV) as handle, watched(model) as seen:
        assert torch.equal(call(model), out)
    assert_equal_calls(seen, plain)
    assert reasons_of(handle), handle.report()


def test_blocks_that_attend_to_the_prompt_alone_are_left_alone():
    model = model_with(None, only_cross_attention=True)
    out, plain = plain_calls(model)
    with tome_core.patch(model, KV) as handle, watched(model) as seen:
        assert torch.equal(call(model), out)
    assert_equal_calls(seen, plain)
    assert reasons_of(handle), handle.report()


@pytest.mark.parametrize("name", OF_IMAGE_PROMPTS)
def test_an_image_prompt_on_self_attention_is_left_alone(name):
    model = model_with(name)
    given(model, encoder_hidden_states=(tokens(2, 5), [tokens(2, 4, seed=1)]))
    out, plain = plain_calls(model)
    with tome_core.patch(model, KV) as handle, watched(model) as seen:
        assert torch.equal(call(model), out)
    assert_equal_calls(seen, plain)
    assert reasons_of(handle), handle.report()


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
    model = model_with(name)
    out, plain = plain_calls(model)
    with tome_core.patch(model, config) as handle, watched(model) as seen:
        assert torch.equal(call(model), out)
    for module in self_attentions(model).values():
        assert module.processor.attention_probs.shape == (2 * HEADS, 64, 64)
    assert_equal_calls(seen, plain)
    assert reasons_of(handle) and all(name in reason for reason in reasons_of(handle)), handle.report()


# --- what is not taken apart ----------------------------------------------------------------------------------------

UNUSUAL = {
    "group_norm": lambda: fixed(nn.GroupNorm(4, WIDTH)),
    "residual_connection": lambda: True,
    "rescale_output_factor": lambda: 2.0,
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("what", UNUSUAL)
def test_an_attention_that_does_more_than_attend_is_merged_as_an_unknown_one(name, what):
    model = model_with(name)
    for module in self_attentions(model).values():
        setattr(module, what, UNUSUAL[what]())
        assert known_of(module).problem(module, {})
    plain = copy.deepcopy(model)
    with tome_core.patch(model, KV) as handle, watched(model) as seen:
        call(model)
    assert_all_together(own, plain, seen)
    assert routes_of(handle) and all("together" in route and "because" in route for route in routes_of(handle))


@pytest.mark.parametrize("name", KNOWN)
def test_an_attention_with_a_norm_of_pictures_is_not_taken_apart(name):
    """It takes nothing but tokens in 4-D, so there is no UNet to try it in."""
    module = attention(made(name))
    assert known_of(module).problem(module, {}) is None
    module.spatial_norm = nn.Identity()
    assert known_of(module).problem(module, {})


@pytest.mark.parametrize("name", TOGETHER)
def test_an_unknown_attention_gives_what_it_gives_for_merged_tokens(name):
    model = model_with(name)
    plain = copy.deepcopy(model)
    with tome_core.patch(model, STRONG) as handle, watched(model) as seen:
        call(model, batch_for(name))
    assert len(seen) == 3
    assert_all_together(own, plain, seen)
    assert_tells_of(handle, name)


def assert_tells_of(handle: Any, name: str) -> None:
    routes = routes_of(handle)
    assert routes and all("together" in route and name in route for route in routes), handle.report()


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize(("config", "size"), [("balanced", 32), (STRONG, 8)], ids=["balanced", "strong"])
def test_an_unknown_attention_is_called_as_often_as_without_a_patch(name, config, size, monkeypatch):
    """At a size at which the preset merges."""
    model = model_with(name)
    kind, calls = of_diffusers(name), []
    before = kind.__call__

    @functools.wraps(before)
    def counted(self, attn, hidden_states, *args, **kwargs):
        calls.append(hidden_states.shape[1])
        return before(self, attn, hidden_states, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", counted)
    call(model, batch_for(name))
    assert calls == [64] * 3
    calls.clear()
    with tome_core.patch(model, config) as handle:
        call(model, batch_for(name), size, timestep=900)
    assert len(calls) == 3 and all(size**2 > count >= size**2 // 2 for count in calls)
    assert_tells_of(handle, name)


# --- whose class it is ----------------------------------------------------------------------------------------------


def derived_from(kind: type, name: str, **body: Any) -> type:
    return type(name, (kind,), {"__module__": __name__, **body})


def users_own() -> dict[str, type]:
    """Classes that differ from diffusers' AttnProcessor2_0 in ever less."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None):
        return AttnProcessor2_0.__call__(self, attn, hidden_states, encoder_hidden_states) * 0.5

    return {
        "its_own": derived_from(object, "Mine", __call__=__call__),
        "derived": derived_from(AttnProcessor2_0, "Mine", __call__=__call__),
        "derived_and_the_same": derived_from(AttnProcessor2_0, "Mine"),
        "derived_and_of_the_same_name": derived_from(AttnProcessor2_0, "AttnProcessor2_0", __call__=__call__),
        "of_the_same_name": derived_from(object, "AttnProcessor2_0", __call__=__call__),
    }


@pytest.mark.parametrize("which", users_own())
def test_a_processor_of_a_users_own_class_is_unknown(which):
    kind = users_own()[which]
    model = model_with(None)
    for module in self_attentions(model).values():
        module.set_processor(kind())
        assert known_of(module) is None
        assert name_of(module) == kind.__name__
    plain = copy.deepcopy(model)
    with tome_core.patch(model, KV) as handle, watched(model) as seen:
        call(model)
    assert_all_together(own, plain, seen)
    assert_tells_of(handle, kind.__name__)


@known_ones
def test_a_class_of_diffusers_whose_call_somebody_replaced_is_unknown(name, monkeypatch):
    module = attention(made(name))
    kind = type(module.processor)
    before = kind.__call__
    assert known_of(module) is not None
    monkeypatch.setattr(kind, "__call__", lambda self, *args, **kwargs: before(self, *args, **kwargs) * 2)
    assert known_of(module) is None


def test_an_attention_with_a_forward_of_its_own_is_unknown():
    class Mine(Attention):
        def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None, **more):
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, **more) * 2

    assert known_of(Mine(WIDTH, heads=HEADS, dim_head=WIDTH // HEADS)) is None


@known_ones
def test_the_processor_that_is_in_force_at_a_call_decides(name):
    """Hosts change them between steps."""
    model = model_with(name)
    with tome_core.patch(model, KV) as handle:
        call(model)
        assert not any("together" in route for route in routes_of(handle))
        for module in self_attentions(model).values():
            module.set_processor(derived_from(AttnProcessor2_0, "Mine")())
        handle.reset_counts()
        call(model)
        assert_tells_of(handle, "Mine")
        for module in self_attentions(model).values():
            put(module, made(name))
        handle.reset_counts()
        call(model)
        assert routes_of(handle) and not any("together" in route for route in routes_of(handle))
