"""A wall of bricks behind the object: bricks of few shades make tiles of few kinds, which stand in random order.

Only other bricks, near and far, tell a brick's shade, so a model that takes noise away has to look at just these.
"""

from __future__ import annotations

import torch
from torch import tensor

from demo.scene_background import Setting
from demo.scene_canvas import Canvas

# One row for each stone: brick, sandstone, slate, granite, clay.
STONE = tensor([[0.72, 0.30, 0.20], [0.85, 0.70, 0.45], [0.38, 0.46, 0.58], [0.66, 0.64, 0.62], [0.58, 0.42, 0.32]])
SHADES, KINDS = 5, 4  # in a picture: shades of its stone, kinds of tiles
DARKEST, LIGHTEST, TINT = 0.35, 1.3, 0.06  # of the stone's colour, and how far a shade may leave it
SQUARES = 4  # a tile is SQUARES x SQUARES of them, a brick two side by side, half a brick further every row
TILES_ACROSS = 16  # in a whole picture: 8 px each in one of 128 px, so that a square is one token of level 0
SHARE = 1 / 3  # of the pictures


def paint(canvas: Canvas, setting: Setting) -> None:
    """Paint a brick wall on a random SHARE of finished backgrounds: a grid of tiles, each of one of a few patterns."""
    kinds = (KINDS * canvas.random(TILES_ACROSS, TILES_ACROSS)).long()
    stone = STONE.to(canvas.device)[(len(STONE) * canvas.random()).long()][:, None]
    shades = stone * (DARKEST + (LIGHTEST - DARKEST) * canvas.random(SHADES, 1)) + TINT * canvas.normal(SHADES, 3)
    bricks = (SHADES * canvas.random(KINDS, SQUARES, SQUARES // 2 + 1)).long()
    tile = max(1, canvas.size // TILES_ACROSS)
    pixel = torch.arange(canvas.size, device=canvas.device)[None]
    whole = max(1, tile // SQUARES)  # pixels; squares that straddle tokens would be all detail and no colour
    column = pixel + whole * (SQUARES * canvas.random(1)).long()
    row = pixel + whole * (SQUARES * canvas.random(1)).long()
    picture = torch.arange(canvas.n, device=canvas.device)[:, None, None]
    kind = kinds[picture, (row // tile % TILES_ACROSS)[:, :, None], (column // tile % TILES_ACROSS)[:, None, :]]
    inside_y, inside_x = (row % tile * SQUARES // tile)[:, :, None], (column % tile * SQUARES // tile)[:, None, :]
    shade = bricks[picture, kind, inside_y, (inside_x + inside_y % 2) // 2]
    canvas.over(_mask(canvas), shades[picture, shade].clip(0, 1) * setting.light)


def _mask(canvas: Canvas) -> torch.Tensor:
    """Return which pixels are wall, 0 or 1, [n, size, size]; a random SHARE of the pictures has a wall."""
    left, width = canvas.uniform(-0.1, 0.1), canvas.uniform(0.85, 1.1)
    bottom, height = canvas.uniform(0.79, 0.84), canvas.uniform(0.28, 0.34)
    across = (canvas.x > left) & (canvas.x < left + width)
    return (across & (canvas.y < bottom) & (canvas.y > bottom - height) & (canvas.random(1, 1) < SHARE)).float()
