"""One call of a model, and how the blocks of a level merge in it: by the rules in force, as far as they pay.

Without a measurement, a level with few tokens is left alone, because matching and merging would outweigh the gain. So
is a whole call on a card that is done before its host has told it what to do: merging makes that host's work longer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..merging.grid import Grid, Layout
from ..settings.schedule import LevelRules
from .plan_cache import KeptPlans

# The fewest tokens at which a block was faster merged than not, whatever the preset. cpu: measured, an SD1.5 block in
# float32, batch 2, one thread: at 576 tokens .84 to 1.06 of the unmerged speed if every step matches anew, at 1,024
# 1.22 to 1.32 over the steps of a picture. Others: estimated, from kernels to launch.
_LEAST = {"cpu": 1024}
_LEAST_ELSEWHERE = 4096

# 10^12 operations a second in half precision of one multiprocessor, by compute capability: in proportion to data sheets
_PER_PROCESSOR = {(8, 0): 1.2, (8, 6): 0.6, (8, 9): 0.76, (9, 0): 2.4, (10, 0): 4.0, (12, 0): 0.8}
_FULL_PRECISION = 1 / 3  # of that in float32
# Measured on an H200 (docs/gpu.md), eager calls in half precision, batch 2, by what a block's operations take at the
# rate above. .14 ms (SD1.5 at 512 px), .45 (SDXL at 1024) and 1.1 (SD1.5 at 1024): 20 steps of `balanced` took up to a
# third longer than unmerged. 2.6 (SDXL at 2048): 1.04 times as fast; 13 (SD1.5 at 2048): twice as fast.
_HOST_BOUND_MS = 1.3


Gate = bool | str | None  # see `decide`


@dataclass(eq=False)
class Call:
    """One call of a model.

    state: the `State` that began it. stamp: its timestep argument, what draws depend on. rules: those in force, by
    level. why_off: by level, why there are none. gates: by level, as of `decide`. kept: plans of the calls before it in
    the same sampling; None if nothing is kept. turns: how often each attention was called in it so far.

    What follows is the adapters'. facts: what was read of it besides. layouts: of each level of a UNet, the latest.
    block: of tomesd's way, the input of the block that runs, and its plans by rule. reached: the attentions that were
    called so far, by name.
    """

    state: Any
    stamp: Any
    rules: tuple[LevelRules, ...]
    why_off: tuple[str, ...]
    gates: tuple[Gate, ...]
    kept: KeptPlans | None = None
    turns: dict[Hashable, int] = field(default_factory=dict)
    facts: Any = None
    layouts: dict[int, Layout] = field(default_factory=dict)
    block: tuple[torch.Tensor, dict] | None = None
    reached: list[str] = field(default_factory=list)


class MergeMap(NamedTuple):
    """What one attention merged, to be looked at. group: int64 ``[B or 1, N]`` on the CPU, the group of each token."""

    grid: Grid
    group: torch.Tensor
    num_groups: int


def decide(rules: LevelRules, why_off: str, tokens: int, device: str, gate: Gate = None) -> tuple[LevelRules, str]:
    """Of the rules in force, those that pay at this size; and why there are none, "" if there are.

    Args:
        why_off: the reason if no rule is in force.
        tokens: of the picture in this level.
        device: its type ("cpu", "cuda", ...).
        gate: of the rules that merge only if it pays. True: they merge; a reason: they do not; None: as the number of
            tokens says.
    """
    if not any(rules):
        return rules, why_off
    pays = tokens >= _LEAST.get(device, _LEAST_ELSEWHERE) if gate is None else gate is True
    found = LevelRules(*(rule if rule and (pays or not rule.only_if_it_pays) else None for rule in rules))
    return found, "" if any(found) else gate or "so few tokens that merging would not pay"


def is_host_bound(
    blocks: Sequence[tuple[int, int]], batch: int, area: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Is a card so fast that a merged eager call would wait for its host?

    blocks: (down-sampling, channels) each. area: tokens of the latent.

    False for what is no NVIDIA card, and for one whose kind is not known; also if a tensor only claims to be on one.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    try:
        card = torch.cuda.get_device_properties(device)
        rate = _PER_PROCESSOR[card.major, card.minor] * card.multi_processor_count
    except (AssertionError, RuntimeError, KeyError):  # there is none, or none that is known
        return False
    rate *= _FULL_PRECISION if dtype == torch.float32 else 1.0
    sizes = ((area / downsample**2, channels) for downsample, channels in blocks)
    # projections of two attentions and the feed-forward layer; queries with keys, and weights with values
    work = batch * sum(36 * tokens * channels**2 + 4 * tokens**2 * channels for tokens, channels in sizes)
    return work / rate / 1e9 < _HOST_BOUND_MS * len(blocks)
