"""Attentions of diffusers with any of its processors, by themselves and in a UNet, for conformance tests."""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from torch import nn

from tests.conformance import CHANNELS as WIDTH
from tests.conformance import HEADS, self_attentions, watched
from tests.diffusers_processors import of_diffusers, unmade
from tests.models import call_unet, fixed, inputs, unet
from tome_core import MergeConfig

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
KV = MergeConfig(correction=False, side="kv", ratio=0.75, use_rand=False)
STRONG = MergeConfig(correction=False, side="kv", ratio=0.9375, sx=4, sy=4)


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


def batch_for(name: str) -> int:
    """The fewest samples that a processor can be told apart by, and that it takes."""
    return 3 if "PAGCFG" in name else 4 if "CrossFrame" in name else 2
