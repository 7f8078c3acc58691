"""Procedural landscapes ("scenes"): the data the embedded model was trained on.

Every picture is described by six attributes, which are also the words of its prompt. Mirror lakes and twin
objects repeat random texture far away in the same picture, so that self-attention has something to look up.
"""

from __future__ import annotations

import numpy as np

from demo import landscape, thing
from demo.canvas import Canvas

ATTRIBUTES = {
    "sky": ("day", "sunset", "night", "dawn", "storm"),
    "ground": ("sea", "meadow", "desert", "snow"),
    "body": ("nobody", "left", "right"),  # the sun or the moon: none, or on which side
    "mountains": ("flat", "hills", "peaks"),
    "shape": ("empty", "ball", "box", "cone", "tree"),
    "colour": ("red", "yellow", "blue", "white", "green"),
}
SIZES = tuple(len(values) for values in ATTRIBUTES.values())
CHUNK = 512  # pictures painted at once: about 100 MB of temporaries at 128 px


def draw_attributes(n: int, rng: np.random.Generator) -> np.ndarray:
    """Random attributes of `n` scenes: int [n, 6], one column an attribute, each value equally likely."""
    return np.stack([rng.integers(0, size, n) for size in SIZES], 1)


def render(attributes: np.ndarray, rng: np.random.Generator, size: int = 64) -> np.ndarray:
    """Paint scenes: `attributes` int [n, 6] to float32 [n, 3, size, size] in -1..1.

    What the attributes leave open (positions, textures, clouds) is drawn from `rng`: equal generators give
    equal pictures. Raises ValueError for attributes of another shape or out of range.
    """
    attributes = np.asarray(attributes)
    if attributes.ndim != 2 or attributes.shape[1] != len(SIZES):
        raise ValueError(f"attributes have shape {attributes.shape}; scenes need [n, {len(SIZES)}]")
    if (attributes < 0).any() or (attributes >= np.array(SIZES)).any():
        raise ValueError(f"attributes run from {attributes.min()} to {attributes.max()}; allowed are 0 up to "
                         f"{[s - 1 for s in SIZES]} for {list(ATTRIBUTES)}")
    canvas = Canvas(dict(zip(ATTRIBUTES, attributes.T, strict=True)), rng, size)
    thing.paint(canvas, landscape.paint(canvas))
    return (np.clip(canvas.image, 0, 1).transpose(0, 3, 1, 2) * 2 - 1).astype(np.float32)


def make(n: int, seed: int, size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """`n` random scenes: pictures uint8 [n, 3, size, size] and their attributes int [n, 6]."""
    rng = np.random.default_rng(seed)
    attributes = draw_attributes(n, rng)
    pictures = np.empty((n, 3, size, size), np.uint8)
    for start in range(0, n, CHUNK):
        part = slice(start, start + CHUNK)
        pictures[part] = np.round((render(attributes[part], rng, size) + 1) * 127.5)
    return pictures, attributes
