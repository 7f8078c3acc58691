"""A batch of pictures being painted: coordinates, random draws and one way to lay colour on."""

from __future__ import annotations

import numpy as np


def smooth(x: np.ndarray, width: float) -> np.ndarray:
    """Step from 0 to 1 around x = 0, `width` wide, with no corners (smoothstep)."""
    t = np.clip(x / width + 0.5, 0, 1)
    return t * t * (3 - 2 * t)


class Canvas:
    """`n` pictures of `size` x `size`, painted together.

    `image` is [n, size, size, 3], colours in 0..1. `x` [1, 1, size] and `y` [1, size, 1] are pixel centres in
    0..1, `y` downwards. Every random draw comes from `rng`, one value a picture, so equal seeds give equal
    pictures. `traits` maps an attribute's name to the index of its value, [n].
    """

    def __init__(self, traits: dict[str, np.ndarray], rng: np.random.Generator, size: int):
        self.traits, self.rng, self.size = traits, rng, size
        self.n = len(next(iter(traits.values())))
        centres = (np.arange(size, dtype=np.float32) + 0.5) / size
        self.x, self.y = centres[None, None, :], centres[None, :, None]
        self.edge = 1.5 / size  # width of an anti-aliased edge: one and a half pixels
        self.image = np.zeros((self.n, size, size, 3), np.float32)

    def uniform(self, low: float, high: float) -> np.ndarray:
        """One uniform value a picture, [n, 1, 1]."""
        return self.rng.uniform(low, high, (self.n, 1, 1)).astype(np.float32)

    def chance(self) -> np.ndarray:
        """One value in 0..1 a picture, [n, 1, 1], to compare with a probability."""
        return self.rng.random((self.n, 1, 1))

    def jitter(self, sigma: float) -> np.ndarray:
        """One small random colour shift a picture, [n, 1, 1, 3]."""
        return self.rng.normal(0, sigma, (self.n, 1, 1, 3)).astype(np.float32)

    def per_pixel(self, low: float, high: float) -> np.ndarray:
        """One uniform value a pixel, [n, size, size]."""
        return self.rng.uniform(low, high, (self.n, self.size, self.size)).astype(np.float32)

    def colour(self, palette: np.ndarray, trait: str) -> np.ndarray:
        """The palette's row for each picture's value of `trait`, [n, 1, 1, 3]."""
        return palette[self.traits[trait]][:, None, None, :].astype(np.float32)

    def has(self, trait: str, value: int) -> np.ndarray:
        """Which pictures have this value of `trait`, bool [n, 1, 1]."""
        return (self.traits[trait] == value)[:, None, None]

    def over(self, mask: np.ndarray, colour: np.ndarray) -> None:
        """Lay `colour` (broadcastable to the image) on, with `mask` [n, size, size] as opacity in 0..1."""
        self.image += mask[..., None] * (colour - self.image)
