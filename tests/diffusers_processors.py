"""Every attention processor of diffusers, and what is decided about it.

Known: taken apart, so that merged keys know their sizes; the same as keys repeated as often as they have tokens.
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


def unmade(kind: type) -> Any:
    """An object whose own ``__init__`` did not run: it may ask for a device."""
    one = object.__new__(kind)
    if isinstance(one, nn.Module):
        nn.Module.__init__(one)
    return one
