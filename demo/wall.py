"""A tiled wall behind the object: squares of few colours make tiles of few kinds, which stand in random order.

Which colours there are follows from no word and from nothing beside a square, only from the other squares, near and
far, that have the same one; so a model that takes noise away has to look at just these.
"""

from __future__ import annotations

import torch

from demo.canvas import Canvas
from demo.landscape import Setting

COLOURS, KINDS = 6, 4  # in a picture: colours of squares, kinds of tiles
SQUARES = 4  # a tile is SQUARES x SQUARES of them
TILES_ACROSS = 16  # in a whole picture: 8 px each in one of 128 px, so that a square is one token of level 0
SHARE = 0.7  # of the pictures


def paint(canvas: Canvas, setting: Setting) -> None:
    """Paint the wall on a finished background."""
    kinds = (KINDS * canvas.random(TILES_ACROSS, TILES_ACROSS)).long()
    colours = 0.04 + 0.92 * canvas.random(COLOURS, 3)
    squares = (COLOURS * canvas.random(KINDS, SQUARES, SQUARES)).long()
    tile = max(1, canvas.size // TILES_ACROSS)
    pixel = torch.arange(canvas.size, device=canvas.device)[None]
    whole = max(1, tile // SQUARES)  # pixels; squares that straddle tokens would be all detail and no colour
    column = pixel + whole * (SQUARES * canvas.random(1)).long()
    row = pixel + whole * (SQUARES * canvas.random(1)).long()
    picture = torch.arange(canvas.n, device=canvas.device)[:, None, None]
    kind = kinds[picture, (row // tile % TILES_ACROSS)[:, :, None], (column // tile % TILES_ACROSS)[:, None, :]]
    inside_y, inside_x = (row % tile * SQUARES // tile)[:, :, None], (column % tile * SQUARES // tile)[:, None, :]
    square = squares[picture, kind, inside_y, inside_x]
    canvas.over(_mask(canvas), colours[picture, square] * setting.light)


def _mask(canvas: Canvas) -> torch.Tensor:
    left, width = canvas.uniform(-0.2, 0.2), canvas.uniform(0.7, 1.1)
    bottom, height = canvas.uniform(0.76, 0.92), canvas.uniform(0.25, 0.42)
    across = (canvas.x > left) & (canvas.x < left + width)
    return (across & (canvas.y < bottom) & (canvas.y > bottom - height) & (canvas.chance() < SHARE)).float()
