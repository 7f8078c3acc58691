"""Which tokens became one, drawn: each in the mean colour of all that it merged with."""

from __future__ import annotations

import numpy as np


def mosaic(picture: np.ndarray, grid: tuple[int, int], group: np.ndarray) -> np.ndarray:
    """What is left of a picture ``[H, W, 3]``, uint8, where a group of tokens has one colour: the mean of its own.

    grid: (height, width) in tokens; group: whole numbers from 0 up ``[height * width]``, the group of each token.
    """
    (height, width), (down, across) = picture.shape[:2], grid
    rows, columns = np.arange(height) * down // height, np.arange(width) * across // width
    cells = group.reshape(grid)[rows][:, columns]
    count = np.maximum(np.bincount(cells.ravel()), 1)
    means = np.stack([np.bincount(cells.ravel(), picture[..., one].ravel()) / count for one in range(3)], -1)
    return means[cells].round().astype(np.uint8)
