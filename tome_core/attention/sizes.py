"""Proportional attention: how a merged key gets to weigh as much as the tokens it stands for.

Attention over keys of which the j-th is repeated ``n_j`` times is attention over the keys alone with ``log n_j``
added to their logits (ToMe, arXiv 2210.09461, section 3). Where the attention adds no bias, wider heads carry the term:
with ``s`` the scale on heads of width ``d``, and ``t`` the one on wider heads,

    s q.k + log n  =  t [q, 1/t].[k s/t, log n]

k is what is scaled, because it is merged and short. v gets as many zeros, because flash kernels want one width (on a
CPU, with v left narrower, the block ran at half the speed); what they become is cut off again.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F

from ..merging.plan import MergePlan

# Products of queries and keys up to which a bias is taken where wider heads fit as well. It adds no kernel to a block
# whose match is kept, wider heads add four, but flash kernels know no bias.
# cpu: measured, SDPA, batch 2, 8 heads of 40 channels, 4,096 queries, float32: 47 ms against 68 at 256 keys, 167
# against 198 at 1,024; bfloat16 at 256 keys 47 against 52.
# others: estimated; a call of this size waits for launches on a fast GPU. Flash kernels run a head as wide as the next
# of `_FLASH_WIDTHS`: 40 channels and 48 alike, but 72 half as long again as SDXL's 64, which with what widening copies
# is what a bias costs on a 3060 and a 4090 (1.4 times flash), and less than on an H200 (2.3 times) from where work,
# not launches, decides.
_BIAS_UP_TO = {"cpu": math.inf}
_BIAS_UP_TO_ELSEWHERE, _WHERE_WIDER_IS_DEARER = 4096 * 1024, 4096 * 4096
_FLASH_WIDTHS = (32, 64, 96, 128, 192, 256)


def bias_is_cheaper(queries: int, keys: int, width: int, device: str) -> bool:
    """For so many queries and keys on a device of this type, where an attention takes a bias. width: a head's."""
    elsewhere = _WHERE_WIDER_IS_DEARER if width in _DEARER_WIDER else _BIAS_UP_TO_ELSEWHERE
    return queries * keys <= _BIAS_UP_TO.get(device, elsewhere)


def bias_of(plan: MergePlan, q: torch.Tensor) -> torch.Tensor:
    """What is added to the logits: ``[B, 1, G]`` in the dtype of ``q [B, N, H*d]``; made once for a plan."""
    bias = plan.logits_in(q.dtype)[:, None]
    return bias if bias.shape[0] == q.shape[0] else bias.expand(q.shape[0], -1, -1)


def extra_channels(width: int) -> int:
    """How many a head gets: two at least, and as many as make a multiple of 8, which is what kernels run fast.

    On a CPU in float32, width 40, one extra channel cost 15 % of the attention's time and eight 9 %.
    """
    extra = -width % 8
    return extra if extra >= 2 else extra + 8


# widths of heads that are widened beyond the flash width they run at
_DEARER_WIDER = frozenset(
    width for below, one in pairwise((0, *_FLASH_WIDTHS)) for width in range(below + 1, one + 1)
    if width + extra_channels(width) > one
)  # fmt: skip

def widen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, own: float, wide: float, plan: MergePlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q ``[B, N, H*d]``, k, v ``[B, G, H*d]`` to heads of ``d + extra_channels(d)`` that carry the plan's sizes.

    own, wide: the attention's scales on heads of either width.
    """
    q, k, v = (one.unflatten(-1, (heads, -1)) for one in (q, k, v))
    k = k * (own / wide) if own != wide else k
    return _with_tail("q", q, wide, plan), _with_tail("k", k, wide, plan), _with_tail("v", v, wide, plan)


def narrow(out: torch.Tensor, heads: int, extra: int) -> torch.Tensor:
    """``[B, N, H*(d + extra)]`` to ``[B, N, H*d]``."""
    return out.unflatten(-1, (heads, -1))[..., :-extra].flatten(-2)


def _with_tail(role: str, x: torch.Tensor, wide: float, plan: MergePlan) -> torch.Tensor:
    """``[B, N, H, d]`` to flat heads with the extra channels behind; one copy, where padding would fill and copy."""
    extra = extra_channels(x.shape[-1])
    key = (role, wide, extra, x.dtype)
    tail = plan.derived.get(key)
    if tail is None:
        tail = plan.derived[key] = _tail(role, wide, extra, plan, x.dtype)
    return torch.cat([x, tail.expand(*x.shape[:3], -1)], -1).flatten(-2)


def _tail(role: str, wide: float, extra: int, plan: MergePlan, dtype: torch.dtype) -> torch.Tensor:
    """``[B or 1, G or 1, 1, extra]``; of keys a high and a low part, whose sum halves the error in half precision."""
    if role == "k":
        high = plan.finite_logits.to(dtype)
        low = (plan.finite_logits - high.float()).to(dtype)
        return F.pad(torch.stack([high, low], -1), (0, extra - 2))[:, :, None]
    value = 1 / wide if role == "q" else 0.0
    return torch.full((1, 1, 1, extra), value, dtype=dtype, device=plan.group.device)
