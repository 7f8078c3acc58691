"""Where merging pays, as far as can be said without a measurement.

A level with few tokens is left alone, because matching and merging would outweigh the gain. So is a whole call on a
card that is done before its host has told it what to do: merging makes that host's work longer and no other shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from ..settings.config import MergeRule
from ..settings.schedule import LevelRules

# The fewest tokens at which one block was faster merged than not, whatever the preset.
# cpu: measured, an SD1.5 block in float32, batch 2, one thread: at 576 tokens .84 to 1.06 of the unmerged speed where
# every step matches anew, at 1,024 1.22 to 1.32 over the steps of a picture.
# others: estimated, from kernels to launch beside what attention of that size takes; below 4,096 a fast GPU waits
# for launches.
_LEAST = {"cpu": 1024}
_LEAST_ELSEWHERE = 4096
# The MLP's work grows with the square of the channels: estimated, what SDXL has at 1024 px, at either of its levels.
_LEAST_MLP_ELSEWHERE = 4096 * 640**2

# Modelled, not measured: 10^12 operations a second in half precision that one multiprocessor keeps up over a whole
# call, by compute capability. A roofline over the counted operators of SD1.5 and SDXL gives an RTX 3060 16.5 in all,
# an RTX 4090 97 and an H200 317; others in proportion to the dense half-precision figures of their data sheets.
_PER_PROCESSOR = {(7, 0): 0.7, (7, 5): 0.5, (8, 0): 1.2, (8, 6): 0.6, (8, 9): 0.76, (9, 0): 2.4, (10, 0): 4.0,
                  (12, 0): 0.8}  # fmt: skip
_FULL_PRECISION = 1 / 3  # of that in float32
# An eager call costs its host 20 to 30 ms on SD1.5, which has 16 blocks, and 40 on SDXL, which has 70.
_HOST_MS, _HOST_MS_A_BLOCK = 18.0, 0.35
_BEYOND_BLOCKS = 1.6  # operations of a call for each in a transformer block: 1.4 to 2.3, the rest is convolutions
# By the same model, of 20 steps of `balanced` with the launches that tests/engine/merging/test_kernels_launches.py
# counts, merging loses where the card needs less than 1.0 (SD1.5 at 512 px) to 1.4 (SDXL at 1024) times its host's
# time, and gains above. H200: .94 and .88 on SD1.5 at 512 and 1024 px, .88 on SDXL at 1024; 4090: .94 on SD1.5 at
# 512: matching that cost nothing would be at .95, .92, .90 and .95, because each merged block makes its host's work
# longer. Left open: 4090 1.52 on SD1.5 at 1024 and 1.02 on SDXL at 1024, 3060 1.14 on SD1.5 at 512, H200 3.2 on SD1.5
# and 1.20 on SDXL at 2048.
_HOST_BOUND = 1.5


def pays(rule: MergeRule | None, tokens: int, device: str) -> bool:
    """Is a grid of so many tokens large enough for the rule, on a device of this type ("cpu", "cuda", ...)?"""
    return rule is not None and (not rule.only_if_it_pays or tokens >= _LEAST.get(device, _LEAST_ELSEWHERE))


def pays_in_mlp(rule: MergeRule | None, tokens: int, channels: int, device: str) -> bool:
    """As `pays`, for the feed-forward layer of a block. channels: of the block's tokens."""
    if rule is None or not rule.only_if_it_pays:
        return rule is not None
    return tokens >= _LEAST[device] if device in _LEAST else tokens * channels**2 >= _LEAST_MLP_ELSEWHERE


def is_host_bound(
    blocks: Sequence[tuple[int, int]], batch: int, area: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Does a card wait for its host in an eager call? blocks: (down-sampling, channels); area: tokens of a latent.

    False for what is no NVIDIA card, and for one whose kind is not known; also where a tensor only claims to be on one.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    try:
        card = torch.cuda.get_device_properties(device)
        each = _PER_PROCESSOR[card.major, card.minor]
    except (AssertionError, RuntimeError, KeyError):  # there is none, or none that is known
        return False
    rate = each * card.multi_processor_count * (_FULL_PRECISION if dtype == torch.float32 else 1.0)
    return device_ms(blocks, batch, area, rate) < _HOST_BOUND * (_HOST_MS + _HOST_MS_A_BLOCK * len(blocks))


def device_ms(blocks: Sequence[tuple[int, int]], batch: int, area: int, rate: float) -> float:
    """Milliseconds of a call on a card of this rate, in 10^12 operations a second."""
    sizes = ((area / downsample**2, channels) for downsample, channels in blocks)
    # projections of two attentions and the feed-forward layer; queries with keys, and weights with values
    work = sum(36 * tokens * channels**2 + 4 * tokens**2 * channels for tokens, channels in sizes)
    return batch * work * _BEYOND_BLOCKS / rate / 1e9


def open_gate(rules: tuple[LevelRules, ...]) -> tuple[LevelRules, ...]:
    """The rules of all levels, of the finest that they reach without the question whether it pays."""
    finest = next((level for level, one in enumerate(rules) if any(one)), None)
    if finest is None:
        return rules
    free = LevelRules(*(rule and _free(rule) for rule in rules[finest]))
    return (*rules[:finest], free, *rules[finest + 1 :])


@lru_cache(maxsize=256)
def _free(rule: MergeRule) -> MergeRule:
    """One object for a rule: parts that merge by the same one share its match, and steps what is kept of it."""
    return replace(rule, only_if_it_pays=False)


def close_gate(rules: tuple[LevelRules, ...]) -> tuple[LevelRules, ...]:
    """The rules of all levels without those that are to merge only where it pays."""
    return tuple(LevelRules(*(None if rule and rule.only_if_it_pays else rule for rule in one)) for one in rules)
