"""What an attention function does is tried, once, on a few tokens: is it attention, and does it add a bias?"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

_TOKENS = 64
_LIKE = 0.1  # share by which the fast functions of half and less precision miss a small attention
_MOST = 64  # answers that are remembered
_TRIED: OrderedDict[Hashable, bool | None] = OrderedDict()


def try_once(key: Hashable, function: Callable[..., torch.Tensor], scale: float, like: torch.Tensor) -> bool | None:
    """Does the function add a bias? False if it ignores or refuses one; None if it is no attention.

    Args:
        key: what tells this function from all others; with the heads, the device and the dtype an answer is remembered.
        function: ``(q, k, v, bias) -> out``, as of `merged.Attention`.
        scale: what it multiplies the logits by.
        like: ``[B, S, H, d]``, of the device and dtype that the function is to serve.
    """
    key = (key, *like.shape[2:], like.dtype, like.device)
    if key not in _TRIED:
        if len(_TRIED) >= _MOST:
            _TRIED.popitem(last=False)
        _TRIED[key] = _try(function, scale, like)
    return _TRIED[key]


@torch.no_grad()
def _try(function: Callable[..., torch.Tensor], scale: float, like: torch.Tensor) -> bool | None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, _TOKENS, *like.shape[2:], generator=generator).to(like)
    bias = (4.0 * (torch.arange(_TOKENS) % 3 - 1)).view(1, 1, 1, -1).to(like)  # two values may be read as yes and no
    by_head, found = [one.transpose(1, 2) for one in (q, k, v)], None
    try:
        for mask, next_found in ((None, False), (bias, True)):
            exact = torch._C._nn.scaled_dot_product_attention(*by_head, mask, scale=scale).transpose(1, 2)
            out = function(q, k, v, mask)
            if out.shape != exact.shape or not (out - exact).norm() < _LIKE * exact.norm():
                break
            found = next_found
    except Exception:  # whatever it is, it does not serve these few tokens, or not with a bias
        return found
    return found
