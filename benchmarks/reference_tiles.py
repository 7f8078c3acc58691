"""HyperTile's idea in plain code: tokens attend inside their own tile of the grid, and nowhere else.

The published one draws among several tile sizes; here the number of tiles is fixed, so that its work is too.
"""

from __future__ import annotations

import math

import torch


def square_side(tokens: int, cell: int) -> int:
    """Tokens a side of a square grid. Raises ValueError where it is none, or `cell` does not divide it."""
    side = math.isqrt(tokens)
    if side * side != tokens or side % cell:
        raise ValueError(f"{tokens} tokens are no square grid that cells of {cell}x{cell} divide; the reference code "
                         "measures square pictures only")
    return side


def split(x: torch.Tensor, tiles: int) -> torch.Tensor:
    """``[B, N, C]`` to ``[B * tiles**2, N / tiles**2, C]``: a square grid cut in `tiles` a side.

    Raises ValueError where the grid is no square that `tiles` divides.
    """
    batch, tokens, channels = x.shape
    inner = square_side(tokens, tiles) // tiles
    cut = x.reshape(batch, tiles, inner, tiles, inner, channels).transpose(2, 3)
    return cut.reshape(batch * tiles**2, inner**2, channels)


def join(y: torch.Tensor, tiles: int) -> torch.Tensor:
    """The inverse of `split`."""
    inner = square_side(y.shape[1], 1)
    cut = y.reshape(-1, tiles, tiles, inner, inner, y.shape[2]).transpose(2, 3)
    return cut.reshape(-1, (tiles * inner) ** 2, y.shape[2])
