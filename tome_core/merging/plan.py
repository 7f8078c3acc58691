"""The plan of a merge: a map from tokens to groups, and the operations that merge and unmerge tensors by it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from . import kernels

# DirectML, where index_add runs on the CPU. On other devices scatter_add, which replaces it there, is slower.
_WITHOUT_INDEX_ADD = ("privateuseone",)


def without_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast on the device of `x`. Comparisons and sums then keep their precision."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):  # the meta device has no autocast
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def to_exact(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as float32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def take_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the tokens of `x` with the numbers `index`, int64 ``(batch, rows)``, or ``(1, rows)`` for every sample."""
    if index.shape[0] == 1 and not (x.requires_grad and torch.is_grad_enabled()):
        return x.index_select(1, index[0])  # as fast as a gather, and needs no flat indices
    # One gather of flat rows: an index expanded over channels is 4 times as slow on a CPU.
    batch, tokens, channels = x.shape
    rows = _flat_rows(index, batch, tokens)
    return F.embedding(rows, x.reshape(batch * tokens, channels)).view(batch, index.shape[1], channels)


def _flat_rows(index: torch.Tensor, batch: int, per_sample: int) -> torch.Tensor:
    """Turn indices below `per_sample`, ``(batch or 1, rows)``, into indices over all samples, ``(batch * rows,)``."""
    if batch == 1:
        return index.reshape(-1)
    start = torch.arange(0, batch * per_sample, per_sample, device=index.device)
    return (index + start[:, None]).reshape(-1)


