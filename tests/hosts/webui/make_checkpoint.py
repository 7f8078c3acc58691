"""Small checkpoints with random weights: SD1.5's layout, narrow or at full width with two levels, and SDXL's."""

from pathlib import Path

import torch
from ldm.modules.diffusionmodules.model import Decoder, Encoder
from ldm.modules.diffusionmodules.openaimodel import UNetModel
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

UNET = {"image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "attention_resolutions": [1, 2],
        "num_res_blocks": 1, "channel_mult": [1, 1], "num_heads": 8, "use_spatial_transformer": True,
        "transformer_depth": 1, "context_dim": 768, "use_checkpoint": False, "legacy": False}  # fmt: skip
VAE = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
       "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}  # fmt: skip
# a tenth of the work; all of SD1.5's stages, because ControlNet's reference mode counts them
NARROW_UNET = UNET | {"model_channels": 64, "attention_resolutions": [1, 2, 4], "num_res_blocks": 2,
                      "channel_mult": [1, 2, 4, 4]}  # fmt: skip
NARROW_VAE = VAE | {"ch": 32}
SDXL_UNET = {"in_channels": 4, "out_channels": 4, "model_channels": 64, "attention_resolutions": [2, 4],
             "num_res_blocks": 1, "channel_mult": [1, 2, 2], "num_head_channels": 64, "use_spatial_transformer": True,
             "transformer_depth": 2, "context_dim": 768, "use_linear_in_transformer": True, "use_checkpoint": False,
             "legacy": False}  # fmt: skip
SIZE_WIDTH, TIME_WIDTH = 1536, 256  # widths of SDXL's embedding of sizes, and of the time's embedding


def make(path: Path, checkout: Path, seed: int = 1, is_narrow: bool = False) -> None:
    """Write an SD1.5, with A1111's configuration. is_narrow: not for the Forges, which know SD1.5's widths alone."""
    unet, vae = (NARROW_UNET, NARROW_VAE) if is_narrow else (UNET, VAE)
    parts = {"model.diffusion_model.": UNetModel(**unet), "cond_stage_model.transformer.": _text_encoder()}
    _save(path, parts, vae, seed)
    base = checkout / "configs" / "v1-inference.yaml"
    if base.exists():
        _configure(path, OmegaConf.load(base), unet_config=unet, first_stage_config={"ddconfig": vae})


def make_sdxl(path: Path, checkout: Path) -> None:
    """Write a narrow SDXL for A1111, with one text encoder and little depth, and its configuration."""
    sizes = nn.Sequential(nn.Linear(SIZE_WIDTH, TIME_WIDTH), nn.SiLU(), nn.Linear(TIME_WIDTH, TIME_WIDTH))
    parts = {"model.diffusion_model.": UNetModel(**{**SDXL_UNET, "context_dim": [768, 768]}, image_size=32),
             "model.diffusion_model.label_emb.0.": sizes,
             "conditioner.embedders.0.transformer.": _text_encoder()}  # fmt: skip
    _save(path, parts, NARROW_VAE)
    base = OmegaConf.load(checkout / "repositories/generative-models/configs/inference/sd_xl_base.yaml")
    del base.model.params.conditioner_config.params.emb_models[1]  # the large text encoder
    unet = {**SDXL_UNET, "adm_in_channels": SIZE_WIDTH, "spatial_transformer_attn_type": "softmax"}
    vae = {**NARROW_VAE, "attn_type": "vanilla"}
    _configure(path, base, network_config=unet, first_stage_config={"ddconfig": vae})


def _text_encoder() -> nn.Module:
    return CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                                        num_attention_heads=12, projection_dim=768, vocab_size=49408,
                                        max_position_embeddings=77))  # fmt: skip


def _configure(path: Path, config: OmegaConf, **changes: dict) -> None:
    """Write the webui's own configuration with other parameters of some of its parts."""
    for part, parameters in changes.items():
        OmegaConf.update(config, f"model.params.{part}.params", parameters)
    OmegaConf.save(config, path.with_suffix(".yaml"))


def _save(path: Path, parts: dict[str, nn.Module], vae: dict, seed: int = 1) -> None:
    """Write the parts, by the beginning of their keys, and a VAE, all with random weights."""
    stage = {"encoder.": Encoder(**vae), "decoder.": Decoder(**vae), "quant_conv.": nn.Conv2d(8, 8, 1),
             "post_quant_conv.": nn.Conv2d(4, 4, 1)}  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for prefix, module in (parts | {f"first_stage_model.{key}": part for key, part in stage.items()}).items():
        is_bare_text = prefix.endswith("transformer.")  # newer transformers leave its first name out
        for key, value in module.state_dict().items():
            name = f"text_model.{key}" if is_bare_text and not key.startswith("text_model.") else key
            weights[prefix + name] = _random(key, value, generator)
    save_file(weights, path, metadata={"format": "pt"})


def _random(key: str, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    if value.dim() > 1:
        return (torch.randn(value.shape, generator=generator) * value[0].numel() ** -0.5).half().contiguous()
    if key.endswith("final_layer_norm.bias"):  # the webui divides by the mean of the text's embedding
        return (0.1 + 0.1 * torch.randn(value.shape, generator=generator)).half()
    return (torch.zeros if key.endswith("bias") else torch.ones)(value.shape).half()
