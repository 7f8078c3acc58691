"""Stand-ins for ComfyUI's models; what they put into transformer_options, and when, is what ComfyUI's put there."""

from typing import Any

import torch
from ldm.modules.attention import SpatialTransformer as LdmTransformer
from ldm.modules.diffusionmodules.openaimodel import TimestepBlock, UNetModel
from ldm.modules.diffusionmodules.util import timestep_embedding
from torch import nn

from tests.host_doubles import comfy_attention
from tests.host_doubles.blocks import Block
from tests.small_models.unets import TEXT, ldm, seeded

WIDTH, HEADS = 32, 2  # sizes of transformers


class BasicTransformerBlock(Block):
    """A block whose attentions another node may replace, and whose self-attention's tokens it may change."""

    attention = comfy_attention.CrossAttention

    def forward(self, x: torch.Tensor, context: torch.Tensor, options: dict) -> torch.Tensor:
        patches, n = options.get("patches", {}), self.norm1(x)
        keys, values = n, n
        for patch in patches.get("attn1_patch", ()):
            n, keys, values = patch(n, keys, values, options)
        n = self._part("attn1", n, keys, values, options)
        for patch in patches.get("attn1_output_patch", ()):
            n = patch(n, options)
        x = x + n
        x = x + self._part("attn2", self.norm2(x), context, context, options)
        return x + self.ff(self.norm3(x))

    def _part(self, name: str, n: Any, keys: Any, values: Any, options: dict) -> torch.Tensor:
        attention, others = getattr(self, name), options.get("patches_replace", {}).get(name, {})
        other = others.get((*options["block"], options["block_index"]), others.get(options["block"]))
        if other is None:
            return attention(n, keys, values, options)
        return attention.to_out(other(attention.to_q(n), attention.to_k(keys), attention.to_v(values), options))


class SpatialTransformer(LdmTransformer):
    """A transformer that writes the shape of its input into the options."""

    def forward(self, x: torch.Tensor, context: torch.Tensor, options: dict) -> torch.Tensor:
        options["activations_shape"] = list(x.shape)
        tokens = self.proj_in(self.norm(x)).flatten(2).mT
        for number, block in enumerate(self.transformer_blocks):
            options["block_index"] = number
            tokens = block(tokens, context, options)
        return x + self.proj_out(tokens.mT.unflatten(2, x.shape[2:]))


class ComfyUnet(UNetModel):
    """A UNet that writes the current block into the options."""

    def forward(self, x, timesteps, context, transformer_options, **more):
        """more: any keyword; it has no effect, but is passed on, so that a compiler tells calls apart by it."""
        return self._forward(x, timesteps, context, transformer_options, **more)

    def _forward(self, x, timesteps, context, transformer_options, **more):
        emb = self.time_embed(timestep_embedding(timesteps, self.model_channels).to(x.dtype))

        def run(kind: str, number: int, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
            transformer_options["block"] = (kind, number)
            for layer in block:
                if isinstance(layer, TimestepBlock):
                    h = layer(h, emb)
                else:
                    h = layer(h, context, transformer_options) if isinstance(layer, LdmTransformer) else layer(h)
            return h

        h, hs, patches = x, [], transformer_options.get("patches", {})
        for number, block in enumerate(self.input_blocks):
            hs.append(run("input", number, block, h))
            h = hs[-1]
            for patch in patches.get("input_block_patch_after_skip", ()):
                h = patch(h, transformer_options)
        h = run("middle", 0, self.middle_block, h)
        for number, block in enumerate(self.output_blocks):
            skipped = hs.pop()
            for patch in patches.get("output_block_patch", ()):
                h, skipped = patch(h, skipped, transformer_options)
            h = run("output", number, block, torch.cat([h, skipped], 1))
        return self.out(h)


def _comfy(depth: int = 1, **changes: Any) -> ComfyUnet:
    """depth: blocks in each transformer."""
    model = ldm(**changes)
    model.__class__ = ComfyUnet
    for module in model.modules():
        if isinstance(module, LdmTransformer):
            module.__class__ = SpatialTransformer
            width, heads = module.proj_in.out_channels, module.transformer_blocks[0].attn1.heads
            module.transformer_blocks = nn.ModuleList(BasicTransformerBlock(width, heads, TEXT) for _ in range(depth))
    return model


unet = seeded(_comfy)
unet_of_one_level = seeded(_comfy, attention_resolutions=(1,), channel_mult=(1,))
deep_unet, deeper_unet = (seeded(_comfy, depth=depth) for depth in (2, 3))


class Body(nn.Module):
    """Text, then the picture. Each block is joint attention, then attention from the picture to the text.

    If `refines`, attentions to the text alone and to the picture alone come first, outside of a block.
    """

    pad_tokens_multiple, patch_size, refines = 1, 2, False

    def __init__(self) -> None:
        super().__init__()
        self.img_in, self.txt_in = nn.Linear(16, WIDTH), nn.Linear(TEXT, WIDTH)
        self.qkv, self.out = (nn.ModuleList(nn.Linear(WIDTH, width) for _ in range(2)) for width in (3 * WIDTH, WIDTH))
        self.final = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor, t: Any, context: torch.Tensor, transformer_options: dict) -> torch.Tensor:
        pieces = nn.functional.pixel_unshuffle(x, 2)
        picture, text = self.img_in(pieces.flatten(2).mT), context.shape[1]
        count = picture.shape[1]
        picture = nn.functional.pad(picture, (0, 0, 0, -count % self.pad_tokens_multiple))
        parts = [self.txt_in(context), picture]
        for place, part in enumerate(parts if self.refines else ()):
            parts[place] = comfy_attention.optimized_attention(part, part, part, HEADS,
                                                               transformer_options=transformer_options)  # fmt: skip
        tokens = torch.cat(parts, 1)
        for number, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            options = {**transformer_options, "block_type": "double", "block_index": number}
            q, k, v = qkv(tokens).chunk(3, -1)
            joint, across = (comfy_attention.optimized_attention(
                q, k[:, :keys], v[:, :keys], HEADS, transformer_options=options) for keys in (None, text))  # fmt: skip
            tokens = tokens + out(joint + across)
        pieces_out = self.final(tokens[:, text : text + count]).mT.unflatten(2, pieces.shape[2:])
        return nn.functional.pixel_shuffle(pieces_out, 2)
