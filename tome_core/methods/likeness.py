"""How alike two tokens are: by the cosine of their channels, or by their distance.

Both are a dot product with something that depends on one side alone, so one search serves both: ``q.k`` finds the
highest cosine where the keys have length 1, and ``q.k - |k|^2 / 2`` the smallest distance.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_TINY = 1e-12  # keeps a token of zeros at similarity 0


def searched(rows: torch.Tensor, by_distance: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `best_keys` takes to find the rows most alike: keys ``[B, K, C]`` and, by distance, a bias ``[B, K]``.

    rows: ``[B, K, C]``, any float dtype. Both float32; by distance keys of half precision stay what they are, so that
    tensor cores multiply them in one part, and the bias is exactly theirs.
    """
    if not by_distance:
        return directions(rows), None
    exact = rows.float()
    return rows if rows.dtype.itemsize == 2 else exact, exact.pow(2).sum(-1) * -0.5


def directions(rows: torch.Tensor) -> torch.Tensor:
    """The rows at length 1, float32; a row of zeros stays zero."""
    return F.normalize(rows.float(), dim=-1, eps=_TINY)


def comparable(score: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, by_distance: bool) -> torch.Tensor:
    """The search's scores ``[B, Q]`` of these rows of ``x``, made comparable between them: the higher, the more alike.

    The cosine, or minus half the squared distance. x: ``[B, N, C]``; rows: int64 ``[B or 1, Q]``.
    """
    length = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).gather(1, rows.expand(x.shape[0], -1))
    return score - length.pow(2) * 0.5 if by_distance else score / length.clamp(min=_TINY)
