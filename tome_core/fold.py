"""Folding the sizes of merged keys into attention, over the module's own projections.

With ``s`` the scale that an attention uses on heads of width ``d``, and ``t`` the one it uses on wider heads,

    s q.k + log n  =  t [q, 1/t].[k s/t, log n]

so extra channels on every head of q and k carry the term, and whatever computes the attention in between (SDPA,
xformers, a host's own code, with its settings) stays as it is. k is what is scaled, because it is merged and short.
v gets as many zeros, because flash kernels want one width (on a CPU, with v left narrower, the block ran at half the
speed); what they become is cut off again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .plan import MergePlan
from .wrap import Now, Wrap

_EMPTY = -1000.0  # of a group without tokens: its weight is 0 after the softmax, and no kernel meets an infinity


class Folding(NamedTuple):
    """One attention call whose keys know their sizes.

    plan: whose sizes; heads: how many; extra: channels added to each of them.
    own, wide: the attention's scale on its own heads, and on the wider ones. cut: channels that were added to x.
    """

    plan: MergePlan
    heads: int
    extra: int
    own: float
    wide: float
    cut: int = 0


def size_logs(plan: MergePlan) -> torch.Tensor:
    """What each key adds to its logit: float32 ``[B or 1, G]``, finite for an empty group too."""
    return plan.key_logits.clamp(min=_EMPTY)


def extra_channels(width: int) -> int:
    """How many a head gets: two at least, and as many as make a multiple of 8, which is what kernels run fast.

    On a CPU in float32, width 40, one extra channel cost 15 % of the attention's time and eight 9 %.
    """
    extra = -width % 8
    return extra if extra >= 2 else extra + 8


class Projection(Wrap):
    """Around ``to_q``, ``to_k``, ``to_v`` or the first layer of ``to_out``: adds the channels, or cuts them off.

    Passes everything on while no call is folded.
    """

    def __init__(self, module: nn.Module, role: str, now: Now) -> None:
        super().__init__(module)
        self.role = role
        self.now = now  # holds a Folding

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The projection, of heads that are ``extra`` channels wider in between."""
        folding = self.now.call
        if folding is None or not self.active:
            return self.original(x, *args, **kwargs)
        if self.role == "to_out":
            heads = x.unflatten(-1, (folding.heads, -1))
            return self.original(heads[..., : -folding.extra].flatten(-2), *args, **kwargs)
        if self.role == "to_q" and folding.cut:
            x = x[..., : -folding.cut]
        heads = self.original(x, *args, **kwargs).unflatten(-1, (folding.heads, -1))
        return _widen(self.role, heads, folding).flatten(-2)


def _widen(role: str, heads: torch.Tensor, folding: Folding) -> torch.Tensor:
    """``[B, N, heads, d]`` to ``[B, N, heads, d + extra]``."""
    if role == "to_k" and folding.own != folding.wide:
        heads = heads * (folding.own / folding.wide)
    # one copy; padding would fill and then copy
    return torch.cat([heads, _tail(role, folding, heads.dtype).expand(*heads.shape[:3], -1)], -1)


def _tail(role: str, folding: Folding, dtype: torch.dtype) -> torch.Tensor:
    """The extra channels, ``[B or 1, G or 1, 1, extra]``; made once for a plan that serves several calls."""
    key = (role, folding.wide, folding.extra, dtype)
    derived = folding.plan.derived
    if key not in derived:
        if role == "to_k":
            derived[key] = _parts(size_logs(folding.plan), dtype, folding.extra)[:, :, None]
        else:
            value = 1 / folding.wide if role == "to_q" else 0.0
            derived[key] = torch.full((1, 1, 1, folding.extra), value, dtype=dtype, device=folding.plan.group.device)
    return derived[key]


def _parts(logs: torch.Tensor, dtype: torch.dtype, extra: int) -> torch.Tensor:
    """``[B or 1, G]`` to ``[B or 1, G, extra]``: high and low part, whose sum halves the error in half precision."""
    high = logs.to(dtype)
    low = (logs - high.float()).to(dtype)
    return F.pad(torch.stack([high, low], -1), (0, extra - 2))


class ProjectionWraps:
    """The wraps of one attention's projections; shared by a site and its copies."""

    def __init__(self, attention: nn.Module) -> None:
        self.attention = attention
        self.now = Now()
        self._wraps: dict[str, Projection] = {}

    def install(self) -> None:
        """Put them on top of what the attention has now; idempotent, and brings back what somebody overwrote."""
        found = dict(_projections(self.attention))
        for role in [role for role, wrap in self._wraps.items() if found.get(role) is not wrap.target]:
            self._wraps.pop(role).uninstall()
        for role, module in found.items():
            wrap = self._wraps.setdefault(role, Projection(module, role, self.now))  # known before it is on
            self._wraps[role] = wrap.install()

    def uninstall(self) -> None:
        """Take them off."""
        for wrap in reversed(self._wraps.values()):
            wrap.uninstall()

    def are_in_force(self) -> bool:
        """Are they what runs first in the projections that the attention has now?

        They are not where a LoRA has replaced a projection since, or put a forward of its own on it.
        """
        found = _projections(self.attention)
        return len(found) == 4 and all(_is_on(self._wraps.get(role), module) for role, module in found)


def _is_on(wrap: Projection | None, module: nn.Module) -> bool:
    if wrap is None or wrap.target is not module:
        return False
    if torch.compiler.is_compiling():  # which cannot follow the other question
        return getattr(module.forward, "__self__", module.forward) is wrap
    return wrap.is_on_top()


def _projections(attention: nn.Module) -> list[tuple[str, nn.Module]]:
    """By role, the modules that are what we know: of ``to_out`` the first layer."""
    found = []
    for role in ("to_q", "to_k", "to_v", "to_out"):
        module = getattr(attention, role, None)
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            module = module[0] if len(module) else None
        if isinstance(module, nn.Module):
            found.append((role, module))
    return found
