"""A stand-in for ComfyUI's UNet: LDM's, whose blocks tell in transformer_options where they are, and ask for patches.

Which facts lie there, who puts them there and when is ComfyUI's: "block" around each block of the UNet,
"activations_shape" and "block_index" in each transformer, all of them in the one dictionary of a call.
"""

from __future__ import annotations

from typing import Any

import torch
from ldm.modules.attention import SpatialTransformer as LdmTransformer
from ldm.modules.diffusionmodules.openaimodel import TimestepBlock, UNetModel
from ldm.modules.diffusionmodules.util import timestep_embedding
from torch import nn

from tests.comfy_attention import CrossAttention
from tests.models import TEXT, ldm, seeded


class BasicTransformerBlock(nn.Module):
    """Self-attention, which a node may stand in for or change the tokens of; attention to the prompt; an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn1 = CrossAttention(width, heads)
        self.attn2 = CrossAttention(width, heads, context=TEXT)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict) -> torch.Tensor:
        """``[B, N, C]``."""
        options = transformer_options
        place = (*options["block"], options["block_index"])
        n = self.norm1(x)
        keys = values = None
        for patch in options.get("patches", {}).get("attn1_patch", ()):
            n, keys, values = patch(n, n if keys is None else keys, n if values is None else values, options)
        n = self._part("attn1", place, n, keys, values, options)
        for patch in options.get("patches", {}).get("attn1_output_patch", ()):
            n = patch(n, options)
        x = x + n
        x = x + self._part("attn2", place, self.norm2(x), context, None, options)
        return x + self.ff(self.norm3(x))

    def _part(self, name: str, place: tuple, n: Any, keys: Any, values: Any, options: dict) -> torch.Tensor:
        attention, others = getattr(self, name), options.get("patches_replace", {}).get(name, {})
        other = others.get(place, others.get(place[:2]))
        if other is None:
            return attention(n, context=keys, value=values, transformer_options=options)
        keys = n if keys is None else keys
        q, k, v = attention.to_q(n), attention.to_k(keys), attention.to_v(keys if values is None else values)
        told = {key: one for key, one in options.items() if key not in ("patches", "patches_replace")}
        return attention.to_out(other(q, k, v, {**told, "n_heads": attention.heads}))


class SpatialTransformer(LdmTransformer):
    """Says the shape of what it is given."""

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict) -> torch.Tensor:
        """``[B, C, H, W]``."""
        transformer_options["activations_shape"] = list(x.shape)
        tokens = self.proj_in(self.norm(x)).flatten(2).mT
        for number, block in enumerate(self.transformer_blocks):
            transformer_options["block_index"] = number
            tokens = block(tokens, context, transformer_options)
        return x + self.proj_out(tokens.mT.unflatten(2, x.shape[2:]))


class ComfyUnet(UNetModel):
    """Says in which block it is."""

    def forward(self, x, timesteps=None, context=None, y=None, control=None, transformer_options={}, **more):  # noqa: B006
        """As ComfyUI calls it. more: anything, for nothing."""
        return self._forward(x, timesteps, context, y, control, transformer_options, **more)

    def _forward(self, x, timesteps, context, y, control, transformer_options, **more):
        emb = self.time_embed(timestep_embedding(timesteps, self.model_channels).to(x.dtype))

        def run(kind: str, number: int, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
            transformer_options["block"] = (kind, number)
            for layer in block:
                if isinstance(layer, TimestepBlock):
                    h = layer(h, emb)
                else:
                    h = layer(h, context, transformer_options) if isinstance(layer, LdmTransformer) else layer(h)
            return h

        hs = [x]
        for number, block in enumerate(self.input_blocks):
            hs.append(run("input", number, block, hs[-1]))
        h = run("middle", 0, self.middle_block, hs[-1])
        for number, block in enumerate(self.output_blocks):
            h = run("output", number, block, torch.cat([h, hs.pop()], 1))
        return self.out(h)


def _comfy(depth: int = 1, **changes: Any) -> ComfyUnet:
    """depth: blocks in each transformer."""
    model = ldm(**changes)
    model.__class__ = ComfyUnet
    for module in model.modules():
        if isinstance(module, LdmTransformer):
            module.__class__ = SpatialTransformer
            width, heads = module.proj_in.out_channels, module.transformer_blocks[0].attn1.heads
            module.transformer_blocks = nn.ModuleList(BasicTransformerBlock(width, heads) for _ in range(depth))
    return model


unet = seeded(_comfy)
unet_of_one_level = seeded(_comfy, attention_resolutions=(1,), channel_mult=(1,))
deep_unet = seeded(_comfy, depth=2)
