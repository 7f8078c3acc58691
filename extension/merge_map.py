"""The merge map: each group of merged tokens in a colour of its own, over the picture."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image, ImageDraw

_STRENGTH = 0.6  # of the colours over the picture
_GOLDEN = 0.618034  # share of the colour circle from one group to the next, so that neighbours differ


def draw(picture: Image.Image, maps: dict[int, Any], sample: int = 0) -> Image.Image:
    """The picture once for each level, side by side; a token that merged with none keeps the picture's own colours.

    maps: level -> what a block merged last (grid, group ``[B or 1, N]``, num_groups). sample: the picture's row of the
    batch, negative from its end.
    """
    panels = [_panel(picture, level, found, sample) for level, found in sorted(maps.items())]
    whole = Image.new("RGB", (sum(one.width for one in panels), picture.height))
    for number, one in enumerate(panels):
        whole.paste(one, (number * picture.width, 0))
    return whole


def _panel(picture: Image.Image, level: int, found: Any, sample: int) -> Image.Image:
    rows = found.group.shape[0]
    group = found.group[max(-rows, min(sample, rows - 1))]
    merged = torch.bincount(group)[group] > 1
    size = (found.grid.width, found.grid.height)
    colours = Image.new("HSV", size)
    colours.putdata([(int(number * _GOLDEN % 1 * 255), 190, 255) for number in group.tolist()])
    mask = Image.new("L", size)
    mask.putdata([int(one * _STRENGTH * 255) for one in merged.tolist()])
    drawn = picture.convert("RGB")
    drawn.paste(_enlarge(colours.convert("RGB"), drawn), (0, 0), _enlarge(mask, drawn))
    text = f"ToMe level {level}: {group.shape[0]} -> {found.num_groups} tokens"
    pen = ImageDraw.Draw(drawn)
    pen.rectangle((0, 0, pen.textlength(text) + 8, 16), fill=(0, 0, 0))
    pen.text((4, 2), text, fill=(255, 255, 255))
    return drawn


def _enlarge(image: Image.Image, like: Image.Image) -> Image.Image:
    return image.resize(like.size, Image.Resampling.NEAREST)
