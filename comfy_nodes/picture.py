"""Drawing of merge maps: each group of tokens in its mean colour. Pictures are ``[H, W, 3]``, float, 0..1."""

import textwrap
from typing import Any

import torch
import torch.nn.functional as F

_BORDER = 0.7  # brightness of the border between two groups


def panel(picture: torch.Tensor, grid: Any, group: torch.Tensor, title: str) -> torch.Tensor:
    """Return a picture ``[H, W, 3]`` with each group of merged tokens in its mean colour, dark borders, and a title.

    The picture is on the CPU and keeps its size: the title covers its upper left. `group` ``[tokens]`` has each token's
    group number, row by row of a `grid` (height, width). A group of one token keeps its pixels inside the borders.
    """
    height, width = picture.shape[:2]
    tokens = group.reshape(1, 1, *grid).double()  # double: nearest keeps whole numbers whole
    cells = F.interpolate(tokens, (height, width), mode="nearest")[0, 0].long()
    sizes = torch.bincount(group)
    merged = (sizes[cells] > 1).unsqueeze(-1)
    pixels = torch.bincount(cells.flatten(), minlength=len(sizes)).clamp(min=1)[:, None]
    means = torch.zeros(len(sizes), 3).index_add_(0, cells.flatten(), picture.reshape(-1, 3)) / pixels
    light = torch.ones(height, width, 1)
    light[1:][cells[1:] != cells[:-1]] = _BORDER
    light[:, 1:][cells[:, 1:] != cells[:, :-1]] = _BORDER
    return add_title(torch.where(merged, means[cells], picture) * light, title)


def add_title(picture: torch.Tensor, title: str) -> torch.Tensor:
    """Return a copy of a picture ``[H, W, 3]`` (0..1, on the CPU) with a text, in lines that fit, in its upper left."""
    from PIL import Image, ImageDraw

    image = Image.fromarray((picture.clamp(0, 1) * 255).round().to(torch.uint8).numpy())
    draw = ImageDraw.Draw(image)
    text = textwrap.fill(title, max(16, picture.shape[1] // 7))
    box = draw.multiline_textbbox((4, 4), text)
    draw.rectangle((0, 0, box[2] + 4, box[3] + 4), fill=(0, 0, 0))
    draw.multiline_text((4, 4), text, fill=(255, 255, 255))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.reshape(picture.shape).float() / 255


def from_latent(samples: torch.Tensor, latent_format: Any) -> torch.Tensor:
    """Return rough pictures ``[B, 8 * h, 8 * w, 3]``, 0..1, of latents ``[B, C, (frames,) h, w]``; grey if unknown."""
    samples = samples.detach().float().cpu()
    if samples.dim() == 5:  # video: its first frame
        samples = samples[:, :, 0]
    factors = getattr(latent_format, "latent_rgb_factors", None)
    if factors is None or len(factors) != samples.shape[1]:
        rgb = torch.full((samples.shape[0], 3, *samples.shape[2:]), 0.5)
    else:
        bias = torch.tensor(getattr(latent_format, "latent_rgb_factors_bias", None) or (0.0, 0.0, 0.0))
        mixed = torch.einsum("bchw,cr->brhw", samples, torch.tensor(factors)) + bias[:, None, None]
        rgb = ((mixed + 1) / 2).clamp(0, 1)
    return F.interpolate(rgb, scale_factor=8, mode="nearest").movedim(1, -1)
