"""What stands behind the object: sky, sun or moon, mountains, ground, the lake that mirrors them, a wall of bricks.

Bricks of few shades make tiles of few kinds, which stand in random order. Only other bricks, near and far, tell a
brick's shade, so a model that takes noise away has to look at just these.
"""

from dataclasses import dataclass

import torch
from torch import tensor

from demo.training.canvas import Canvas, smooth

# One row for each sky: day, sunset, night, dawn, storm.
SKY_TOP = tensor([[0.20, 0.45, 0.85], [0.22, 0.18, 0.45], [0.02, 0.03, 0.12], [0.45, 0.60, 0.85], [0.25, 0.27, 0.32]])
SKY_LOW = tensor([[0.75, 0.88, 0.98], [0.98, 0.55, 0.25], [0.10, 0.14, 0.32], [0.98, 0.80, 0.75], [0.58, 0.60, 0.62]])
LIGHT = tensor([[1.0, 1.0, 1.0], [1.0, 0.78, 0.65], [0.35, 0.40, 0.60], [0.95, 0.88, 0.88], [0.65, 0.67, 0.70]])
BODY = tensor([[1.0, 0.97, 0.80], [1.0, 0.80, 0.45], [0.92, 0.94, 1.0], [1.0, 0.93, 0.85], [0.80, 0.80, 0.80]])
ROCK = tensor([[0.35, 0.40, 0.48], [0.35, 0.28, 0.40], [0.30, 0.34, 0.45], [0.45, 0.42, 0.52], [0.30, 0.32, 0.35]])
# One row for each ground: sea, meadow, desert, snow.
GROUND = tensor([[0.10, 0.33, 0.50], [0.28, 0.52, 0.18], [0.82, 0.66, 0.40], [0.90, 0.93, 0.97]])
NIGHT, SEA, MEADOW, DESERT, SNOW, NOBODY, LEFT, RIGHT = 2, 0, 1, 2, 3, 0, 1, 2
MOUNTAIN_HEIGHT = tensor([0.0, 0.08, 0.25])  # flat, hills, peaks
# Of walls. One row for each stone: brick, sandstone, slate, granite, clay.
STONE = tensor([[0.72, 0.30, 0.20], [0.85, 0.70, 0.45], [0.38, 0.46, 0.58], [0.66, 0.64, 0.62], [0.58, 0.42, 0.32]])
SHADES, KINDS = 5, 4  # in a picture: shades of its stone, kinds of tiles
DARKEST, LIGHTEST, TINT = 0.35, 1.3, 0.06  # of the stone's colour, and how far a shade may leave it
SQUARES = 4  # a tile is SQUARES x SQUARES of them, a brick two side by side, half a brick further every row
TILES_ACROSS = 16  # in a whole picture: 8 px each in one of 128 px, so that a square is one token of level 0
SHARE = 1 / 3  # of the pictures have a wall


@dataclass
class Setting:
    """What later layers need of painted ones: colours [n, 1, 1, 3]; `horizon` (a y) and `body_x` in 0..1, [n, 1, 1]."""

    horizon: torch.Tensor
    light: torch.Tensor
    haze: torch.Tensor
    body_x: torch.Tensor = None  # of the sun or the moon; None until it is painted, like the next two
    body_colour: torch.Tensor = None
    ground_colour: torch.Tensor = None


def paint(canvas: Canvas, walls: bool) -> Setting:
    """Paint the background, with a brick wall in a random SHARE of pictures if `walls`; return its `Setting`."""
    setting = _sky(canvas)
    _stars(canvas, setting)
    for _ in range(3):
        _cloud(canvas, setting)
    _body(canvas, setting)
    for layer in range(2):
        _mountains(canvas, setting, layer)
    _ground(canvas, setting)
    if walls:
        _wall(canvas, setting)
    return setting


def _sky(canvas: Canvas) -> Setting:
    """Paint the sky, a blend of two colours, over the image; return a Setting of horizon, light and haze alone."""
    horizon = canvas.uniform(0.54, 0.60)
    top = canvas.row(SKY_TOP, "sky") + canvas.jitter(0.025)
    haze = canvas.row(SKY_LOW, "sky") + canvas.jitter(0.025)
    height = torch.clip(canvas.y / horizon, 0, 1) ** canvas.uniform(0.8, 1.5)
    canvas.image[:] = top + (haze - top) * height[..., None]
    return Setting(horizon, canvas.row(LIGHT, "sky"), haze)


