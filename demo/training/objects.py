"""The one object of a scene, its shadow, and sometimes its twin: an exact copy half a picture aside."""

from dataclasses import dataclass

import torch
from torch import tensor

from demo.training.background import LEFT, RIGHT, Setting
from demo.training.canvas import Canvas, smooth

# One row for each colour: red, yellow, blue, white, green.
COLOUR = tensor([[0.88, 0.15, 0.12], [0.96, 0.82, 0.15], [0.15, 0.30, 0.90], [0.95, 0.95, 0.95], [0.15, 0.65, 0.25]])
BARK = tensor([0.42, 0.25, 0.12])
EMPTY, BALL, BOX, CONE, TREE = range(5)


@dataclass
class Place:
    """The object's position, [n, 1, 1], in shares of a picture's side: foot (x; y from the top), half width `scale`."""

    x: torch.Tensor
    y: torch.Tensor
    scale: torch.Tensor
    side: torch.Tensor  # 1 if the light comes from the left, -1 from the right, 0.4 if there is neither sun nor moon


def paint(canvas: Canvas, setting: Setting) -> None:
    """Paint the object, its shadow and at times its twin on a finished background, nothing for the shape "empty"."""
    present = (~canvas.has("shape", EMPTY)).float()
    place = _place(canvas)
    _shadow(canvas, place, present, setting)
    dx, dy = canvas.x - place.x, canvas.y - place.y
    lit = _lit_colour(canvas, setting, place, dx, dy)
    masks = _shapes(canvas, place, dx, dy)
    trunk = canvas.has("shape", TREE) * masks.pop("trunk")
    canvas.over(trunk, BARK * setting.light)
    kinds = zip((BALL, BOX, CONE, TREE), masks.values(), strict=True)
    mask = sum(canvas.has("shape", kind) * mask for kind, mask in kinds)
    canvas.over(mask, torch.clip(lit, 0, 1))
    _finish(canvas, place, dx, dy, mask)
    _twin(canvas, place, torch.maximum(mask, trunk), present)


def _place(canvas: Canvas) -> Place:
    """Choose the object's position at random: away from sun or moon, near the middle without them; a twin has room."""
    left, right = canvas.has("body", LEFT).float(), canvas.has("body", RIGHT).float()
    x = 0.5 + 0.13 * (left - right) + canvas.uniform(-0.02, 0.02)
    return Place(x, canvas.uniform(0.81, 0.84), canvas.uniform(0.15, 0.165), left - right + 0.4 * (1 - left - right))


def _shadow(canvas: Canvas, place: Place, present: torch.Tensor, setting: Setting) -> None:
    """Paint the object's shadow on the ground. present: 1 if a picture has an object, 0 if not, [n, 1, 1]."""
    across = (canvas.x - place.x - place.side * place.scale * 0.8) / (place.scale * 1.35)
    along = (canvas.y - place.y) / (place.scale * 0.28)
    mask = torch.clip(1.25 - torch.sqrt(across**2 + along**2), 0, 0.5) * 2
    canvas.over(present * 0.45 * mask, setting.ground_colour * 0.25)


def _lit_colour(canvas: Canvas, setting: Setting, place: Place, dx: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Return the object's colour [n, size, size, 3]: darker away from the sun, times a random 6 x 6 pattern.

    dx [n, 1, size], dy [n, size, 1]: from the object's foot, in pictures.
    """
    shade = 0.78 - 0.30 * place.side * dx / place.scale - 0.22 * (dy + place.scale) / place.scale
    shade = torch.clip(shade, 0.25, 1.1)
    tiles = canvas.random(6, 6)
    column = torch.clip((dx / place.scale + 1.2) / 2.4 * 6, 0, 5.99).long()
    row = torch.clip((dy / place.scale + 2.4) / 2.4 * 6, 0, 5.99).long()
    pattern = tiles[torch.arange(canvas.n, device=canvas.device)[:, None, None], row, column]
    paint = canvas.row(COLOUR, "colour") * (setting.light * 0.75 + 0.25)
    return paint * shade[..., None] * (0.8 + 0.25 * pattern[..., None])


def _shapes(canvas: Canvas, place: Place, dx: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return opacities [n, size, size]: "ball", "box", "cone", "crown", "trunk". dx, dy: from the foot, in pictures."""
    s, edge = place.scale, canvas.edge
    wavy = s * (0.88 + 0.08 * torch.sin(7 * torch.arctan2(dy + 1.85 * s, dx) + canvas.uniform(0, 6)))
    cone = torch.minimum(smooth((2.4 * s + dy) * 0.42 - torch.abs(dx), edge), smooth(-dy + 0.01, edge))
    return {
        "ball": smooth(s - torch.sqrt(dx**2 + (dy + s * 0.95) ** 2), edge),
        "box": torch.minimum(smooth(s * 0.85 - torch.abs(dx), edge), smooth(s * 0.85 - torch.abs(dy + s * 0.8), edge)),
        "cone": cone * (dy > -2.5 * s),
        "crown": smooth(wavy - torch.sqrt(dx**2 + (dy + 1.85 * s) ** 2), edge),
        "trunk": torch.minimum(smooth(s * 0.25 - torch.abs(dx), edge), smooth(s * 0.6 - torch.abs(dy + s * 0.5), edge)),
    }


def _finish(canvas: Canvas, place: Place, dx: torch.Tensor, dy: torch.Tensor, mask: torch.Tensor) -> None:
    """Paint balls' highlights, boxes' light tops and dark sides. mask: the object's opacity; dx, dy: from its foot."""
    s = place.scale
    distance = (dx + place.side * s * 0.35) ** 2 + (dy + s * 1.3) ** 2
    canvas.over(mask * torch.exp(-distance / (s * 0.22) ** 2) * 0.7 * canvas.has("shape", BALL), 1.0)
    top = canvas.has("shape", BOX) * mask * smooth(-dy - s * 1.3, canvas.edge)
    canvas.over(top * 0.45, 1.0)
    dark = canvas.has("shape", BOX) * mask * smooth(place.side * dx - s * 0.35, canvas.edge)
    canvas.over(dark * 0.4, 0.0)


def _twin(canvas: Canvas, place: Place, mask: torch.Tensor, present: torch.Tensor) -> None:
    """Copy the object's pixels sideways, by 7/20 of the picture to the emptier side, in a random third of the pictures.

    mask: the object's opacity [n, size, size]. present: 1 if a picture has an object, 0 if not, [n, 1, 1].
    """
    shift = torch.where(place.x[:, 0, 0] < 0.5, 1, -1) * (canvas.size * 7 // 20)
    source = torch.arange(canvas.size, device=canvas.device)[None] - shift[:, None]
    inside = (source >= 0) & (source < canvas.size)
    source = torch.clip(source, 0, canvas.size - 1)[:, None, :]
    copied = torch.take_along_dim(mask, torch.broadcast_to(source, mask.shape), 2) * inside[:, None, :]
    copied = copied * (canvas.random(1, 1) < 1 / 3)
    pixels = torch.take_along_dim(canvas.image, torch.broadcast_to(source[..., None], canvas.image.shape), 2)
    canvas.over(copied * present, pixels)
