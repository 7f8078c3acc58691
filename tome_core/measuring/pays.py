"""The decision whether merging pays in a kind of call: by a measured gain, else by an estimate for the GPU.

The decision is made when the patch is put on, and holds until it is taken off, so that no picture changes half way. A
gain is identified by short texts. Weights are not part of them, because another checkpoint or a LoRA of the same shape
is as fast.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..attention.descriptions import full_name
from ..engine.decision import Gate, is_host_bound
from ..models.intercept import attention_names_in
from ..models.unet_blocks import BlockPlace
from ..reporting.gains import Gain, nearest
from ..settings.config import MergeConfig
from ..settings.schedule import LevelRules

_HOST_BOUND = "at this size the GPU waits for kernel launches, so merging would not pay (estimated, not measured)"
_RESIDUAL = "Res"  # the beginning of every host's class name of residual blocks


class Pays:
    """The gate of each kind of call, by the measured gains.

    Args:
        gains: of this model and these rules.
        blocks: (down-sampling, channels) of each block.
        always: merge in every call; for a measurement.

    Attributes:
        used: the gains that decided, in order, as keys.
    """

    def __init__(self, gains: Sequence[Gain], blocks: Sequence[tuple[int, int]], always: bool = False) -> None:
        self._gains, self._blocks, self._always = tuple(gains), tuple(blocks), always
        self._gates: dict[tuple, tuple[Gate, Gain | None]] = {}
        self.used: dict[Gain, None] = {}

    def gates(self, rules: Sequence[LevelRules], latent: Any) -> tuple[Gate, ...]:
        """Return the gate of each level, for `engine.decision.decide`.

        If merging pays, the finest level with a rule merges at any size.

        Args:
            rules: the rules in force, by level.
            latent: of the call.
        """
        if not torch.is_tensor(latent) or latent.dim() != 4:
            return (None,) * len(rules)
        key = latent.shape, latent.dtype, latent.device
        if key not in self._gates:
            self._gates[key] = self._gate_of(latent)
        gate, gain = self._gates[key]
        if gain is not None:
            self.used[gain] = None
        finest = next((level for level, level_rules in enumerate(rules) if any(level_rules)), 0)
        return tuple(gate if gate is not True or level == finest else None for level in range(len(rules)))

    def _gate_of(self, latent: torch.Tensor) -> tuple[Gate, Gain | None]:
        batch, _, height, width = latent.shape
        gain = nearest(self._gains, device_of(latent.device), dtype_of(latent.dtype), height, width, batch)
        if gain is not None or self._always:
            return self._always or gain.pays or gain.why_not, gain
        is_bound = is_host_bound(self._blocks, batch, height * width, latent.dtype, latent.device)
        return _HOST_BOUND if is_bound else None, None


def about(unet: nn.Module, places: Sequence[BlockPlace], config: MergeConfig) -> tuple[str, ...]:
    """Return the first fields of a `Gain`: the UNet's shape, the rules, the attention, and the versions.

    The rules' seed is left out, because a host may draw it for each picture.
    """
    blocks = [(place.path, place.halvings, *widths_of(place.block),
               getattr(getattr(place.block, "attn1", None), "heads", 0)) for place in places]  # fmt: skip
    classes = (type(module).__name__ for module in unet.modules())
    residual = Counter(name for name in classes if name.startswith(_RESIDUAL))
    model = f"{type(unet).__name__} {digest(blocks, sorted(residual.items()))}"
    attention, function = getattr(places[0].block, "attn1", None), ""
    if attention is not None:
        name, code = type(getattr(attention, "processor", attention)).__name__, type(attention).forward
        function = " ".join((name, full_name(code), *attention_names_in(code)))
    return model, digest(replace(config, seed=0)), function, torch.__version__, version()


def widths_of(block: nn.Module) -> tuple[int, int]:
    """Return the channels of a block's tokens and of the prompt's; 0 if they are not known."""
    return tuple(getattr(getattr(getattr(block, attention, None), projection, None), "in_features", 0)
                 for attention, projection in (("attn1", "to_q"), ("attn2", "to_k")))  # fmt: skip


def device_of(device: torch.device) -> str:
    """Return the name of a GPU, or a CPU's name and torch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, threads {torch.get_num_threads()}"
    return device.type


def dtype_of(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as ``float16``."""
    return str(dtype).removeprefix("torch.")


def version() -> str:
    """Return this engine's version, under any name of its package."""
    return sys.modules[__package__.rpartition(".")[0]].__version__


def digest(*parts: object) -> str:
    """Return a short hash of the parts' representations."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
