"""The comparison picture: a row for each prompt, a column for each variant, difference maps beside them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from demo.likeness import psnr
from demo.picture import Column, Order, detail, speed_up

SMALLEST, LARGEST = 256, 512  # px of a picture on the sheet; smaller ones are enlarged by whole pixels
GAP, MARGIN, TITLE, HEAD = 8, 190, 44, 52
PAPER, INK, FAINT = (250, 250, 248), (20, 20, 20), (95, 95, 95)
AMPLIFY = 8


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| of two uint8 pictures, eight times as strong, clipped: black where they agree."""
    return np.clip(np.abs(a.astype(np.int16) - b.astype(np.int16)) * AMPLIFY, 0, 255).astype(np.uint8)


def shown_size(height: int, width: int) -> tuple[int, int]:
    """Size of a picture on the sheet, (height, width): whole multiples up, proportionally down."""
    if max(height, width) > LARGEST:
        scale = LARGEST / max(height, width)
        return round(height * scale), round(width * scale)
    times = max(1, -(-SMALLEST // max(height, width)))
    return height * times, width * times


def cell(row: int, column: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Box (left, top, right, bottom) of a sheet's cell for pictures shown at `size` = (height, width)."""
    height, width = size
    left, top = MARGIN + column * (width + GAP), TITLE + HEAD + row * (height + GAP)
    return left, top, left + width, top + height


def draw(columns: list[Column], wanted: list[Order], title: str) -> Image.Image:
    """The whole sheet. Columns: unmerged, then for each way of merging the picture and its difference to unmerged."""
    size = shown_size(*columns[0].pictures[0].shape[:2])
    cells = 1 + 2 * (len(columns) - 1)
    right, bottom = cell(len(wanted) - 1, cells - 1, size)[2:]
    sheet = Image.new("RGB", (right + GAP, bottom + GAP), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((GAP * 2, TITLE // 2), title, INK, _font(20), anchor="lm")
    for row, order in enumerate(wanted):
        _label_row(pen, order, cell(row, 0, size)[1])
    for position, (picture_column, head, note) in enumerate(_heads(columns)):
        left = cell(0, position, size)[0]
        pen.text((left, TITLE + 2), head, INK, _font(20))
        pen.text((left, TITLE + 27), note, FAINT, _font(16))
        for row, picture in enumerate(picture_column):
            sheet.paste(_fit(picture, size), cell(row, position, size)[:2])
    return sheet


def _heads(columns: list[Column]) -> list[tuple[list[np.ndarray], str, str]]:
    """Pictures, heading and note of every cell column, from left to right."""
    plain = columns[0]
    heads = [(plain.pictures, plain.variant.name, f"{np.median(plain.wall):.2f} s a picture")]
    for column in columns[1:]:
        pairs = list(zip(plain.pictures, column.pictures, strict=True))
        quality = (f"PSNR {np.mean([psnr(a, b) for a, b in pairs]):.1f} dB, "
                   f"{detail(plain.pictures, column.pictures):.0%} of the detail")
        time = f"{np.median(column.wall):.2f} s, {speed_up(plain.wall, column.wall):.2f} times as fast"
        heads.append((column.pictures, column.variant.name, time))
        heads.append(([difference(a, b) for a, b in pairs], f"difference x{AMPLIFY}", quality))
    return heads


def _label_row(pen: ImageDraw.ImageDraw, order: Order, top: int) -> None:
    text = "\n".join(_wrap(order.prompt, _font(18), MARGIN - 3 * GAP))
    pen.multiline_text((GAP * 2, top + 2), text, INK, _font(18), spacing=5)
    height = pen.multiline_textbbox((0, 0), text, _font(18), spacing=5)[3]
    pen.text((GAP * 2, top + height + 14), f"seed {order.seed}", FAINT, _font(16))


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Lines of at most `width` px; a longer word stands alone. Nine lines fit beside a picture."""
    lines: list[str] = []
    for word in text.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines if len(lines) <= 9 else [*lines[:8], "..."]


def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def _fit(picture: np.ndarray, size: tuple[int, int]) -> Image.Image:
    image = Image.fromarray(picture)
    if image.size == size[::-1]:
        return image
    how = Image.Resampling.NEAREST if image.height < size[0] else Image.Resampling.LANCZOS
    return image.resize(size[::-1], how)


def write(sheet: Image.Image, path: Path) -> None:
    """Write the PNG in one move: a crash leaves the previous file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    sheet.save(unfinished, "PNG")
    os.replace(unfinished, path)
