"""The decision whether merging pays in a kind of call: by a measured gain, else by an estimate for the GPU.

It is made when the patch is put on and holds until the patch is taken off, so that no picture changes half way. Weights
do not identify a gain, because another checkpoint or a LoRA of the same shape is as fast.
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


class Pays:
    """The decision for each shape, dtype and device of latents whether merging pays: by a measured gain, or estimated.

    `gains` are those of this model and these rules, `blocks` has (latent cells per token along a side, channels) of
    each block. `always`, for a measurement, merges the finest level with rules, however few its tokens are. The keys of
    `used` are the gains that decided so far, in order.
    """

    def __init__(self, gains: Sequence[Gain], blocks: Sequence[tuple[int, int]], always: bool = False) -> None:
        self._gains, self._blocks, self._always = tuple(gains), tuple(blocks), always
        self._gates: dict[tuple, tuple[Gate, Gain | None]] = {}
        self.used: dict[Gain, None] = {}

    def gates(self, rules: Sequence[LevelRules], latent: Any) -> tuple[Gate, ...]:
        """Return for each level whether rules with `only_if_it_pays` merge, for `engine.decision.decide`.

        It is True, or the reason why merging does not pay, or None if the number of tokens decides. With `always`, or
        if a gain says that merging pays, the finest level with one of the `rules` is True, the others None. If a gain
        or, without gains, the estimate says that it does not, all levels have the reason. Else all are None, also if
        `latent` has not four dimensions. The gain that decides is added to `used`.
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
        """Return (gate, gain or None). gate: True (also by `always`), the reason why not, None: token count decides."""
        batch, _, height, width = latent.shape
        gain = nearest(self._gains, device_of(latent.device), dtype_of(latent.dtype), height, width, batch)
        if gain is not None or self._always:
            return self._always or gain.pays or gain.why_not, gain
        is_bound = is_host_bound(self._blocks, batch, height * width, latent.dtype, latent.device)
        return _HOST_BOUND if is_bound else None, None


def about(unet: nn.Module, places: Sequence[BlockPlace], config: MergeConfig) -> tuple[str, ...]:
    """Return the first five fields of a `Gain`: model, rules, attention, and the versions of torch and this package.

    The rules are without the seed, because a host may draw it for each picture. The attention is that of the first of
    `places`, the UNet's blocks, which must not be empty.
    """
    blocks = [(place.path, place.halvings, *widths_of(place.block),
               getattr(getattr(place.block, "attn1", None), "heads", 0)) for place in places]  # fmt: skip
    classes = (type(module).__name__ for module in unet.modules())
    residual = Counter(name for name in classes if name.startswith("Res"))  # residual blocks, in every host
    model = f"{type(unet).__name__} {digest(blocks, sorted(residual.items()))}"
    attention, function = getattr(places[0].block, "attn1", None), ""
    if attention is not None:
        name, code = type(getattr(attention, "processor", attention)).__name__, type(attention).forward
        function = " ".join((name, full_name(code), *attention_names_in(code)))
    return model, digest(replace(config, seed=0)), function, torch.__version__, version()


def widths_of(block: nn.Module) -> tuple[int, int]:
    """Return the channels of the block's tokens and of the prompt's tokens, each 0 if it is not known."""
    return tuple(getattr(getattr(getattr(block, attention, None), projection, None), "in_features", 0)
                 for attention, projection in (("attn1", "to_q"), ("attn2", "to_k")))  # fmt: skip


def device_of(device: torch.device) -> str:
    """Return a CUDA GPU's name; a CPU's kind and torch's threads, as ``x86_64, threads 8``; or a device's type."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, threads {torch.get_num_threads()}"
    return device.type


def dtype_of(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as ``float16``."""
    return str(dtype).removeprefix("torch.")


def version() -> str:
    """Return the version of this package, under any name by which it was imported."""
    return sys.modules[__package__.rpartition(".")[0]].__version__


def digest(*parts: object) -> str:
    """Return a hash of the parts' representations (``repr``), 12 hexadecimal digits."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