def _stars(canvas: Canvas, setting: Setting) -> None:
    """Paint stars above the horizon, in pictures of night only."""
    bright = canvas.random(canvas.size, canvas.size) > 0.992
    stars = bright & (canvas.y < setting.horizon - 0.05) & canvas.has("sky", NIGHT)
    canvas.over(stars * (0.3 + 0.6 * canvas.random(canvas.size, canvas.size)), 1.0)


def _cloud(canvas: Canvas, setting: Setting) -> None:
    """Paint one cloud into each picture with a chance of 15 % at night, of 60 % else."""
    u = canvas.uniform
    centre_x, centre_y, width, height = u(0, 1), u(0.05, 0.38), u(0.10, 0.26), u(0.015, 0.04)
    distance = ((canvas.x - centre_x) / width) ** 2 + ((canvas.y - centre_y) / height) ** 2
    wobble = 0.25 * torch.sin(canvas.x * u(20, 40) + u(0, 6.3))
    present = canvas.random(1, 1) < torch.where(canvas.has("sky", NIGHT), 0.15, 0.6)
    colour = torch.clip(setting.haze * 1.05 + 0.08 * setting.light, 0, 1)
    canvas.over(torch.clip(1.1 - distance - wobble, 0, 1) * 0.75 * present, colour)


def _body(canvas: Canvas, setting: Setting) -> None:
    """Paint the sun or the moon, except for "nobody"; set `body_x` and `body_colour` of all pictures in `setting`."""
    u = canvas.uniform
    setting.body_x = torch.where(canvas.has("body", LEFT), u(0.21, 0.25), u(0.75, 0.79))
    setting.body_colour = canvas.row(BODY, "sky")
    body_y, radius = u(0.17, 0.21), u(0.07, 0.085)
    distance = torch.sqrt((canvas.x - setting.body_x) ** 2 + (canvas.y - body_y) ** 2)
    present = ~canvas.has("body", NOBODY)
    canvas.over(present * 0.55 * torch.exp(-torch.clip(distance - radius, min=0) / 0.09), setting.body_colour)
    canvas.over(present * smooth(radius - distance, canvas.edge), setting.body_colour)


def _mountains(canvas: Canvas, setting: Setting, layer: int) -> None:
    """Paint a range, none if attribute "mountains" is "flat". Layer 0 is farther, higher, its high peaks have snow."""
    highest = canvas.row(MOUNTAIN_HEIGHT, "mountains")
    height = highest * (1 - 0.45 * layer) * (0.35 + 0.8 * _ridge(canvas, highest > 0.1))
    top = setting.horizon - height
    mask = smooth(canvas.y - top, canvas.edge) * (highest > 0)
    colour = canvas.row(ROCK, "sky") * (1 - 0.3 * layer) + canvas.jitter(0.02)
    depth = torch.clip((canvas.y - top) / torch.clip(setting.horizon - top, min=0.02), 0, 1)
    canvas.over(mask, colour + 0.5 * depth[..., None] * (setting.haze - colour))
    if layer == 0:
        ragged = 0.055 + 0.02 * torch.sin(canvas.x * 60 + canvas.uniform(0, 6))
        cap = smooth(ragged - (canvas.y - top), canvas.edge) * mask * (highest > 0.1) * (height > 0.13)
        canvas.over(cap * 0.9, 0.95 * setting.light)


def _ridge(canvas: Canvas, peaked: torch.Tensor) -> torch.Tensor:
    """Make a range's random height along x, 0..1, [n, 1, size]; triangles if `peaked`, bool [n, 1, 1], else sines."""
    profile = 0
    for octave, frequency in enumerate((1.3, 2.9, 6.1, 13.0)):
        phase = canvas.uniform(0, 1)
        triangle = torch.abs(((canvas.x * frequency * canvas.uniform(0.8, 1.2) + phase) % 1) * 2 - 1)
        wave = 0.5 + 0.5 * torch.sin(6.283 * (canvas.x * frequency + phase))
        profile = profile + torch.where(peaked, triangle, wave) * 0.5**octave
    return profile / 1.9


def _ground(canvas: Canvas, setting: Setting) -> None:
    """Paint the ground with its texture and, in a calm sea, the mirror image; set the ground's colour in `setting`."""
    mask = smooth(canvas.y - setting.horizon, canvas.edge)
    near = torch.clip((canvas.y - setting.horizon) / (1 - setting.horizon), 0, 1)
    ground = (canvas.row(GROUND, "ground") + canvas.jitter(0.02)) * setting.light
    far = ground * 0.75 + setting.haze * 0.25
    colour = far + (ground - far) * torch.sqrt(near)[..., None]
    textures = {SEA: _waves, MEADOW: _grass, DESERT: _dunes, SNOW: _drifts}
    texture = sum(canvas.has("ground", kind)[..., None] * draw(canvas, setting, near, colour)
                  for kind, draw in textures.items())
    above = canvas.image.clone()
    canvas.over(mask, torch.clip(colour + texture, 0, 1))
    setting.ground_colour = ground
    _mirror(canvas, setting, above, mask, near)


