"""A merge is one integer map: which group each token belongs to.

Letters, here and everywhere in this package: ``B`` batch, ``N`` tokens, ``G`` groups, ``C`` channels,
``H`` and ``W`` the height and width of the token grid.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from . import kernels

_WITHOUT_INDEX_ADD = ("privateuseone",)  # DirectML, which would add on the CPU; elsewhere scatter_add takes longer
EMPTY_LOGIT = -1000.0  # of a group without tokens: its weight is 0 after the softmax, and no kernel meets an infinity


def without_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """What is compared or summed keeps the precision it has; there is no autocast on the meta device."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def to_exact(x: torch.Tensor) -> torch.Tensor:
    """In float32, or in the float64 that it has."""
    return x if x.dtype == torch.float64 else x.float()


def take_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` picked by token index.

    x: ``[B, N, C]``, any dtype. index: int64 ``[B or 1, K]`` with values in ``0..N-1``. Returns ``[B, K, C]``.
    One gather of flat rows: an index expanded over channels costs 4 times as much on a CPU.
    """
    if index.shape[0] == 1 and not (x.requires_grad and torch.is_grad_enabled()):  # as cheap, and nothing to number
        return x.index_select(1, index[0])
    batch, tokens, channels = x.shape
    rows = _flat_rows(index, batch, tokens)
    return F.embedding(rows, x.reshape(batch * tokens, channels)).view(batch, index.shape[1], channels)


def _flat_rows(index: torch.Tensor, batch: int, per_sample: int) -> torch.Tensor:
    """``[B or 1, K]`` indices within a sample -> ``[B * K]`` indices into rows of all samples."""
    if batch == 1:
        return index.reshape(-1)
    start = torch.arange(0, batch * per_sample, per_sample, device=index.device)
    return (index + start[:, None]).reshape(-1)


class MergePlan:
    """Which group each token belongs to, and the two operations that follow from it.

    group: int64 ``[B or 1, N]``, values in ``0..num_groups-1``; one row serves every sample of a batch.
        The values are not checked, because looking at them would stall a GPU.
    num_groups: number of groups ``G``, at least 1. Static: shapes never depend on the data.
    counts: of a plan that was matched in windows, the groups of a window, for each run of equal windows in order.

    A group may be empty: its mean is 0, its size 0.

    >>> import torch
    >>> plan = MergePlan(torch.tensor([[0, 1, 0, 1]]), num_groups=2)
    >>> plan.merge(torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])).flatten().tolist()
    [2.0, 3.0]
    """

    def __init__(self, group: torch.Tensor, num_groups: int, counts: tuple[int, ...] = ()) -> None:
        if group.dtype != torch.int64 or group.dim() != 2:
            raise ValueError(f"group is {group.dtype} {tuple(group.shape)}; it has to be int64 [B or 1, N]")
        if num_groups < 1:
            raise ValueError(f"num_groups is {num_groups}; it has to be at least 1")
        self.group, self.num_groups, self.counts = group, num_groups, counts
        self.derived: dict[tuple, Any] = {}  # kept from its first use: one plan merges several tensors of one block

    def repeat(self, times: int) -> MergePlan:
        """The plan for so many copies of its samples, one after the other; itself where it serves any number."""
        if times == 1 or self.group.shape[0] == 1:
            return self
        return MergePlan(self.group.repeat(times, 1), self.num_groups, self.counts)

    @property
    def sizes(self) -> torch.Tensor:
        """Tokens in each group: int64 ``[B or 1, G]``; every row sums to ``N``."""
        return self._count().to(torch.int64)

    @property
    def empty(self) -> torch.Tensor:
        """Which groups have no tokens: bool ``[B or 1, G]``."""
        return self._count() == 0

    def logits_in(self, dtype: torch.dtype) -> torch.Tensor:
        """What merged keys add to their logits so as to weigh as much as their tokens did: log of the sizes.

        ``[B or 1, G]``, `EMPTY_LOGIT` for an empty group. (Proportional attention: ToMe, arXiv 2210.09461, section 3.)
        """
        self._count()  # a kernel gives logits with it
        exact = self._once(("logits", torch.float32), lambda: self._count().log().clamp(min=EMPTY_LOGIT))
        return self._once(("logits", dtype), lambda: exact.to(dtype))

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens to groups: the mean of each group, summed in float32 (4,096 half precision sums lose three digits).

        x: ``[B, N, C]``, any float dtype. Returns ``[B, G, C]`` in the dtype of ``x``. Differentiable. Equal inputs
        give equal bits.
        Law: ``merge(unmerge(y)) == y`` on every group that has a token.
        """
        rows, count = self.group.shape
        if x.dim() != 3 or x.shape[1] != count or rows not in (1, x.shape[0]):
            self._check(x, count, "tokens")
        if x.device.type in kernels.DEVICES:
            means = self._means_by_kernel(x)
            if means is not None:
                return means.mean
        batch, flat = x.shape[0], x.flatten(0, 1)
        if x.is_cuda:  # each group is summed by one thread
            order, offsets = self._flat_segments(batch)
            found = F.embedding_bag(order, flat, offsets, mode="mean", include_last_offset=True)
            return found.view(batch, self.num_groups, -1)
        rows, divisors = self.derived.get(("adding", batch)) or self._once(("adding", batch), lambda: (
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
        """The means of ``x [B, N, C]``, ``[B, G, C]``, and minus half their squared lengths, float32 ``[B, G]``, minus
        infinity for an empty group. Not differentiable. None where no kernel gives both at once.
        """
        means = self._means_by_kernel(x.detach(), bias=True)
        return None if means is None else (means.mean, means.bias)

    def merge_pair(
        self, keys: torch.Tensor, values: torch.Tensor, exact: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`merge` of two tensors of one shape and dtype, in one launch where there is a kernel.

        exact: the values' means as they were summed, in float32 at least, are the third result.
        """
        if keys.device.type in kernels.DEVICES and (means := self._means_by_kernel(keys, values, exact=exact)):
            return means.mean, means.values, means.exact
        if not exact:
            return self.merge(keys), self.merge(values), None
        means, summed = map(self.merge, map(to_exact, (keys, values)))
        return means.to(keys.dtype), summed.to(values.dtype), summed

    def unmerge(self, y: torch.Tensor) -> torch.Tensor:
        """Groups back to tokens: every token gets its group's row.

        y: ``[B, G, C]``. Returns ``[B, N, C]``. Law: ``unmerge(merge(x))`` is idempotent.
        """
        self._check(y, self.num_groups, "groups")
        batch, groups, channels = y.shape
        flat = F.embedding(self._flat_groups(batch), y.reshape(batch * groups, channels))
        return flat.view(batch, self.group.shape[1], channels)

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    def _count(self) -> torch.Tensor:
        """Sizes in float32, in which they are used, exact up to 2**24 tokens. (MPS adds no int64.)"""
        if ("sizes",) not in self.derived and not self._count_by_kernel():
            if self.group.is_cuda:
                # By sorting: atomics on CUDA are refused under torch.use_deterministic_algorithms.
                sizes = self._sort()[1].diff().view(-1, self.num_groups).float()
            else:
                ones = torch.ones_like(self.group, dtype=torch.float32)
                sizes = ones.new_zeros(len(ones), self.num_groups).scatter_add(1, self.group, ones)
            self.derived["sizes",] = sizes
        return self.derived["sizes",]

    def _means_by_kernel(
        self, x: torch.Tensor, values: torch.Tensor | None = None, bias: bool = False, exact: bool = True
    ) -> kernels.Means | None:
        """As `kernels.mean_rows`, of ``[B, N, C]``; None where torch's operators have to do."""
        if not kernels.ready(x) or kernels.needs_gradient(*filter(torch.is_tensor, (x, values))):
            return None
        self._check(x, self.group.shape[1], "tokens")
        more = None if values is None else values.flatten(0, 1)
        means = kernels.mean_rows(x.flatten(0, 1), *self._sort(x.dtype), self.group.numel(), bias, more, exact)
        if means is None:
            return None
        return kernels.Means(*(one if one is None else one.unflatten(0, (x.shape[0], self.num_groups))
                               for one in means))  # fmt: skip

    def _count_by_kernel(self, dtype: torch.dtype = torch.float32) -> bool:
        """Order, offsets, sizes and their logarithms, in this dtype too, from one kernel, where there is one."""
        found = kernels.segments(self.group, self.num_groups, EMPTY_LOGIT, dtype)
        if found is None:
            return False
        self.derived |= {("segments",): found[:2], ("sizes",): found.sizes, ("logits", torch.float32): found.logs,
                         ("logits", dtype): found.rounded}  # fmt: skip
        return True

    def _check(self, x: torch.Tensor, count: int, what: str) -> None:
        rows = self.group.shape[0]
        if x.dim() != 3 or x.shape[1] != count or rows not in (1, x.shape[0]):
            raise ValueError(f"tensor is {tuple(x.shape)}, the plan's group {tuple(self.group.shape)}: "
                             f"expected [{rows if rows > 1 else 'B'}, {count} {what}, C]")

    def _flat_groups(self, batch: int) -> torch.Tensor:
        return self._once(("rows", batch), lambda: _flat_rows(self.group, batch, self.num_groups))

    def _sort(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        if ("segments",) not in self.derived and not self._count_by_kernel(dtype):
            self.derived["segments",] = _segments(self.group, self.num_groups)
        return self.derived["segments",]

    def _flat_segments(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_segments`, of so many samples. One row is sorted once, however many samples it serves."""
        order, offsets = self._sort()

        def shifted() -> tuple[torch.Tensor, torch.Tensor]:
            start = torch.arange(0, batch * self.group.shape[1], self.group.shape[1], device=order.device)[:, None]
            return (order + start).view(-1), torch.cat([offsets[:1], (offsets[1:] + start).view(-1)])

        return (order, offsets) if batch == self.group.shape[0] else self._once(("segments", batch), shifted)


def _segments(group: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens sorted by group, and where each group starts: int64 ``[R * N]`` and ``[R * G + 1]``.

    group: ``[R, N]``; tokens and groups are counted over all R rows. In numbers as short as will do: a GPU sorts them
    eight bits at a time, in two kernels each.
    """
    rows = group.shape[0]
    short = torch.int16 if rows * num_groups < 2**15 else torch.int32
    ordered, order = _flat_rows(group, rows, num_groups).to(short).sort(stable=True)
    starts = torch.arange(rows * num_groups + 1, dtype=short, device=group.device)
    return order, torch.searchsorted(ordered, starts)
