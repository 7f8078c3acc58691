"""The reference code in a transformer: among the picture's tokens, behind norm and positions; text is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.networks import attended, timestep_of
from benchmarks.reference import Lots, Recipe


class SequenceReference(TorchFunctionMode):
    """A context manager: inside it the attentions of a Flux transformer follow the recipe, one without tiles.

    It answers in torch's attention function, which is called once in each block, the text's tokens first.
    """

    def __init__(self, transformer: nn.Module, recipe: Recipe, seed: int) -> None:
        super().__init__()
        self._transformer, self._recipe, self._lots = transformer, recipe, Lots(recipe, seed)

    def __enter__(self) -> SequenceReference:
        self._hook = self._transformer.register_forward_pre_hook(self._note, with_kwargs=True)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self._block += 1
        (q, k, v), more = attended(args, kwargs or {})
        if self._recipe.zero:
            return torch.zeros_like(q)
        plan = self._lots.plan(k[:, 0, -self._picture :], self._block)
        k, v = (_changed(one, plan.merge, self._picture) for one in (k, v))
        more["attn_mask"] = F.pad(plan.key_logits, (k.shape[2] - plan.num_groups, 0)).to(q.dtype)[:, None, None]
        if not self._recipe.together:
            return func(q, k, v, **more)
        return _changed(func(_changed(q, plan.merge, self._picture), k, v, **more), plan.unmerge, plan.num_groups)

    def _note(self, transformer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._lots.tell(timestep_of(transformer, args, kwargs))
        self._picture, self._block = kwargs["hidden_states"].shape[1], 0


def _changed(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], last: int) -> torch.Tensor:
    """``[B, H, S, d]`` with its `last` tokens changed to as many as `change` gives of them."""
    changed = change(x[:, :, -last:].transpose(1, 2).flatten(2)).unflatten(2, (x.shape[1], -1)).transpose(1, 2)
    return torch.cat([x[:, :, :-last], changed], 2)
