"""Every attention processor of diffusers, and what is decided about it.

Known: taken apart, for proportional attention; the same as keys repeated as often as they have tokens.
Together: unknown, so queries, keys and values merge by one plan, as tomesd does it, and the processor sees a shorter
sequence. Alone: never on a UNet block's self-attention, or of no use there once tokens have merged.
"""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
from torch import nn

HOME = "diffusers.models.attention_processor"
KNOWN = ("AttnProcessor", "AttnProcessor2_0", "SlicedAttnProcessor", "XFormersAttnProcessor", "FusedAttnProcessor2_0")

# what is special about each: the protocol is the same for all
TOGETHER = {
    "AttnProcessorNPU": "of Ascend's devices; its function cannot be asked anywhere else",
    "XLAFlashAttnProcessor2_0": "of TPUs; its function cannot be asked anywhere else",
    "CustomDiffusionAttnProcessor": "has projections of its own",
    "CustomDiffusionAttnProcessor2_0": "has projections of its own",
    "CustomDiffusionXFormersAttnProcessor": "has projections of its own",
    "CrossFrameAttnProcessor": "every frame attends to the first one's keys",
    "CrossFrameAttnProcessor2_0": "every frame attends to the first one's keys",
    "AttendExciteAttnProcessor": "keeps maps, but only those of the prompt are read",
    "Pix2PixZeroAttnProcessor": "keeps maps, but only those of the prompt are read",
    "DreamLiteAttnProcessor2_0": "may have fewer heads for keys and values than for queries",
}

# may sit there, and must see every token
LEFT_ALONE = {
    "PAGIdentitySelfAttnProcessor2_0": "half of the batch is not attended at all, each token as it is",
    "PAGCFGIdentitySelfAttnProcessor2_0": "a third of the batch is not attended at all, each token as it is",
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
        "MochiVaeAttnProcessor2_0 SanaMultiscaleAttnProcessor2_0",
    "are of encoders of prompts and durations":
        "AnimaTextConditionerAttnProcessor LTX2DurationAttnProcessor",
    "are of diffusion transformers":
        "AllegroAttnProcessor2_0 AuraFlowAttnProcessor2_0 CogVideoXAttnProcessor2_0 FluxAttnProcessor2_0 "
        "FluxAttnProcessor2_0_NPU FluxIPAdapterJointAttnProcessor2_0 FluxSingleAttnProcessor2_0 "
        "FusedAuraFlowAttnProcessor2_0 FusedCogVideoXAttnProcessor2_0 FusedFluxAttnProcessor2_0 "
        "FusedFluxAttnProcessor2_0_NPU FusedHunyuanAttnProcessor2_0 FusedJointAttnProcessor2_0 "
        "HunyuanAttnProcessor2_0 JointAttnProcessor2_0 LuminaAttnProcessor2_0 MochiAttnProcessor2_0 "
        "PAGCFGHunyuanAttnProcessor2_0 PAGCFGJointAttnProcessor2_0 PAGCFGSanaLinearAttnProcessor2_0 "
        "PAGHunyuanAttnProcessor2_0 PAGIdentitySanaLinearAttnProcessor2_0 PAGJointAttnProcessor2_0 "
        "SD3IPAdapterJointAttnProcessor2_0 SanaLinearAttnProcessor2_0 StableAudioAttnProcessor2_0 "
        "XFormersJointAttnProcessor XLAFluxFlashAttnProcessor2_0",
}  # fmt: skip

# a class that is in modules of these alone is never there either
OF_OTHER_MODELS = tuple(f"diffusers.models.{which}." for which in ("transformers", "autoencoders", "controlnets"))

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


ALONE = (*LEFT_ALONE, *OF_IMAGE_PROMPTS, *(name for names in NEVER_THERE.values() for name in names.split()),
         *(name for name, modules in found().items() if all(one.startswith(OF_OTHER_MODELS) for one in modules)))


def of_diffusers(name: str) -> type:
    """The class, where this diffusers has it."""
    if name not in found():
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    try:
        return getattr(importlib.import_module(found()[name][0]), name)
    except ImportError as error:
        pytest.skip(f"{found()[name][0]} cannot be imported here: {error}")


def unmade(kind: type) -> Any:
    """An object whose own ``__init__`` did not run: it may ask for a device."""
    one = object.__new__(kind)
    if isinstance(one, nn.Module):
        nn.Module.__init__(one)
    return one
