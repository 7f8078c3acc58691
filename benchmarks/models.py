"""UNets of Stable Diffusion 1.5's and XL's layouts in plain torch, with random weights and LDM's names, by which the
engine and tomesd patch them as real ones. ``block`` is SD1.5's finest transformer alone."""

import copy
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK, SD15, SDXL = NAMES = ("block", "sd15", "sdxl")
_LATENT, _TEXT_TOKENS, _PICTURE_TO_LATENT = 4, 77, 8
_RES_BLOCKS = 2  # of a level on the way down; one more on the way up


class Shape(NamedTuple):
    """The sizes of one UNet. By level, the finest first: `channels`, `depths` (blocks of each transformer; 0: the level
    has none), `heads`. `middle`: blocks of the middle's transformer; `context`: a prompt's channels; `vector`: channels
    of SDXL's vector, 0 without it; `shrink`: what a latent's sides are divided by."""

    channels: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    middle: int
    context: int
    vector: int = 0
    shrink: int = 1  # in addition to the VAE's 8, in `inputs`; above 1 for tiny networks


SHAPES = {SD15: Shape((320, 640, 1280, 1280), (1, 1, 1, 0), (8, 8, 8, 8), 1, 768),
          SDXL: Shape((320, 640, 1280), (0, 2, 10), (5, 10, 20), 10, 2048, 2816)}  # fmt: skip
BLOCK_SHAPE = Shape((320,), (1,), (8,), 0, 768)
TINY = {  # the same blocks, and sides in proportion; almost no channels; SDXL's whole blocks merge at 512 px
    SD15: SHAPES[SD15]._replace(channels=(8, 8, 16, 16), heads=(2, 2, 2, 2), context=16, shrink=8),
    SDXL: SHAPES[SDXL]._replace(channels=(8, 16, 16), heads=(1, 2, 2), context=16, vector=32, shrink=4),
}


def _norm(channels: int) -> nn.GroupNorm:
    """Make a group norm of 32 groups, or of 8 if 32 do not divide the channels."""
    return nn.GroupNorm(32 if channels % 32 == 0 else 8, channels)


def _embed(channels: int, out: int) -> nn.Sequential:
    """Make the two linear layers, with SiLU between them, that embed a time or SDXL's vector."""
    return nn.Sequential(nn.Linear(channels, out), nn.SiLU(), nn.Linear(out, out))