def _waves(canvas: Canvas, setting: Setting, near: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
    """Return the waves and the glitter of sun or moon, [n, size, size, 3], to add to `colour`; they reach into the sky.

    near: [n, size, 1], 0 at the horizon and above it, 1 at the bottom.
    """
    u, x, depth = canvas.uniform, canvas.x, 1 / (near + 0.12)
    waves = torch.sin(depth * u(9, 12) + u(0, 6.3) + 0.8 * torch.sin(x * u(8, 16) / (near + 0.35) + u(0, 6.3)))
    waves = waves + 0.5 * torch.sin(depth * u(17, 23) + 1.3 * torch.sin(x * u(14, 24) / (near + 0.35)))
    glitter = torch.exp(-(((x - setting.body_x) / (0.05 + 0.10 * near)) ** 2)) * ~canvas.has("body", NOBODY)
    glitter = (glitter * (0.35 + 0.25 * waves))[..., None] * (setting.body_colour - colour) * 0.8
    return 0.055 * waves[..., None] * (setting.haze * 0.8 + 0.2) + glitter


def _grass(canvas: Canvas, setting: Setting, near: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
    """Return what grass adds to the ground, [n, size, size, 3]; `colour` is unused.

    near: [n, size, 1], 0 (horizon) to 1 (bottom): nearer grass has more contrast and wider waves.
    """
    noise = canvas.normal(canvas.size, canvas.size)
    noise = noise + torch.roll(noise, 1, 1)  # blades are taller than wide
    rolling = torch.sin(canvas.x * canvas.uniform(6, 12) / (near + 0.4) + canvas.uniform(0, 6))
    return (0.035 * noise * (0.3 + near) + 0.04 * rolling)[..., None] * setting.light


def _dunes(canvas: Canvas, setting: Setting, near: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
    """Return dunes to add, lit, [n, size, size, 3]. near: 0 (horizon) to 1 (bottom) widens them. `colour` unused."""
    u, x = canvas.uniform, canvas.x
    dunes = torch.sin(u(3, 5) / (near + 0.12) + x * u(-5, 5) + 1.2 * torch.sin(x * u(3, 7) + u(0, 6)))
    return 0.07 * dunes[..., None] * setting.light


def _drifts(canvas: Canvas, setting: Setting, near: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
    """Return drifts to add, waves [n, size, size, 3]. near: 0 (horizon) to 1 (bottom) tilts them. `colour`: unused."""
    drifts = torch.sin(canvas.x * canvas.uniform(3, 6) + near * canvas.uniform(2, 5) + canvas.uniform(0, 6))
    return 0.035 * drifts[..., None] * setting.light


def _mirror(canvas: Canvas, setting: Setting, above: torch.Tensor, mask: torch.Tensor, near: torch.Tensor) -> None:
    """Mirror `above`, the picture before the ground was painted, in 70 % of the seas.

    mask: the ground's opacity [n, size, 1]. near: [n, size, 1] fades the mirror image, 0 (horizon) to 1 (bottom).
    """
    calm = canvas.has("ground", SEA) * (canvas.random(1, 1) < 0.7)
    rows = torch.round((2 * setting.horizon[:, :, 0] - canvas.y[:, :, 0]) * canvas.size - 0.5)
    rows = torch.clip(rows, 0, canvas.size - 1).long()
    image = torch.take_along_dim(above, torch.broadcast_to(rows[:, :, None, None], above.shape), 1)
    canvas.over(mask * calm * 0.7 * (1 - 0.35 * near), image * (0.75 + 0.25 * setting.light))


def _wall(canvas: Canvas, setting: Setting) -> None:
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
    canvas.over(_wall_mask(canvas), shades[picture, shade].clip(0, 1) * setting.light)


def _wall_mask(canvas: Canvas) -> torch.Tensor:
    """Return which pixels are wall, 0 or 1, [n, size, size]; a random SHARE of the pictures has a wall."""
    left, width = canvas.uniform(-0.1, 0.1), canvas.uniform(0.85, 1.1)
    bottom, height = canvas.uniform(0.79, 0.84), canvas.uniform(0.28, 0.34)
    across = (canvas.x > left) & (canvas.x < left + width)
    return (across & (canvas.y < bottom) & (canvas.y > bottom - height) & (canvas.random(1, 1) < SHARE)).float()
