"""Small models of every family that the patch supports, of their real classes and without zeros, and a call of each."""

import contextlib
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from diffusers import UNet2DConditionModel, UNetMotionModel
from ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import nn

from tests.host_doubles.blocks import SgmBlock
from tome_core import MergeConfig, MergePlan, preset
from tome_core.engine import fewer_tokens
from tome_core.engine.merged_tokens import MergedTokens
from tome_core.merging.methods import METHODS

TEXT = 32


class Family(NamedTuple):
    """A family of UNets. forward: ``(model, x, timestep, text)`` to picture; frames: pictures of one sample."""

    name: str
    build: Callable[[], Any]
    forward: Callable[[Any, torch.Tensor, Any, torch.Tensor], torch.Tensor]
    frames: int = 1

    def call(self, model: Any, batch: int = 2, height: int = 16, width: int = 16, timestep: Any = 500) -> torch.Tensor:
        """The model's picture for inputs that depend on the arguments only; no gradients, global RNG untouched."""
        x, text = inputs(4, batch, height, width, frames=self.frames)
        with torch.no_grad():
            return self.forward(model, x, timestep, text)


def inputs(channels: int, batch: int, height: int, width: int, seed: int = 0, frames: int = 1):
    """A latent and a text, the first samples of which do not depend on the batch."""
    latents, texts = [], []
    for sample in range(batch):
        generator = torch.Generator().manual_seed(1000 * seed + sample)
        shape = (channels, height, width) if frames == 1 else (channels, frames, height, width)
        latents.append(torch.randn(shape, generator=generator))
        texts.append(torch.randn(7, TEXT, generator=generator))
    return torch.stack(latents), torch.stack(texts)


def fixed(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give the model weights from its own generator, none of them zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.shape[1:].numel() ** -0.5 if parameter.dim() > 1 else 0.1
            noise = torch.randn(parameter.shape, generator=generator) * spread
            is_gain = parameter.dim() == 1 and bool((parameter == 1).all())
            parameter.copy_(noise + 1 if is_gain else noise)
    return model.eval()


def seeded(build: Callable[..., nn.Module], **settings: Any) -> Callable[[], nn.Module]:
    """The builder with these settings; the global RNG stays as it was, and its prints are dropped."""

    def builder() -> nn.Module:
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
            return fixed(build(**settings))

    return builder


def note_tokens(module: nn.Module, counts: list[int]) -> Any:
    """Put a hook on a module that appends the number of tokens of each call, and that counts as a hook of torch's own:
    a hook of others keeps a block from running on merged tokens. Returns the hook's handle."""

    def note(_: nn.Module, args: tuple) -> None:
        counts.append(args[0].shape[1])

    note.__module__ = "torch.nn.utils"
    return module.register_forward_pre_hook(note)


def merge_with_self(monkeypatch: Any) -> None:
    """Let bipartite matching give every token its own group: all sites run, and change nothing.

    Whole blocks do without samples, which are additional keys.
    """

    def match(x: torch.Tensor, grid: Any, options: Any) -> MergePlan:
        tokens = grid.height * grid.width
        return MergePlan(torch.arange(tokens, device=x.device)[None], tokens)

    def pool(layout: Any, tokens: int, *more: Any) -> MergePlan:
        return MergePlan(torch.arange(tokens)[None], tokens)

    of = MergedTokens.of
    monkeypatch.setattr(fewer_tokens, "pool", pool)
    monkeypatch.setitem(METHODS, "bipartite", METHODS["bipartite"]._replace(match=match))
    monkeypatch.setattr(MergedTokens, "of", lambda x, plan, samples, note: of(x, plan, None))


_DOWN, _UP = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")


def unet(**changes: Any) -> UNet2DConditionModel:
    """A UNet2DConditionModel in SD1.5's shape: attention on the latent's level and in the middle."""
    settings = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1,
                "block_out_channels": (32, 64), "norm_num_groups": 8, "down_block_types": _DOWN, "up_block_types": _UP,
                "cross_attention_dim": TEXT, "attention_head_dim": 4}  # fmt: skip
    return UNet2DConditionModel(**{**settings, **changes})


def on_small(name: str) -> MergeConfig:
    """The preset, also for a picture so small that it would be left alone."""
    return replace(preset(name), only_if_it_pays=False)