class ResBlock(nn.Module):
    """Two convolutions with the time added between them; at the end the input, convolved if its channels differ."""

    def __init__(self, channels: int, out: int, time_channels: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(_norm(channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(time_channels, out))
        self.out_layers = nn.Sequential(_norm(out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1))
        self.skip = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        """Map x ``[B, channels, H, W]`` to ``[B, out, H, W]``. emb: the embedded time ``[B, E]``."""
        return self.skip(x) + self.out_layers(self.in_layers(x) + self.emb_layers(emb)[:, :, None, None])


class CrossAttention(nn.Module):
    """Attention from ``[B, N, C]`` to a context ``[B, M, D]``, or to itself. The mask ``[B, 1 or N, M]`` is for all
    heads; as torch's, it is True to attend, or a number to add."""

    def __init__(self, channels: int, context_channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_k = nn.Linear(context_channels, channels, bias=False)
        self.to_v = nn.Linear(context_channels, channels, bias=False)
        self.to_out = nn.Linear(channels, channels)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Attend from x to the context, None for x itself, masked as the class says, and return ``[B, N, C]``."""
        context = x if context is None else context
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for part in (self.to_q(x), self.to_k(context), self.to_v(context)))  # fmt: skip
        mask = None if mask is None else mask[:, None]
        return self.to_out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """GEGLU with four times the channels inside."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inward = nn.Linear(channels, channels * 8)
        self.outward = nn.Linear(channels * 4, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``[B, N, C]`` to tokens of this shape."""
        value, gate = self.inward(x).chunk(2, dim=-1)
        return self.outward(value * F.gelu(gate))


class BasicTransformerBlock(nn.Module):
    """LDM's block: self-attention, cross-attention and feed-forward, each on a normed input and added to it."""

    disable_self_attn = False

    def __init__(self, channels: int, heads: int, context_channels: int) -> None:
        super().__init__()
        self.attn1 = CrossAttention(channels, channels, heads)
        self.attn2 = CrossAttention(channels, context_channels, heads)
        self.ff = FeedForward(channels)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(channels) for _ in range(3))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Map tokens ``[B, N, C]`` to tokens of this shape. context: the prompt ``[B, M, D]``; None: the tokens."""
        return self._forward(x, context=context)

    def _forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Do the work of `forward`, which only calls this; tomesd replaces this method, as it replaces LDM's."""
        x = self.attn1(self.norm1(x), context=None) + x
        x = self.attn2(self.norm2(x), context=context) + x
        return self.ff(self.norm3(x)) + x


class SpatialTransformer(nn.Module):
    """Norm, projection, transformer blocks on the tokens, projection, and the input ``[B, C, H, W]`` added."""

    def __init__(self, channels: int, heads: int, context_channels: int, depth: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.proj_in, self.proj_out = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)
        blocks = [BasicTransformerBlock(channels, heads, context_channels) for _ in range(depth)]
        self.transformer_blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Map a picture ``[B, C, H, W]`` to one of this shape. context: the prompt ``[B, M, D]``."""
        tokens = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2).contiguous()
        for block in self.transformer_blocks:
            tokens = block(tokens, context=context)
        return x + self.proj_out(tokens.transpose(1, 2).view_as(x))


class Downsample(nn.Conv2d):
    """A plain `nn.Conv2d` under LDM's name; the caller gives the stride of 2, which halves a picture's sides."""


class Upsample(nn.Conv2d):
    """An `nn.Conv2d`, of any arguments, on a picture whose sides are first doubled by nearest neighbours."""

    def forward(self, x: Tensor) -> Tensor:
        """Double the sides by nearest neighbours, and convolve."""
        return super().forward(F.interpolate(x, scale_factor=2.0))


class UNet(nn.Module):
    """LDM's UNet: a way down, a middle, and a way up that gets the outputs of the way down too, the last one first."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width = channels = shape.channels[0]
        time_channels = 4 * self.width
        self.time_embed = _embed(self.width, time_channels)
        if shape.vector:
            self.label_emb = _embed(shape.vector, time_channels)

        def stage(channels: int, level: int) -> list[nn.Module]:
            out = shape.channels[level]
            attended = [SpatialTransformer(out, shape.heads[level], shape.context, shape.depths[level])]
            return [ResBlock(channels, out, time_channels), *attended[: shape.depths[level]]]

        down, carried = [[nn.Conv2d(_LATENT, channels, 3, padding=1)]], [channels]
        levels = range(len(shape.channels))
        for level in levels:
            for _ in range(_RES_BLOCKS):
                down.append(stage(channels, level))
                channels = shape.channels[level]
                carried.append(channels)
            if level != levels[-1]:
                down.append([Downsample(channels, channels, 3, stride=2, padding=1)])
                carried.append(channels)
        middle = [ResBlock(channels, channels, time_channels),
                  SpatialTransformer(channels, shape.heads[-1], shape.context, shape.middle),
                  ResBlock(channels, channels, time_channels)]  # fmt: skip
        up = []
        for level in reversed(levels):
            for number in range(_RES_BLOCKS + 1):
                up.append(stage(channels + carried.pop(), level))
                channels = shape.channels[level]
                if level and number == _RES_BLOCKS:
                    up[-1].append(Upsample(channels, channels, 3, padding=1))
        self.input_blocks = nn.ModuleList(map(nn.ModuleList, down))
        self.middle_block = nn.ModuleList(middle)
        self.output_blocks = nn.ModuleList(map(nn.ModuleList, up))
        self.out = nn.Sequential(_norm(channels), nn.SiLU(), nn.Conv2d(channels, _LATENT, 3, padding=1))

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, y: Tensor | None = None) -> Tensor:
        """Map x ``[B, 4, H, W]``, timesteps ``[B]``, context ``[B, M, D]`` and SDXL's y ``[B, V]`` to x's shape."""
        half = self.width // 2
        scales = torch.exp(torch.arange(half, device=x.device) * (-9.2103 / half))  # down to 1 / 10,000
        angles = timesteps[:, None].float() * scales
        emb = self.time_embed(torch.cat([angles.cos(), angles.sin()], 1).to(x.dtype))
        if y is not None:
            emb = emb + self.label_emb(y)
        carried = []
        for stage in self.input_blocks:
            x = _through(stage, x, emb, context)
            carried.append(x)
        x = _through(self.middle_block, x, emb, context)
        for stage in self.output_blocks:
            x = _through(stage, torch.cat([x, carried.pop()], 1), emb, context)
        return self.out(x)


def _through(stage: Iterable[nn.Module], x: Tensor, emb: Tensor, context: Tensor) -> Tensor:
    """Call a stage's modules in turn; a `ResBlock` also gets the embedded time, a `SpatialTransformer` the prompt."""
    for module in stage:
        x = module(x, *{ResBlock: (emb,), SpatialTransformer: (context,)}.get(type(module), ()))
    return x


class Block(nn.Module):
    """A UNet of one `SpatialTransformer`, that of the shape's finest level; its pictures have that level's channels."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        transformer = SpatialTransformer(shape.channels[0], shape.heads[0], shape.context, shape.depths[0])
        self.input_blocks = nn.ModuleList([nn.ModuleList([transformer])])
        self.middle_block, self.output_blocks = nn.ModuleList(), nn.ModuleList()

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor) -> Tensor:
        """Map a picture ``[B, C, H, W]`` to one of this shape; the timesteps change nothing."""
        return self.input_blocks[0][0](x, context)


def _shape_of(name: str, tiny: bool) -> Shape:
    """Return the sizes of one of `NAMES`; the block is never tiny."""
    return BLOCK_SHAPE if name == BLOCK else (TINY if tiny else SHAPES)[name]


def make(name: str, device: str, dtype: torch.dtype, tiny: bool = False) -> nn.Module:
    """Make one of `NAMES` without gradients, its random weights the same on a device. tiny: few channels in a UNet."""
    with torch.device("meta"):  # without memory: 2.6 billion weights made on a CPU and sent over would take a minute
        model = (Block if name == BLOCK else UNet)(_shape_of(name, tiny))
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            bound = parameter.shape[1:].numel() ** -0.5
            parameter.uniform_(-bound, bound, generator=generator)
        else:
            parameter.fill_(0 if name.endswith("bias") else 1)
    return model


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model with the same weights and buffers; four variants of SDXL need the memory of one."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def inputs(name: str, pixels: int, device: str, dtype: torch.dtype, tiny: bool = False) -> tuple[Tensor, ...]:
    """Draw the arguments of a call for one picture, `pixels` a side, with its prompt and without; always the same ones.

    They are in order twice a latent (for `BLOCK`, 320 channels of its size) ``[2, C, h, w]``, timesteps 500 ``[2]``,
    float32, prompts ``[2, 77, D]``, and for SDXL zeros ``[2, V]``. tiny: as in `make`; a UNet's h and w are an eighth.
    """
    shape = _shape_of(name, tiny)
    generator = torch.Generator().manual_seed(1)
    side = pixels // _PICTURE_TO_LATENT // shape.shrink
    channels = shape.channels[0] if name == BLOCK else _LATENT
    latent = torch.randn(1, channels, side, side, generator=generator).repeat(2, 1, 1, 1)
    text = torch.randn(2, _TEXT_TOKENS, shape.context, generator=generator).to(device, dtype)
    vector = [torch.zeros(2, shape.vector, device=device, dtype=dtype)] if shape.vector else []
    return latent.to(device, dtype), torch.full((2,), 500.0, device=device), text, *vector
