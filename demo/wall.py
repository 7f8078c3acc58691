"""A tiled wall behind the object: few kinds of tiles, each an exact copy of its kind, in random order.

What a tile looks like follows from no word and from nothing beside it, only from the other tiles of its kind; so a
model that takes noise away has to look at just these.
"""

from __future__ import annotations

import torch

from demo.canvas import Canvas
from demo.landscape import Setting

KINDS, TEXELS = 4, 4  # kinds of tiles in a picture; a tile is TEXELS x TEXELS flat squares
TILES_ACROSS = 16  # in a whole picture: 8 px each in one of 128 px, so that a square is one token of level 0
SHARE = 0.6  # of the pictures


def paint(canvas: Canvas, setting: Setting) -> None:
    """Paint the wall on a finished background."""
    kinds = (KINDS * canvas.random(TILES_ACROSS, TILES_ACROSS)).long()
    colours = 0.08 + 0.87 * canvas.random(KINDS, 1, 1, 3)
    squares = colours * (0.45 + 0.55 * canvas.random(KINDS, TEXELS, TEXELS, 1))
    tile = max(1, canvas.size // TILES_ACROSS)
    pixel = torch.arange(canvas.size, device=canvas.device)[None]
    column = pixel + (tile * canvas.random(1)).long()  # whole pixels: the copies of a kind are exact
    row = pixel + (tile * canvas.random(1)).long()
    picture = torch.arange(canvas.n, device=canvas.device)[:, None, None]
    kind = kinds[picture, (row // tile % TILES_ACROSS)[:, :, None], (column // tile % TILES_ACROSS)[:, None, :]]
    inside_y, inside_x = (row % tile * TEXELS // tile)[:, :, None], (column % tile * TEXELS // tile)[:, None, :]
    canvas.over(_mask(canvas), squares[picture, kind, inside_y, inside_x] * setting.light)


def _mask(canvas: Canvas) -> torch.Tensor:
    left, width = canvas.uniform(-0.2, 0.3), canvas.uniform(0.5, 1.0)
    bottom, height = canvas.uniform(0.72, 0.86), canvas.uniform(0.16, 0.34)
    across = (canvas.x > left) & (canvas.x < left + width)
    return (across & (canvas.y < bottom) & (canvas.y > bottom - height) & (canvas.chance() < SHARE)).float()
