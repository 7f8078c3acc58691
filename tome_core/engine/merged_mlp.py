"""The tokens on which a merged feed-forward layer (MLP) runs, and the linear correction of what merging loses.

The layer works on each token alone. It runs on the mean of each group of tokens, and on a few samples, tokens that are
computed exactly. By ridge regression a linear map is fitted to the samples, from a token's difference to its group's
mean to the difference of the outputs; it corrects the tokens that were not computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.correction import inverse, pick_middles
from ..merging.grid import Grid
from ..merging.plan import MergePlan, to_exact, without_autocast

_TOKENS_PER_SAMPLE = 32
_RIDGE = 0.1  # the penalty of the fit, relative to the mean square of the samples
_TINY = 1e-12


def pick_samples(grid: Grid, device: torch.device) -> tuple[Tensor]:
    """Choose evenly spaced samples, about 1 in `_TOKENS_PER_SAMPLE` tokens: int64 ``(samples,)``, in a 1-tuple."""
    return (pick_middles(grid, max(1, grid.height * grid.width // _TOKENS_PER_SAMPLE), device),)


def merge_input(x: Tensor, plan: MergePlan, samples: Tensor | None) -> Tensor:
    """Return the groups' means, then the tokens numbered `samples`, if any: ``(batch, groups + samples, channels)``."""
    means = plan.merge(x)
    return means if samples is None else torch.cat([means, x[:, samples]], 1)


def unmerge_output(out: Tensor, merged: Tensor, x: Tensor, plan: MergePlan, samples: Tensor | None) -> Tensor:
    """Return the layer's output for all tokens, ``(batch, tokens, channels)``, corrected if there are samples.

    `out` is the layer's output for `merged`, which is the result of `merge_input` for the input `x`. `samples`, int64
    ``(samples,)``, are numbers of tokens; their outputs, which are last in `out`, stay as they are.
    """
    if samples is None:
        return plan.unmerge(out)
    of_groups, exact = plan.unmerge(out[:, : plan.num_groups]), out[:, plan.num_groups :]
    with without_autocast(x):
        apart = x - plan.unmerge(merged[:, : plan.num_groups])
        few, lost = to_exact(apart[:, samples]), to_exact(exact - of_groups[:, samples])
        products = few @ few.transpose(1, 2)
        unit = products.diagonal(dim1=1, dim2=2).mean(1)[:, None, None].clamp(min=_TINY)
        weights = inverse((products / unit)[:, None], _RIDGE, len(samples))[:, 0] @ lost
        # Two thin products instead of a map between all channels. The first is about 1, so half precision can hold it.
        # Under autocast `out` has another dtype than `x`.
        shares = apart.to(out.dtype) @ (few / unit).to(out.dtype).transpose(1, 2)
        corrected = torch.baddbmm(of_groups, shares, weights.to(out.dtype))
    return corrected.scatter(1, samples[None, :, None].expand_as(exact), exact)  # DirectML has no index_copy
