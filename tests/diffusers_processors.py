"""The attention processors of diffusers that a UNet's self-attention can run, and how each is told of sizes.

No class of them is known to the engine but those that compute by hand, with a description.
"""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import nn

from tests.conformance import CHANNELS, HEADS, telling
from tests.models import fixed
from tome_core.attention.merged import BIAS, OWN_BIAS

MERGED = {
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
_CLASS = re.compile(r"^\s*class (\w*Attn\w*Processor\w*|\w*AttentionProcessor[\d_]*)\b", re.MULTILINE)


@functools.cache
def found() -> dict[str, str]:
    """Every class of processors -> a module that has it, read in diffusers' sources: not all can be imported."""
    root = Path(diffusers.__file__).parent
    classes: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "Processor" in text:
            module = ".".join(("diffusers", *path.relative_to(root).with_suffix("").parts))
            for name in _CLASS.findall(text):
                classes.setdefault(name, module)
    return classes


def of_diffusers(name: str) -> type:
    """The class, if this diffusers has it."""
    if name not in found():
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    try:
        return getattr(importlib.import_module(found()[name]), name)
    except ImportError as error:
        pytest.skip(f"{found()[name]} cannot be imported here: {error}")


def made(name: str) -> Any:
    """A processor with settings of its own, and weights if it has some."""
    kind = of_diffusers(name)
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
    if name == "Pix2PixZeroAttnProcessor":
        return kind(is_pix2pix_zero=False)
    return kind()


def unmade(kind: type) -> Any:
    """An object whose own ``__init__`` did not run: it may ask for a device."""
    one = object.__new__(kind)
    if isinstance(one, nn.Module):
        nn.Module.__init__(one)
    return one


def put(module: Attention, processor: Any) -> Attention:
    """Set it, as `set_attn_processor` and `fuse_qkv_projections` do."""
    if type(processor).__name__.startswith("Fused"):
        with torch.no_grad():
            module.fuse_projections()
    module.set_processor(processor)
    return module


def attention(processor: Any = None, dtype: torch.dtype = torch.float32, **settings: Any) -> Attention:
    """A self-attention with this processor, or the one that diffusers chooses for it."""
    module = telling(Attention(CHANNELS, **{"heads": HEADS, "dim_head": CHANNELS // HEADS, **settings}), dtype)
    if isinstance(processor, nn.Module):
        telling(processor, dtype)
    return module if processor is None else put(module, processor)


def batches_for(name: str) -> tuple[int, ...]:
    """Of so many samples as it takes."""
    return (4,) if "CrossFrame" in name else (6,) if "PAG" in name else (1, 3)
