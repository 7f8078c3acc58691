"""Trials of attention functions on a few tokens: whether a function computes attention, and whether it adds a bias."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

_TOKENS = 64
_TOLERANCE = 0.1  # allowed relative error: fast functions in half precision and less are not more exact on a few tokens
_MOST = 64  # results in the cache
_TRIED: OrderedDict[Hashable, bool | None] = OrderedDict()


def probe_bias(key: Hashable, function: Callable[..., torch.Tensor], scale: float, like: torch.Tensor) -> bool | None:
    """Tell by a run on a few random tokens whether an attention function adds a bias to the logits.

    False: it ignores a bias or raises an error for one. None: it computes no attention, or raises an error without a
    bias. `function` takes q, k, v and a bias, see `merged.Attention`; `like`, ``(batch, tokens, heads, head_dim)``, has
    the heads, device and dtype to try. Results are cached by these and by `key`, which identifies the function.
    """
    key = (key, *like.shape[2:], like.dtype, like.device)
    if key not in _TRIED:
        if len(_TRIED) >= _MOST:
            _TRIED.popitem(last=False)
        _TRIED[key] = _try(function, scale, like)
    return _TRIED[key]


@torch.no_grad()
def _try(function: Callable[..., torch.Tensor], scale: float, like: torch.Tensor) -> bool | None:
    """Compute the result of `probe_bias` from its arguments: compare with torch's function, without and with a bias."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, _TOKENS, *like.shape[2:], generator=generator).to(like)
    # three values, because a function could take two values for a mask of visible and hidden tokens
    bias = (4.0 * (torch.arange(_TOKENS) % 3 - 1)).view(1, 1, 1, -1).to(like)
    by_head, adds_bias = [tensor.transpose(1, 2) for tensor in (q, k, v)], None
    try:
        for mask, next_result in ((None, False), (bias, True)):
            exact = torch._C._nn.scaled_dot_product_attention(*by_head, mask, scale=scale).transpose(1, 2)
            out = function(q, k, v, mask)
            if out.shape != exact.shape or not (out - exact).norm() < _TOLERANCE * exact.norm():
                break
            adds_bias = next_result
    except Exception:  # any error means that the function does not support these tokens, or no bias
        return adds_bias
    return adds_bias
