"""Procedural landscapes ("scenes"): the data the embedded model was trained on.

Every picture is described by six attributes, which are also the words of its prompt. Mirror lakes, twin objects
and tiled walls repeat random texture far away in the same picture, so that self-attention has something to look up.
"""

import torch

from demo.prompt import ATTRIBUTES, SIZES
from demo.training import background, objects
from demo.training.canvas import Canvas


def draw_attributes(n: int, generator: torch.Generator) -> torch.Tensor:
    """Draw attributes of `n` scenes on the generator's device: int64 [n, 6], a column each, values equally likely."""
    device = generator.device
    return torch.stack([torch.randint(size, (n,), generator=generator, device=device) for size in SIZES], 1)


def render(attributes: torch.Tensor, generator: torch.Generator, size: int = 64, walls: bool = True) -> torch.Tensor:
    """Paint scenes: `attributes` int64 [n, 6] to float32 [n, 3, size, size] in -1..1, on the generator's device.

    All else is drawn from `generator`: equal ones on one device give equal pictures. walls: if on, each picture has a
    brick wall with a chance of a third.
    """
    canvas = Canvas(dict(zip(ATTRIBUTES, attributes.T, strict=True)), generator, size)
    setting = background.paint(canvas, walls)
    objects.paint(canvas, setting)
    return canvas.image.clip(0, 1).permute(0, 3, 1, 2) * 2 - 1
