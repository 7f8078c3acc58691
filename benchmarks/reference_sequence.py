"""The reference code's groups in a transformer: among the picture's tokens, behind norm and positions; text is kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.networks import attended
from benchmarks.reference import Groups
from benchmarks.reference_patch import Following, Grouping


class SequenceReference(Following, TorchFunctionMode):
    """A context manager: inside it the attentions of a Flux transformer follow the first phase that holds.

    It answers in torch's attention function, which is called once in each block, the text's tokens first.
    """

    def __enter__(self) -> SequenceReference:
        self.follow()
        self._picture, self._block = 0, 0
        return TorchFunctionMode.__enter__(self)

    def __exit__(self, *error: object) -> None:
        TorchFunctionMode.__exit__(self, *error)
        self.leave()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        recipe = self.recipe() if func is F.scaled_dot_product_attention else None
        if recipe is None:
            return func(*args, **(kwargs or {}))
        self._block += 1
        (q, k, v), more = attended(args, kwargs or {})
        if recipe.zero:
            return torch.zeros_like(q)
        keys = self._group(recipe.kv, k, v)
        queries = keys if recipe.together else self._group(recipe.q, k, v)
        if keys:
            k, v = (self._merged(one, keys) for one in (k, v))
            if recipe.sized:
                sizes = F.pad(keys.log_sizes(), (k.shape[2] - keys.count, 0))
                more["attn_mask"] = sizes.to(q.dtype)[:, None, None]
        out = func(self._merged(q, queries) if queries else q, k, v, **more)
        return self._unmerged(out, queries) if queries else out

    def _note(self, network: nn.Module, args: tuple, kwargs: dict) -> None:
        super()._note(network, args, kwargs)
        self._picture, self._block = kwargs["hidden_states"].shape[1], 0

    def _group(self, grouping: Grouping | None, k: torch.Tensor, v: torch.Tensor) -> Groups | None:
        """By what no block's input is: keys, where the recipe says the input."""
        if grouping is None:
            return None
        keys, values = (one[:, :, -self._picture :].transpose(1, 2).flatten(2) for one in (k, v))
        compared = torch.cat([keys, values], -1) if grouping.metric == "keys+values" else keys
        return self.grouped(grouping, compared, self._block)

    def _merged(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        return self._instead(x, groups.count, groups.merge, self._picture)

    def _unmerged(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        return self._instead(x, self._picture, groups.unmerge, groups.count)

    def _instead(self, x: torch.Tensor, count: int, change: Any, last: int) -> torch.Tensor:
        """``[B, H, S, d]`` with its `last` tokens changed to `count` others."""
        heads = x.shape[1]
        changed = change(x[:, :, -last:].transpose(1, 2).flatten(2)).unflatten(2, (heads, -1)).transpose(1, 2)
        return torch.cat([x[:, :, :-last], changed], 2)
