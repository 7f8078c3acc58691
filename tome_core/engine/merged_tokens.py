"""The tokens of a stretch, which is a run of blocks of one transformer on merged tokens, and the way back.

The blocks run on the mean of each group of tokens, and on a few samples, tokens that stay as they are. What they add to
a group's mean is added to each of its tokens. By ridge regression a linear map is fitted to the samples, from a token's
difference to its group's mean to the difference of what is added; it corrects all other tokens.

Nobody has to know which block is the stretch's last: a block returns `LazyTokens`. The next block of the stretch takes
the merged tokens from them. Whatever else uses them (an output projection, a residual, a block that is left alone,
another program) uses all tokens, which are computed then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..attention.correction import inverse, pick_middles
from ..merging.grid import Grid
from ..merging.plan import MergePlan, to_exact, without_autocast

_TOKENS_PER_SAMPLE = 32
RIDGE = 0.1  # the penalty of the fit, relative to the mean square of the samples
_TINY = 1e-12


def pick_samples(grid: Grid, device: torch.device) -> tuple[Tensor]:
    """Choose the samples, evenly spaced over the grid: int64 ``(samples,)``, in a tuple for `grid.cached_result`."""
    return (pick_middles(grid, count_samples(grid), device),)


def count_samples(grid: Grid) -> int:
    """Return about how many samples `pick_samples` chooses."""
    return max(1, grid.height * grid.width // _TOKENS_PER_SAMPLE)


class MergedTokens(NamedTuple):
    """The input of a stretch's first block, and what this block gets for it."""

    x: Tensor  # (batch, tokens, channels)
    merged: Tensor  # the means of groups, then the samples, (batch, groups + samples, channels)
    plan: MergePlan
    samples: Tensor | None  # int64 (samples,); None: there is no correction
    # takes what the way back leaves of the samples, squares of the form of `Correction.error`; None: nobody asks
    note: Callable[[Tensor], None] | None = None

    @classmethod
    def of(
        cls, x: Tensor, plan: MergePlan, samples: Tensor | None, note: Callable[[Tensor], None] | None = None
    ) -> MergedTokens:
        """Merge tokens ``(batch, tokens, channels)`` by a plan."""
        means = plan.merge(x)
        return cls(x, means if samples is None else torch.cat([means, x[:, samples]], 1), plan, samples, note)

    def unmerge(self, out: Tensor) -> Tensor:
        """Return a block's output for all tokens; `out` is its output for the merged ones, shaped like them."""
        plan, samples, added = self.plan, self.samples, out - self.merged
        if samples is None:
            return self.x + plan.unmerge(added)
        of_groups, exact = plan.unmerge(added[:, : plan.num_groups]), added[:, plan.num_groups :]
        with without_autocast(added):
            apart = self.x - plan.unmerge(self.merged[:, : plan.num_groups])
            few, lost = to_exact(apart[:, samples]), to_exact(exact - of_groups[:, samples])
            products = few @ few.transpose(1, 2)
            unit = products.diagonal(dim1=1, dim2=2).mean(1)[:, None, None].clamp(min=_TINY)
            solution = inverse((products / unit)[:, None], RIDGE, len(samples))[:, 0]
            weights = solution @ lost
            if self.note is not None:  # what remains of each sample if the map is fitted to the others
                rest = weights / solution.diagonal(dim1=1, dim2=2)[..., None]
                self.note(torch.stack([rest.square().mean((1, 2)), to_exact(exact).square().mean((1, 2))], 1))
            # Two thin products instead of a map between all channels. The first is about 1: half precision can hold it.
            shares = apart.to(added.dtype) @ (few / unit).to(added.dtype).transpose(1, 2)
            added = torch.baddbmm(of_groups, shares, weights.to(added.dtype))
        added = added.scatter(1, samples[None, :, None].expand_as(exact), exact)  # DirectML has no index_copy
        return self.x + added


class LazyTokens(Tensor):
    """The output of a merged block, ``(batch, tokens, channels)`` of all tokens, which are computed by the first use.

    It has no memory of its own. Every operator gets all tokens in its place, so its results are plain tensors.

    Attributes:
        stretch: names the stretch in one call of the model.
        tokens: the stretch's input; None once all tokens were computed: the stretch has ended then.
        out: the block's output for the merged tokens, ``(batch, groups + samples, channels)``.
    """

    stretch: Hashable
    tokens: MergedTokens | None
    out: Tensor

    @staticmethod
    def __new__(cls, stretch: Hashable, tokens: MergedTokens, out: Tensor) -> LazyTokens:
        """Make them of a block's output for the merged tokens of a stretch; nothing is computed."""
        lazy = Tensor._make_wrapper_subclass(cls, tokens.x.shape, dtype=out.dtype, device=out.device)
        lazy.stretch, lazy.tokens, lazy.out, lazy._whole = stretch, tokens, out, None
        return lazy

    def whole(self) -> Tensor:
        """Return all tokens as a plain tensor, the same one at each call. This ends the stretch."""
        if self._whole is None:
            self._whole, self.tokens, self.out = self.tokens.unmerge(self.out), None, None
        return self._whole

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def whole(value: Any) -> Any:
    """Return all tokens as a plain tensor if the value is `LazyTokens`, else the value."""
    return value.whole() if type(value) is LazyTokens else value


def _of_whole(name: str) -> Any:
    """Return a method that calls the method `name` of all tokens: what reads a tensor's memory is no operator."""
    return lambda self, *args, **kwargs: getattr(self.whole(), name)(*args, **kwargs)


for _name in ("__deepcopy__", "__reduce_ex__", "data_ptr", "numpy", "tolist", "untyped_storage"):
    setattr(LazyTokens, _name, _of_whole(_name))
