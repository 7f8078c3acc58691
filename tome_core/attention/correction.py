"""What merged keys and values lose to first order, given back by one small matrix a head.

A group's mean key and value forget how values vary with keys inside the group. To first order in ``q.(k - k_g)`` the
output misses ``sum_g p_g Cov_g(v, k) scale q``, where ``p_g`` is the group's share of the attention. With the share of
its tokens ``n_g / N`` in its place, the sum is the same for every query:

    out += scale q C^T,    C = 1/N sum over tokens of (v - v_g) (k - k_g)^T

It costs one product of ``[N, d]`` with ``[d, d]`` a head, after whatever kernel attends. On trained models it halves
the error at equal work, and all but removes it where heads are smooth (benchmarks/README.md).
"""

from __future__ import annotations

import torch

from ..plan import MergePlan


def first_order(k: torch.Tensor, v: torch.Tensor, plan: MergePlan, heads: int, scale: float) -> torch.Tensor:
    """``scale C^T``: ``[B, H, d, d]`` in the dtype of k, which `corrected` multiplies queries with.

    k, v: keys and values of all tokens, flat ``[B, N, H*d]``. scale: the attention's. Summed in float32; exactly zero
    where every group has one token.
    """
    batch, tokens, _ = k.shape
    exact = v if v.dtype == torch.float64 else v.float()
    # the tokens' distances from their group's value add up to 0, so that of the key need not be taken off
    spread = exact - plan.unmerge(plan.merge(exact))
    by_head = [one.to(exact.dtype).view(batch, tokens, heads, -1).transpose(1, 2) for one in (k, spread)]
    return (by_head[0].transpose(2, 3) @ by_head[1] * (scale / tokens)).to(k.dtype)
