"""The comparison picture: a column for each strength, a row for each prompt, what differs below it, a judgement."""

import os
import textwrap
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from demo.comparison import Column, Order, detail, nearness, speed_up

SMALLEST, LARGEST = 256, 512  # px of a picture on the sheet; smaller ones are enlarged by whole pixels
GAP, TITLE, HEAD, LINE = 8, 44, 82, 26
PAPER, INK, FAINT = (250, 250, 248), (20, 20, 20), (95, 95, 95)
AMPLIFY = 8
_font = ImageFont.load_default


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return eight times ``|a - b|`` of two uint8 pictures, clipped to 255: black if they are equal."""
    return np.clip(np.abs(a.astype(np.int16) - b.astype(np.int16)) * AMPLIFY, 0, 255).astype(np.uint8)


def shown_size(height: int, width: int) -> tuple[int, int]:
    """Return (height, width) on the sheet, by the longer side: over 512 px it is reduced to 512.

    Else both are multiplied by the smallest whole number that gives it 256 px or more.
    """
    side = max(height, width)
    scale = LARGEST / side if side > LARGEST else -(-SMALLEST // side)
    return round(height * scale), round(width * scale)


def cell(row: int, column: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the box (left, top, right, bottom) in px of a cell of the sheet. size: (height, width) of every cell.

    Row and column count from 0. Row 2 * i has picture i; row 2 * i + 1 has its difference, or its prompt in column 0.
    """
    height, width = size
    left, top = GAP + column * (width + GAP), TITLE + HEAD + row * (height + GAP)
    return left, top, left + width, top + height


def draw(columns: list[Column], wanted: list[Order], title: str, sentence: str) -> Image.Image:
    """Draw the sheet: title, a column of pictures for each of `columns`, of which the first is unmerged, and sentence.

    Picture i is in row ``2 * i``. Below it is its difference from the unmerged one, or that one's prompt and seed.
    """
    size = shown_size(*columns[0].pictures[0].shape[:2])
    right, bottom = cell(2 * len(wanted) - 1, len(columns) - 1, size)[2:]
    foot = _wrap(sentence, _font(18), right - GAP)
    sheet = Image.new("RGB", (right + GAP, bottom + 2 * GAP + LINE * len(foot)), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((GAP, TITLE // 2), title, INK, _font(20), anchor="lm")
    pen.multiline_text((GAP, bottom + GAP), "\n".join(foot), INK, _font(18), spacing=LINE - 18)
    for position, column in enumerate(columns):
        left = cell(0, position, size)[0]
        pen.text((left, TITLE), column.name, INK, _font(20))
        for line, note in enumerate(_notes(columns[0], column)):
            pen.text((left, TITLE + 28 + 22 * line), note, FAINT, _font(16))
        for row, (plain, picture) in enumerate(zip(columns[0].pictures, column.pictures, strict=True)):
            sheet.paste(_fit(picture, size), cell(2 * row, position, size)[:2])
            if position:
                sheet.paste(_fit(difference(plain, picture), size), cell(2 * row + 1, position, size)[:2])
    for row, order in enumerate(wanted):
        _label(pen, order, cell(2 * row + 1, 0, size))
    return sheet


def _notes(plain: Column, column: Column) -> list[str]:
    """List one or two lines under a heading: median time and, unless it is `plain`'s, speed-up, PSNR and detail."""
    time = f"{np.median(column.wall):.2f} s"
    if column is plain:
        return [f"{time} a picture"]
    return [f"{time}, {speed_up(plain.wall, column.wall):.2f} times as fast",
            f"PSNR {nearness(plain, column):.1f} dB, {detail(plain.pictures, column.pictures):.0%} of the detail"]


def _label(pen: ImageDraw.ImageDraw, order: Order, box: tuple[int, int, int, int]) -> None:
    """Write prompt, seed and, at lower right, a caption of the differences inside a box (left, top, right, bottom)."""
    left, top, right, bottom = box
    lines = _wrap(order.prompt, _font(18), right - left - GAP)
    text = "\n".join(lines if len(lines) <= 6 else [*lines[:5], "..."])
    pen.multiline_text((left, top + GAP), text, INK, _font(18), spacing=5)
    height = pen.multiline_textbbox((0, 0), text, _font(18), spacing=5)[3]
    pen.text((left, top + height + 2 * GAP), f"seed {order.seed}", FAINT, _font(16))
    pen.text((right - GAP, bottom - GAP), f"what differs, times {AMPLIFY}:", FAINT, _font(16), anchor="rs")


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Wrap a text to lines of about `width` px at most; an "n" is a little wider than letters are in the mean."""
    return textwrap.wrap(text, int(width / font.getlength("n")))


def _fit(picture: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """Resize a picture, uint8 [H, W, 3], to (height, width): by nearest pixels if its height grows, else by Lanczos."""
    image = Image.fromarray(picture)
    how = Image.Resampling.NEAREST if image.height < size[0] else Image.Resampling.LANCZOS
    return image.resize(size[::-1], how)


def write(sheet: Image.Image, path: Path) -> None:
    """Write the PNG in one move, so that a crash leaves the previous file as it was."""
    unfinished = path.with_name(f"{path.name}.part")
    sheet.save(unfinished, "PNG")
    os.replace(unfinished, path)
