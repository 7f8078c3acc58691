"""Where merging pays: a level with few tokens is left alone, because matching and merging would outweigh the gain."""

from __future__ import annotations

from .config import MergeRule

# The fewest tokens at which one block was faster merged than not, whatever the preset.
# cpu: measured, an SD1.5 block in float32, batch 2, one thread: at 576 tokens .84 to 1.06 of the unmerged speed where
# every step matches anew, at 1,024 1.22 to 1.32 over the steps of a picture.
# others: estimated, from kernels to launch beside what attention of that size takes; below 4,096 a fast GPU waits
# for launches.
_LEAST = {"cpu": 1024}
_LEAST_ELSEWHERE = 4096
# The MLP's work grows with the square of the channels: estimated, what SDXL has at 1024 px, at either of its levels.
_LEAST_MLP_ELSEWHERE = 4096 * 640**2


def pays(rule: MergeRule | None, tokens: int, device: str) -> bool:
    """Is a grid of so many tokens large enough for the rule, on a device of this type ("cpu", "cuda", ...)?"""
    return rule is not None and (not rule.only_if_it_pays or tokens >= _LEAST.get(device, _LEAST_ELSEWHERE))


def pays_in_mlp(rule: MergeRule | None, tokens: int, channels: int, device: str) -> bool:
    """The same of a rule in the feed-forward layer of a block with so many channels."""
    if rule is None or not rule.only_if_it_pays:
        return rule is not None
    return tokens >= _LEAST[device] if device in _LEAST else tokens * channels**2 >= _LEAST_MLP_ELSEWHERE
