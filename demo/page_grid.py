"""Pictures side by side, as HTML: as many in a row as there is room for."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from html import escape

import numpy as np
from PIL import Image


def grid(cells: Iterable[tuple[str, np.ndarray, str]]) -> str:
    """cells: a heading, a picture (uint8 [H, W, 3]) and a line of figures each."""
    return f'<div class="grid">{"".join(_cell(*one) for one in cells)}</div>'


def _cell(heading: str, picture: np.ndarray, figures: str) -> str:
    """The address is the picture itself, so that nothing has to be kept or asked for."""
    heading, figures, file = escape(heading), escape(figures), io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    address = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return (f'<figure><img alt="{heading}" src="{address}">'
            f"<figcaption><strong>{heading}</strong><br>{figures}</figcaption></figure>")  # fmt: skip