# attention starts at half the latent's size, the deepest transformers have two blocks
SDXL = {"block_out_channels": (16, 32, 32),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": (2, 4, 4),
        "use_linear_projection": True, "transformer_layers_per_block": (1, 1, 2), "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64}  # fmt: skip

sd15 = seeded(unet)
small = seeded(unet, attention_head_dim=1)  # one head in each attention
four_levels = seeded(unet, block_out_channels=(16, 16, 32, 32),  # attention at /1, /2, /4 and /8, as SD1.5 has it
                     down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
                     up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3)  # fmt: skip
sd2 = seeded(unet, use_linear_projection=True, attention_head_dim=(2, 4))
sdxl = seeded(unet, **SDXL)
gligen = seeded(unet, attention_type="gated")


def with_ip_adapter(model: UNet2DConditionModel) -> UNet2DConditionModel:
    """The attention processors as diffusers' own loader sets them."""
    weights: dict[str, torch.Tensor] = {}
    for number, name in enumerate(name for name in model.attn_processors if name.endswith("attn2.processor")):
        width = model.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for part in ("to_k_ip", "to_v_ip"):
            weights[f"{2 * number + 1}.{part}.weight"] = torch.zeros(width, TEXT)
    image = {"proj.weight": torch.zeros(4 * TEXT, 16), "proj.bias": torch.zeros(4 * TEXT),
             "norm.weight": torch.ones(TEXT), "norm.bias": torch.zeros(TEXT)}  # fmt: skip
    model._load_ip_adapter_weights([{"image_proj": image, "ip_adapter": weights}])
    return model


ip_adapter = seeded(lambda: with_ip_adapter(unet()))


motion = seeded(
    UNetMotionModel, sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
    norm_num_groups=8, down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
    up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"), cross_attention_dim=TEXT, num_attention_heads=4,
    motion_num_attention_heads=4,
)  # fmt: skip


def call_unet(model: Any, x: torch.Tensor, timestep: Any, text: torch.Tensor, **more: Any) -> torch.Tensor:
    return model(x, timestep, text, **more).sample


def _call_motion(model, x, timestep, text):
    return call_unet(model, x, timestep, text.repeat_interleave(x.shape[2], 0))


def _call_sdxl(model, x, timestep, text):
    batch = x.shape[0]
    added = {"text_embeds": text[:, 0, :16], "time_ids": torch.arange(6.0).expand(batch, -1)}
    return call_unet(model, x, timestep, text, added_cond_kwargs=added)


def _call_with_image(model, x, timestep, text, **more):
    added = {"image_embeds": [text[:, :1, :16]]}
    return call_unet(model, x, timestep, text, added_cond_kwargs=added, **more)


def _call_with_masked_image(model, x, timestep, text):
    mask = torch.zeros(1, 1, x.shape[2], x.shape[3])
    mask[..., : x.shape[3] // 2] = 1
    return _call_with_image(model, x, timestep, text, cross_attention_kwargs={"ip_adapter_masks": [mask]})


def _call_gligen(model, x, timestep, text):
    boxes = torch.tensor([[0.1, 0.1, 0.6, 0.6], [0.4, 0.4, 0.9, 0.9]]).expand(x.shape[0], -1, -1)
    grounding = {"boxes": boxes, "positive_embeddings": text[:, :2], "masks": torch.ones(x.shape[0], 2)}
    return call_unet(model, x, timestep, text, cross_attention_kwargs={"gligen": grounding})


def ldm(**changes: Any) -> UNetModel:
    """An LDM UNet in SD1's shape: attention on the latent's level, on the next, and in the middle."""
    settings = {"image_size": 16, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": 1,
                "attention_resolutions": (1, 2), "channel_mult": (1, 2), "num_heads": 4,
                "use_spatial_transformer": True, "context_dim": TEXT, "legacy": False}  # fmt: skip
    return UNetModel(**{**settings, **changes})


def host_double(make_block: Callable[[int], nn.Module] | None = None, **changes: Any) -> nn.Module:
    """An LDM UNet inside a host's model. make_block: makes a replacement of a block, by its width."""
    whole = nn.Module()
    whole.model = nn.Module()
    whole.model.diffusion_model = ldm(**changes)
    transformers = [module for module in whole.modules() if hasattr(module, "transformer_blocks")]
    for transformer in transformers if make_block else ():
        width = transformer.transformer_blocks[0].norm1.normalized_shape[0]
        transformer.transformer_blocks = nn.ModuleList([make_block(width)])
    return whole


ldm_sd1 = seeded(ldm)
ldm_sd2 = seeded(ldm, num_heads=-1, num_head_channels=16, use_linear_in_transformer=True)
ldm_wrapped = seeded(host_double)
# the smallest host's double: half the time of `ldm_wrapped`
ldm_of_one_level = seeded(host_double, attention_resolutions=(1,), channel_mult=(1,), num_heads=2)
# the smallest with SDXL's layout: no attention on the latent's own level
ldm_sdxl = seeded(host_double, attention_resolutions=(2,), num_heads=2)
sgm_double = seeded(host_double, make_block=lambda width: SgmBlock(width, 4, TEXT))


def call_ldm(model, x, timestep, text):
    model = getattr(getattr(model, "model", model), "diffusion_model", model)
    return model(x, torch.as_tensor(timestep).expand(x.shape[0]), text)


CASES = (Family("ldm_sd1", ldm_sd1, call_ldm), Family("ldm_sd2", ldm_sd2, call_ldm),
         Family("ldm_wrapped", ldm_wrapped, call_ldm), Family("sgm_double", sgm_double, call_ldm),
         Family("sd15", sd15, call_unet), Family("sd2", sd2, call_unet), Family("sdxl", sdxl, _call_sdxl),
         Family("ip_adapter", ip_adapter, _call_with_image),
         Family("ip_adapter_masks", ip_adapter, _call_with_masked_image), Family("gligen", gligen, _call_gligen),
         Family("motion", motion, _call_motion, frames=2))  # fmt: skip
