"""Whether merging pays: an estimate for calls on a GPU, and the reason why pictures of a size would not merge.

The estimate is chosen when the patch is put on, and holds until it is taken off, so that no picture changes half way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..engine.decision import decide
from ..engine.time import Clock
from ..models import Adapter, adapter_of, find_models
from ..models.unet_blocks import is_compiled
from ..reporting.ledger import NOT_AT_THIS_SIZE
from ..settings.config import MergeConfig, MergeRule
from ..settings.presets import TRANSFORMER
from ..settings.rules import choose

PIXELS = 8  # pixels per latent cell, along a side

# 10^12 operations per second of one multiprocessor in half precision, by compute capability, from data sheets
_PER_PROCESSOR = {(8, 0): 1.2, (8, 6): 0.6, (8, 9): 0.76, (9, 0): 2.4, (10, 0): 4.0, (12, 0): 0.8}
_FULL_PRECISION = 1 / 3  # float32's rate, as a share of the rate in half precision
# The mean time of a block's operations at the rate above, below which merging does not pay. Measured on an H200
# (docs/gpu.md) with eager calls in half precision, batch 2. At .14 ms (SD1.5 at 512 px), .45 (SDXL at 1024) and 1.1
# (SD1.5 at 1024), 20 steps of `balanced` took up to a third longer than unmerged ones. At 2.6 (SDXL at 2048) they were
# 1.04 times as fast, at 13 (SD1.5 at 2048) twice as fast.
_HOST_BOUND_MS = 1.3


class Pays:
    """The estimate whether merging pays in a call, kept for each shape, dtype and device of latents.

    `blocks` has (latent cells per token along a side, channels) of each block of the UNet.
    """

    def __init__(self, blocks: Sequence[tuple[int, int]]) -> None:
        self._blocks = tuple(blocks)
        self._gates: dict[tuple, str | None] = {}

    def gate(self, latent: Any) -> str | None:
        """Return why rules with `only_if_it_pays` do not merge in a call; None if the number of tokens decides."""
        if not torch.is_tensor(latent) or latent.dim() != 4:
            return None
        key = latent.shape, latent.dtype, latent.device
        if key not in self._gates:
            batch, _, height, width = latent.shape
            is_bound = is_host_bound(self._blocks, batch, height * width, latent.dtype, latent.device)
            self._gates[key] = NOT_AT_THIS_SIZE if is_bound else None
        return self._gates[key]


def pays_of(rules: Sequence[MergeRule], model: nn.Module, adapter: Adapter) -> Pays | None:
    """Return the estimate for a model by its adapter, for `State.pays`; None if the number of tokens decides alone.

    It does if none of the `rules` has `only_if_it_pays`, for a compiled UNet, whose time launches do not limit, and for
    a transformer.
    """
    if adapter.curve == TRANSFORMER or not any(rule.only_if_it_pays for rule in rules):
        return None
    places = adapter.places
    if is_compiled(model, places):
        return None
    projections = [getattr(getattr(place.block, "attn1", None), "to_q", None) for place in places]
    channels = [getattr(projection, "in_features", 0) for projection in projections]  # 0: not known
    return Pays([(2**place.halvings, width) for place, width in zip(places, channels, strict=True)])


def why_not_at(model: Any, config: MergeConfig, height: int, width: int, batch: int = 2) -> str:
    """Return the first reason why pictures of a size in pixels would not merge, without calling the model.

    It is "" if a rule would merge at some level and time, and for every transformer. `model` is one that `patch` takes,
    `batch` is samples in a call. An UnsupportedModelError or a TypeError is raised if the model cannot be patched.
    """
    model = find_models(model)[0]
    adapter = adapter_of(model)
    if adapter.curve == TRANSFORMER:
        return ""
    clock = Clock(config, adapter.downsamples)
    latent, pays = empty_latent(model, batch, height, width), pays_of(clock.rules, model, adapter)
    gate, reasons = None if pays is None else pays.gate(latent), []
    for rule in clock.rules:
        for level_rules, factor in zip(choose((rule,), clock.downsamples), clock.downsamples, strict=True):
            tokens = -(-latent.shape[2] // factor) * -(-latent.shape[3] // factor)
            reasons.append(decide(level_rules, "no rule holds for this size", tokens, latent.device.type, gate)[1])
    return reasons[0] if all(reasons) else ""


def empty_latent(unet: nn.Module, batch: int, height: int, width: int) -> torch.Tensor:
    """Return empty latents of a size in pixels, with one channel, on the device and in the dtype of a UNet's calls."""
    weight = next(parameter for parameter in unet.parameters() if parameter.is_floating_point())
    device = getattr(getattr(unet, "_hf_hook", None), "execution_device", None)
    sides = height // PIXELS, width // PIXELS
    return torch.empty(batch, 1, *sides, device=weight.device if device is None else device, dtype=weight.dtype)


def is_host_bound(
    blocks: Sequence[tuple[int, int]], batch: int, area: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Estimate whether merging would not pay because eager calls wait for the launches of kernels, not for the GPU.

    True if an average block's operations take the GPU less than `_HOST_BOUND_MS` at its nominal rate; False for a
    device that is no NVIDIA card of a known kind. `blocks` has (latent cells per token along a side, channels) of each
    block; `batch` is the number of latents, `area` the latent cells of one.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    try:
        card = torch.cuda.get_device_properties(device)
        rate = _PER_PROCESSOR[card.major, card.minor] * card.multi_processor_count
    except (AssertionError, RuntimeError, KeyError):  # no card (a fake tensor may claim one), or an unknown kind
        return False
    rate *= _FULL_PRECISION if dtype == torch.float32 else 1.0
    sizes = ((area / downsample**2, channels) for downsample, channels in blocks)
    # projections of two attentions and the feed-forward layer; queries with keys, and weights with values
    work = batch * sum(36 * tokens * channels**2 + 4 * tokens**2 * channels for tokens, channels in sizes)
    return work / rate / 1e9 < _HOST_BOUND_MS * len(blocks)
