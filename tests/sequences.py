"""Queries, keys and values of a picture and of a film with text around them, and a host that attends to them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tome_core.merging.grid import Grid
from tome_core.sequence import BY_TOKEN, Host, Layout
from tome_core.sequence.layout import Tensors, by_token, in_form

PICTURE, FILM = Layout(Grid(16, 24), first=7), Layout(Grid(6 * 8, 12, frames=6), first=0)
HEADS, WIDTH = 3, 16


def tensors(layout: Layout, behind: int = 0, batch: int = 2, dtype=torch.float32, seed: int = 0) -> Tensors:
    """Smooth over the grid, as pictures are; the tokens around it are noise."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, HEADS * WIDTH, layout.grid.height // 4 + 1, layout.grid.width // 4 + 1)
    found = []
    for _ in range(3):
        picture = F.interpolate(torch.randn(shape, generator=generator, dtype=torch.float64),
                                (layout.grid.height, layout.grid.width), mode="bilinear").flatten(2).mT  # fmt: skip
        picture = picture + 0.3 * torch.randn(picture.shape, generator=generator, dtype=torch.float64)
        before, after = (torch.randn(batch, count, HEADS * WIDTH, generator=generator, dtype=torch.float64)
                         for count in (layout.first, behind))  # fmt: skip
        found.append(torch.cat([before, picture, after], 1).unflatten(2, (HEADS, WIDTH)).to(dtype))
    return Tensors(*found)


def sdpa(q, k, v, bias=None):
    """[B, S, H, d]"""
    return F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)), bias).transpose(1, 2)


def host(form: str = BY_TOKEN, out_form: str = BY_TOKEN, takes_bias: bool = True) -> Host:
    """A host whose attention takes q, k and v in one form and answers in another; without a bias it wants none."""
    def function(q, k, v, bias):
        assert bias is None or takes_bias
        return in_form(sdpa(*(by_token(one, form, HEADS) for one in (q, k, v)), bias), out_form)

    return Host(function, form, out_form, WIDTH**-0.5, takes_bias)
