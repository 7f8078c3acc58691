"""Whole blocks of a transformer on merged tokens, and the linear correction of what this loses.

The blocks run on the mean of each group of tokens, and on a few samples, tokens that stay as they are. What they add to
a group's mean is added to each of its tokens. By ridge regression a linear map is fitted to the samples, from a token's
difference to its group's mean to the difference of what is added; it corrects all other tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.correction import inverse, pick_middles
from ..merging.grid import Grid
from ..merging.plan import MergePlan, to_exact, without_autocast

_TOKENS_PER_SAMPLE = 32
_RIDGE = 0.1  # the penalty of the fit, relative to the mean square of the samples
_TINY = 1e-12


def pick_samples(grid: Grid, device: torch.device) -> tuple[Tensor]:
    """Choose the samples, evenly spaced over the grid: int64 ``(samples,)``, in a tuple for `grid.cached_result`."""
    return (pick_middles(grid, max(1, grid.height * grid.width // _TOKENS_PER_SAMPLE), device),)


class MergedTokens(NamedTuple):
    """The input of the first merged block, and what the merged blocks get for it."""

    x: Tensor  # (batch, tokens, channels)
    merged: Tensor  # the means of groups, then the samples, (batch, groups + samples, channels)
    plan: MergePlan
    samples: Tensor | None  # int64 (samples,); None: there is no correction

    @classmethod
    def of(cls, x: Tensor, plan: MergePlan, samples: Tensor | None) -> MergedTokens:
        """Merge tokens ``(batch, tokens, channels)`` by a plan."""
        means = plan.merge(x)
        return cls(x, means if samples is None else torch.cat([means, x[:, samples]], 1), plan, samples)

    def unmerge(self, out: Tensor) -> Tensor:
        """Return the last block's output for all tokens; `out` is its output for the merged ones, shaped like them."""
        plan, samples, added = self.plan, self.samples, out - self.merged
        if samples is None:
            return self.x + plan.unmerge(added)
        of_groups, exact = plan.unmerge(added[:, : plan.num_groups]), added[:, plan.num_groups :]
        with without_autocast(added):
            apart = self.x - plan.unmerge(self.merged[:, : plan.num_groups])
            few, lost = to_exact(apart[:, samples]), to_exact(exact - of_groups[:, samples])
            products = few @ few.transpose(1, 2)
            unit = products.diagonal(dim1=1, dim2=2).mean(1)[:, None, None].clamp(min=_TINY)
            weights = inverse((products / unit)[:, None], _RIDGE, len(samples))[:, 0] @ lost
            # Two thin products instead of a map between all channels. The first is about 1: half precision can hold it.
            shares = apart.to(added.dtype) @ (few / unit).to(added.dtype).transpose(1, 2)
            added = torch.baddbmm(of_groups, shares, weights.to(added.dtype))
        added = added.scatter(1, samples[None, :, None].expand_as(exact), exact)  # DirectML has no index_copy
        return self.x + added
