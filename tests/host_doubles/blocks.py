"""Doubles of sgm's block and attention: names and orders on which a patch relies, no more."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models import CrossAttention, FeedForward
from tome_core.hosting import register_package

register_package("benchmarks.models")  # its feed-forward layers stand for a host's own


def of_heads(flat: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, N, H*d]`` to ``[B, H, N, d]``."""
    return flat.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None):
    out = F.scaled_dot_product_attention(*(of_heads(tensor, heads) for tensor in (q, k, v)), mask)
    return out.transpose(1, 2).flatten(2)


class SgmAttention(CrossAttention):
    """The signature of sgm's CrossAttention."""

    def forward(self, x, context=None, mask=None, additional_tokens=None, n_times_crossframe_attn_in_self=0):
        assert not n_times_crossframe_attn_in_self
        count = 0 if additional_tokens is None else additional_tokens.shape[1]
        if count:
            x = torch.cat([additional_tokens, x], dim=1)
        context = x if context is None else context
        out = attend(self.to_q(x), self.to_k(context), self.to_v(context), self.heads, mask)
        return self.to_out(out)[:, count:]  # the mask as it is: one for each head, not for each sample


class Block(nn.Module):
    """The parts of a block, of any host."""

    attention: type[CrossAttention]

    def __init__(self, width: int, heads: int, context_width: int) -> None:
        super().__init__()
        self.attn1 = self.attention(width, width, heads)
        self.attn2 = self.attention(width, context_width, heads)
        self.ff = FeedForward(width)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)


class SgmBlock(Block):
    """The signature of sgm's BasicTransformerBlock, which is what SDXL runs on in the webui."""

    attention = SgmAttention
    checkpoint = True

    def forward(self, x, context=None, additional_tokens=None, n_times_crossframe_attn_in_self=0):
        if not self.checkpoint:
            return self._forward(x, context, additional_tokens, n_times_crossframe_attn_in_self)
        return checkpoint(self._forward, x, context, use_reentrant=False)

    def _forward(self, x, context=None, additional_tokens=None, n_times_crossframe_attn_in_self=0):
        x = x + self.attn1(self.norm1(x), context=None, additional_tokens=additional_tokens,
                           n_times_crossframe_attn_in_self=n_times_crossframe_attn_in_self)  # fmt: skip
        x = x + self.attn2(self.norm2(x), context=context, additional_tokens=additional_tokens)
        return x + self.ff(self.norm3(x))


# the patch goes by names, because every host has its own copy of the class
SgmBlock.__name__ = "BasicTransformerBlock"
