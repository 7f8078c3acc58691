"""What a measured gain belongs to, as short texts: the shape of a model, what is merged, where, and by what attention.

Weights do not count: another checkpoint or a LoRA of the same shape is as fast.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ..attention.by_hand import full_name
from ..models.unet_blocks import Place
from ..settings.config import MergeConfig

_RESIDUAL = "Res"  # what every host's class of residual blocks begins with


def model_of(unet: nn.Module, places: Sequence[Place]) -> str:
    """The UNet's class and a digest of where it has blocks, their widths and heads, and of its residual blocks."""
    blocks = [(one.path, one.halvings, *widths_of(one.block), getattr(getattr(one.block, "attn1", None), "heads", 0))
              for one in places]  # fmt: skip
    residual = Counter(name for name in (type(one).__name__ for one in unet.modules()) if name.startswith(_RESIDUAL))
    return f"{type(unet).__name__} {_digest(blocks, sorted(residual.items()))}"


def widths_of(block: nn.Module) -> tuple[int, int]:
    """Channels of a block's tokens and of the prompt's; 0 where they cannot be told."""
    return tuple(getattr(getattr(getattr(block, attention, None), projection, None), "in_features", 0)
                 for attention, projection in (("attn1", "to_q"), ("attn2", "to_k")))  # fmt: skip


def rules_of(config: MergeConfig) -> str:
    """A digest of the settings; the seed, which a host may draw for each picture, costs no time."""
    return _digest(replace(config, seed=0))


def attention_of(places: Sequence[Place], function: str = "") -> str:
    """What computes self-attention: class or processor, the function behind it, and what a host says besides."""
    attention = getattr(places[0].block, "attn1", None)
    if attention is None:
        return function
    forward, name = full_name(type(attention).forward), type(getattr(attention, "processor", attention)).__name__
    return " ".join(part for part in (name, forward, function) if part)


def versions() -> tuple[str, str]:
    """Of torch and of this engine, whatever its package is called here."""
    engine = sys.modules.get(__package__.rpartition(".")[0])
    return torch.__version__, getattr(engine, "__version__", "")


def device_of(device: torch.device) -> str:
    """The name of a card; of a processor its kind and how many threads torch runs on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, threads {torch.get_num_threads()}"
    return str(device.type)


def dtype_of(dtype: torch.dtype) -> str:
    """``float16``."""
    return str(dtype).removeprefix("torch.")


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
