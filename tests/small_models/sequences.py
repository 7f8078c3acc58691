"""Self-attention calls as an adapter passes them: of a picture and of a film, with text around them."""

import torch
import torch.nn.functional as F

from tome_core.attention.merged import Attention
from tome_core.merging.grid import Grid, Layout

PICTURE, FILM = Layout(Grid(16, 24), first=7), Layout(Grid(6 * 8, 12, frames=6), first=0)
HEADS, WIDTH = 3, 16


def attention(layout: Layout, behind: int = 0, batch: int = 2, dtype=torch.float32, seed: int = 0,
              takes_bias: bool = True) -> Attention:  # fmt: skip
    """Queries, keys and values, smooth over the grid, with noise around it. behind: tokens after the picture's."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, HEADS * WIDTH, layout.grid.height // 4 + 1, layout.grid.width // 4 + 1)
    tensors = []
    for _ in range(3):
        picture = F.interpolate(torch.randn(shape, generator=generator, dtype=torch.float64),
                                (layout.grid.height, layout.grid.width), mode="bilinear").flatten(2).mT  # fmt: skip
        picture = picture + 0.3 * torch.randn(picture.shape, generator=generator, dtype=torch.float64)
        before, after = (torch.randn(batch, count, HEADS * WIDTH, generator=generator, dtype=torch.float64)
                         for count in (layout.first, behind))  # fmt: skip
        tensors.append(torch.cat([before, picture, after], 1).unflatten(2, (HEADS, WIDTH)).to(dtype))
    return Attention(*tensors, sdpa if takes_bias else _without_bias, WIDTH**-0.5, takes_bias)


def sdpa(q, k, v, bias=None):
    """Attend by torch's function, for ``[B, S, H, d]``."""
    return F.scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), bias).transpose(1, 2)


def _without_bias(q, k, v, bias):
    assert bias is None
    return sdpa(q, k, v)
