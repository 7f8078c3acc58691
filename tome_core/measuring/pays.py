"""Whether a patch merges in a kind of call: what was measured says so, else what is known of the card.

Asked when the patch is put on, and never again while it stays on: nobody's picture changes half way. What a gain
belongs to is told in short texts. Weights do not count: another checkpoint or a LoRA of the same shape is as fast.
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

from ..attention.by_hand import full_name
from ..engine.decision import Gate, is_host_bound
from ..models.intercept import names_known_to
from ..models.unet_blocks import Place
from ..reporting.gains import Gain, nearest
from ..settings.config import MergeConfig
from ..settings.schedule import LevelRules

_HOST_BOUND = "the card is so fast at this size that it waits for its host, and merging would not pay; not measured"
_RESIDUAL = "Res"  # what every host's class of residual blocks begins with


class Pays:
    """The gate of each kind of call, by what merging was measured to gain.

    gains: of this model and these rules; used: those that decided, in order. blocks: (down-sampling, channels) each.
    always: merge in calls of every kind, without asking: that is what a measurement is made of.
    """

    def __init__(self, gains: Sequence[Gain], blocks: Sequence[tuple[int, int]], always: bool = False) -> None:
        self._gains, self._blocks, self._always = tuple(gains), tuple(blocks), always
        self._found: dict[tuple, tuple[Gate, Gain | None]] = {}
        self.used: dict[Gain, None] = {}

    def gates(self, rules: Sequence[LevelRules], latent: Any) -> tuple[Gate, ...]:
        """By level, for `engine.decision.decide`. rules: those in force, by level; latent: of the call.

        If merging pays, the finest level that they reach merges whatever its size.
        """
        if not torch.is_tensor(latent) or latent.dim() != 4:
            return (None,) * len(rules)
        key = latent.shape, latent.dtype, latent.device
        if key not in self._found:
            self._found[key] = self._ask(latent)
        gate, gain = self._found[key]
        if gain is not None:
            self.used[gain] = None
        finest = next((level for level, one in enumerate(rules) if any(one)), 0)
        return tuple(gate if gate is not True or level == finest else None for level in range(len(rules)))

    def _ask(self, latent: torch.Tensor) -> tuple[Gate, Gain | None]:
        batch, _, height, width = latent.shape
        gain = nearest(self._gains, device_of(latent.device), dtype_of(latent.dtype), height, width, batch)
        if gain is not None or self._always:
            return self._always or gain.pays or gain.why_not, gain
        is_bound = is_host_bound(self._blocks, batch, height * width, latent.dtype, latent.device)
        return _HOST_BOUND if is_bound else None, None


def about(unet: nn.Module, places: Sequence[Place], config: MergeConfig) -> tuple[str, ...]:
    """The first fields of a `Gain`: the UNet's shape, what is merged, by what attention, versions of torch and of us.

    The seed, which a host may draw for each picture, costs no time.
    """
    blocks = [(one.path, one.halvings, *widths_of(one.block), getattr(getattr(one.block, "attn1", None), "heads", 0))
              for one in places]  # fmt: skip
    residual = Counter(name for name in (type(one).__name__ for one in unet.modules()) if name.startswith(_RESIDUAL))
    model = f"{type(unet).__name__} {digest(blocks, sorted(residual.items()))}"
    attention, function = getattr(places[0].block, "attn1", None), ""
    if attention is not None:
        name, code = type(getattr(attention, "processor", attention)).__name__, type(attention).forward
        function = " ".join((name, full_name(code), *names_known_to(code)))
    return model, digest(replace(config, seed=0)), function, torch.__version__, version()


def widths_of(block: nn.Module) -> tuple[int, int]:
    """Channels of a block's tokens and of the prompt's; 0 where they cannot be told."""
    return tuple(getattr(getattr(getattr(block, attention, None), projection, None), "in_features", 0)
                 for attention, projection in (("attn1", "to_q"), ("attn2", "to_k")))  # fmt: skip


def device_of(device: torch.device) -> str:
    """The name of a card; of a processor its kind and how many threads torch runs on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, threads {torch.get_num_threads()}"
    return device.type


def dtype_of(dtype: torch.dtype) -> str:
    """``float16``."""
    return str(dtype).removeprefix("torch.")


def version() -> str:
    """Of this engine, whatever its package is called here."""
    return sys.modules[__package__.rpartition(".")[0]].__version__


def digest(*parts: object) -> str:
    """A short name for what is written out alike."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