class MergePlan:
    """The group of each token, with the operations that merge and unmerge tensors by it.

    A group may be empty: its mean and its size are then 0.

    Args:
        group: the group of each token, int64 ``(batch or 1, tokens)``. One row serves every sample of a batch. The
            values are not checked, because that would wait for the device.
        num_groups: number of groups, at least 1. It never depends on the data.
        groups_per_window: number of groups in each window (see `grid.windows`), listed once for each run of windows
            of one size; empty if all tokens were matched as one window.

    Raises:
        ValueError: `group` has another dtype or shape, or `num_groups` is less than 1.

    >>> import torch
    >>> plan = MergePlan(torch.tensor([[0, 1, 0, 1]]), num_groups=2)
    >>> plan.merge(torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])).flatten().tolist()
    [2.0, 3.0]
    """

    def __init__(self, group: torch.Tensor, num_groups: int, groups_per_window: tuple[int, ...] = ()) -> None:
        if group.dtype != torch.int64 or group.dim() != 2:
            raise ValueError(f"group is {group.dtype} {tuple(group.shape)}; it has to be int64 [B or 1, N]")
        if num_groups < 1:
            raise ValueError(f"num_groups is {num_groups}; it has to be at least 1")
        self.group, self.num_groups, self.groups_per_window = group, num_groups, groups_per_window
        self.cache: dict[tuple, Any] = {}  # because one plan merges several tensors

    def repeat(self, times: int) -> MergePlan:
        """Return the plan for samples a, b, a, b if its samples are a, b and `times` is 2; one row serves them all."""
        if times == 1 or self.group.shape[0] == 1:
            return self
        return MergePlan(self.group.repeat(times, 1), self.num_groups, self.groups_per_window)

    @property
    def sizes(self) -> torch.Tensor:
        """The number of tokens of each group, int64 ``(batch or 1, groups)``."""
        return self._count().to(torch.int64)

    @property
    def empty(self) -> torch.Tensor:
        """True for each group without tokens, bool ``(batch or 1, groups)``."""
        return self._count() == 0

    def log_sizes(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the logarithm of each group's size, ``(batch or 1, groups)``; `EMPTY_LOGIT`, finite, for size 0."""
        self._count()  # if a kernel counts, it stores the logits as well
        exact = self._once(("logits", torch.float32), lambda: self._count().log().clamp(min=kernels.EMPTY_LOGIT))
        return self._once(("logits", dtype), lambda: exact.to(dtype))

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of each group, ``(batch, groups, channels)`` in the dtype of `x`; 0 for an empty group.

        `x` is ``(batch, tokens, channels)``, any float dtype; a ValueError is raised if it does not fit the plan. Sums
        are in float32, in float64 for a float64 `x`: 4,096 sums in half precision lose three digits. Equal inputs give
        equal bits. Differentiable. ``merge(unmerge(y))`` is `y`, up to rounding, for groups with a token.
        """
        rows, count = self.group.shape
        if x.dim() != 3 or x.shape[1] != count or rows not in (1, x.shape[0]):
            self._check(x, count, "tokens")
        if x.device.type in kernels.DEVICES and (means := self._means_by_kernel(x)):
            return means.mean
        batch, flat = x.shape[0], x.flatten(0, 1)
        if x.is_cuda:  # embedding_bag sums each group in one thread, so the order of additions is fixed
            order, offsets = self._flat_segments(batch)
            means = F.embedding_bag(order, flat, offsets, mode="mean", include_last_offset=True)
            return means.view(batch, self.num_groups, -1)
        rows, divisors = self.cache.get(("adding", batch)) or self._once(("adding", batch), lambda: (
            self._flat_groups(batch), self._count().clamp(min=1).expand(batch, -1).reshape(-1, 1)
        ))  # fmt: skip
        exact = flat if flat.dtype == torch.float32 else to_exact(flat)
        total = exact.new_zeros(batch * self.num_groups, flat.shape[1])
        if x.device.type in _WITHOUT_INDEX_ADD:
            total = total.scatter_add(0, rows[:, None].expand_as(exact), exact)
        else:
            total.index_add_(0, rows, exact)
        mean = total.div_(divisors).view(batch, self.num_groups, -1)
        return mean if exact is flat else mean.to(x.dtype)

    def centres(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `merge` of `x`, without gradient, and `kernels.Means.bias` by group; None if there is no kernel."""
        means = self._means_by_kernel(x.detach(), bias=True)
        return None if means is None else (means.mean, means.bias)

    def merge_pair(
        self, keys: torch.Tensor, values: torch.Tensor, exact: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Merge two tensors ``(batch, tokens, channels)`` of one shape and dtype, by one kernel if there is one.

        The results are those of `merge` and, if `exact`, the merged values before rounding, float32 (float64 for
        float64), else None. A ValueError is raised if the shape does not fit the plan.
        """
        if keys.device.type in kernels.DEVICES and (means := self._means_by_kernel(keys, values, exact=exact)):
            return means.mean, means.values, means.exact
        if not exact:
            return self.merge(keys), self.merge(values), None
        means, summed = map(self.merge, map(to_exact, (keys, values)))
        return means.to(keys.dtype), summed.to(values.dtype), summed

    def unmerge(self, y: torch.Tensor) -> torch.Tensor:
        """Give every token the row of its group: ``(batch, groups, channels)`` to ``(batch, tokens, channels)``.

        For any dtype. Differentiable. A ValueError is raised if the shape does not fit the plan.
        """
        self._check(y, self.num_groups, "groups")
        batch, groups, channels = y.shape
        flat = F.embedding(self._flat_groups(batch), y.reshape(batch * groups, channels))
        return flat.view(batch, self.group.shape[1], channels)

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        """Return the cached value of a key, made by the first call for the key."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def _count(self) -> torch.Tensor:
        """Return the groups' sizes, ``(batch or 1, groups)``, cached; float32, exact to 2**24, as MPS adds no int64."""
        if ("sizes",) not in self.cache:
            if self.group.is_cuda:
                # By sorting: atomics on CUDA are refused under torch.use_deterministic_algorithms.
                sizes = self._sorted_segments()[1].diff().view(-1, self.num_groups).float()
            else:
                ones = torch.ones_like(self.group, dtype=torch.float32)
                sizes = ones.new_zeros(len(ones), self.num_groups).scatter_add(1, self.group, ones)
            self.cache["sizes",] = sizes
        return self.cache["sizes",]

    def _means_by_kernel(
        self, x: torch.Tensor, values: torch.Tensor | None = None, bias: bool = False, exact: bool = True
    ) -> kernels.Means | None:
        """Return `kernels.mean_rows` as ``(batch, groups, ...)``; None if no kernel ran or a gradient is needed."""
        if not kernels.ready(x) or kernels.needs_gradient(*filter(torch.is_tensor, (x, values))):
            return None
        self._check(x, self.group.shape[1], "tokens")
        flat, values = x.flatten(0, 1), None if values is None else values.flatten(0, 1)
        known = None if ("segments",) in self.cache else kernels.count_and_mean_rows(
            flat, self.group, self.num_groups, bias, values, exact
        )  # fmt: skip
        if known is not None:
            means, segments = known
            self.cache |= {("segments",): segments[:2], ("sizes",): segments.sizes,
                           ("logits", torch.float32): segments.logs, ("logits", x.dtype): segments.rounded}  # fmt: skip
        else:
            means = kernels.mean_rows(flat, *self._sorted_segments(), self.group.numel(), bias, values, exact)
        if means is None:
            return None
        return kernels.Means(*(rows if rows is None else rows.unflatten(0, (x.shape[0], self.num_groups))
                               for rows in means))  # fmt: skip

    def _check(self, x: torch.Tensor, count: int, unit: str) -> None:
        """Raise a ValueError, which names `unit`, if `x` is not ``(batch, count, channels)`` of a fitting batch."""
        rows = self.group.shape[0]
        if x.dim() != 3 or x.shape[1] != count or rows not in (1, x.shape[0]):
            raise ValueError(f"tensor is {tuple(x.shape)}, the plan's group {tuple(self.group.shape)}: "
                             f"expected [{rows if rows > 1 else 'B'}, {count} {unit}, C]")

    def _flat_groups(self, batch: int) -> torch.Tensor:
        """Return groups plus ``sample * num_groups``, int64 ``(batch * tokens,)``, cached; one row serves all."""
        return self._once(("rows", batch), lambda: _flat_rows(self.group, batch, self.num_groups))

    def _sorted_segments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `_segments` of the plan, from the cache."""
        return self._once(("segments",), lambda: _segments(self.group, self.num_groups))

    def _flat_segments(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `_sorted_segments` for `batch` samples, cached. A single row that serves them all is sorted once."""
        order, offsets = self._sorted_segments()

        def shifted() -> tuple[torch.Tensor, torch.Tensor]:
            start = torch.arange(0, batch * self.group.shape[1], self.group.shape[1], device=order.device)[:, None]
            return (order + start).view(-1), torch.cat([offsets[:1], (offsets[1:] + start).view(-1)])

        return (order, offsets) if batch == self.group.shape[0] else self._once(("segments", batch), shifted)


def _segments(group: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens, sorted stably by row and group, and where each group starts among them, then the end.

    Both are int64, ``(rows * tokens,)`` and ``(rows * groups + 1,)``. Token t of row r has number ``r * tokens + t``.
    """
    rows = group.shape[0]
    # the shortest integers that hold the numbers, because a GPU sorts eight bits at a time, in two kernels each
    short = torch.int16 if rows * num_groups < 2**15 else torch.int32
    ordered, order = _flat_rows(group, rows, num_groups).to(short).sort(stable=True)
    starts = torch.arange(rows * num_groups + 1, dtype=short, device=group.device)
    return order, torch.searchsorted(ordered, starts)
