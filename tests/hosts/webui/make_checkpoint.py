"""Small checkpoints with random weights: in SD1.5's layout, narrow or as wide and with two levels, and in SDXL's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "attention_resolutions": [1, 2],
    "num_res_blocks": 1, "channel_mult": [1, 1], "num_heads": 8, "use_spatial_transformer": True,
    "transformer_depth": 1, "context_dim": 768, "use_checkpoint": False, "legacy": False,
}  # fmt: skip
VAE = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
    "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
# a tenth of the work; all of SD1.5's stages, because ControlNet's reference mode counts them
NARROW_UNET = UNET | {
    "model_channels": 64, "attention_resolutions": [1, 2, 4], "num_res_blocks": 2, "channel_mult": [1, 2, 4, 4],
}  # fmt: skip
NARROW_VAE = VAE | {"ch": 32}
SDXL_UNET = {
    "in_channels": 4, "out_channels": 4, "model_channels": 64, "attention_resolutions": [2], "num_res_blocks": 1,
    "channel_mult": [1, 2], "num_head_channels": 64, "use_spatial_transformer": True, "transformer_depth": 2,
    "context_dim": 768, "use_linear_in_transformer": True, "use_checkpoint": False, "legacy": False,
}  # fmt: skip
SIZE_WIDTH, TIME_WIDTH = 1536, 256  # of the embedding of SDXL's sizes, and of the time's to which it is added
LOSS = {"target": "torch.nn.Identity"}


def make(path: Path, seed: int = 1, is_narrow: bool = False) -> None:
    """Write an SD1.5, and beside it the configuration that A1111 needs for a layout that is not SD1.5's own.

    is_narrow: the Forges ask no configuration and know SD1.5's widths alone.
    """
    from ldm.modules.diffusionmodules.openaimodel import UNetModel

    unet, vae = (NARROW_UNET, NARROW_VAE) if is_narrow else (UNET, VAE)
    parts = {"model.diffusion_model.": UNetModel(**unet), "cond_stage_model.transformer.": _text_encoder()}
    _save(path, parts, vae, seed)
    _configure(path, "ldm.models.diffusion.ddpm.LatentDiffusion", {
        "linear_start": 0.00085, "linear_end": 0.012, "num_timesteps_cond": 1, "log_every_t": 200, "timesteps": 1000,
        "first_stage_key": "jpg", "cond_stage_key": "txt", "image_size": 64, "channels": 4,
        "cond_stage_trainable": False, "conditioning_key": "crossattn", "monitor": "val/loss_simple_ema",
        "scale_factor": 0.18215, "use_ema": False,
        "unet_config": {"target": "ldm.modules.diffusionmodules.openaimodel.UNetModel", "params": unet},
        "first_stage_config": _stage("ldm.models.autoencoder.AutoencoderKL", vae),
        "cond_stage_config": {"target": "ldm.modules.encoders.modules.FrozenCLIPEmbedder"},
    })  # fmt: skip


def make_sdxl(path: Path) -> None:
    """Write a narrow SDXL for A1111, with one text encoder and little depth, and its configuration."""
    from ldm.modules.diffusionmodules.openaimodel import UNetModel

    sizes = nn.Sequential(nn.Linear(SIZE_WIDTH, TIME_WIDTH), nn.SiLU(), nn.Linear(TIME_WIDTH, TIME_WIDTH))
    parts = {
        "model.diffusion_model.": UNetModel(**{**SDXL_UNET, "context_dim": [768, 768]}, image_size=32),
        "model.diffusion_model.label_emb.0.": sizes,
        "conditioner.embedders.0.transformer.": _text_encoder(),
    }
    _save(path, parts, NARROW_VAE)
    steps, encoders = "sgm.modules.diffusionmodules", "sgm.modules.encoders.modules"
    text = {"input_key": "txt", "target": f"{encoders}.FrozenCLIPEmbedder",
            "params": {"layer": "hidden", "layer_idx": 11}}  # fmt: skip
    numbers = [{"input_key": key, "target": f"{encoders}.ConcatTimestepEmbedderND", "params": {"outdim": 256}}
               for key in ("original_size_as_tuple", "crop_coords_top_left", "target_size_as_tuple")]  # fmt: skip
    denoiser = {
        "num_idx": 1000, "weighting_config": {"target": f"{steps}.denoiser_weighting.EpsWeighting"},
        "scaling_config": {"target": f"{steps}.denoiser_scaling.EpsScaling"},
        "discretization_config": {"target": f"{steps}.discretizer.LegacyDDPMDiscretization"},
    }  # fmt: skip
    unet = {**SDXL_UNET, "spatial_transformer_attn_type": "softmax", "num_classes": "sequential",
            "adm_in_channels": SIZE_WIDTH}  # fmt: skip
    embedders = [{"is_trainable": False, **embedder} for embedder in (text, *numbers)]
    stage = _stage("sgm.models.autoencoder.AutoencoderKLInferenceWrapper", {**NARROW_VAE, "attn_type": "vanilla"})
    _configure(path, "sgm.models.diffusion.DiffusionEngine", {
        "scale_factor": 0.13025, "disable_first_stage_autocast": True,
        "denoiser_config": {"target": f"{steps}.denoiser.DiscreteDenoiser", "params": denoiser},
        "network_config": {"target": f"{steps}.openaimodel.UNetModel", "params": unet},
        "conditioner_config": {"target": "sgm.modules.GeneralConditioner", "params": {"emb_models": embedders}},
        "first_stage_config": stage,
    })  # fmt: skip


def make_hypernetwork(path: Path) -> None:
    """Write a hypernetwork of one linear layer each for keys and values, of the image's tokens and of the text's."""
    generator = torch.Generator().manual_seed(3)
    layers = {
        width: tuple(
            {"linear.0.weight": torch.randn(width, width, generator=generator) * width**-0.5,
             "linear.0.bias": torch.zeros(width)} for _ in "kv"
        ) for width in (UNET["model_channels"], NARROW_UNET["model_channels"], UNET["context_dim"])
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {**layers, "layer_structure": [1, 1], "activation_func": "linear", "step": 1, "name": path.stem}
    torch.save(facts, path, _use_new_zipfile_serialization=False)  # A1111 1.10 refuses what newer torch puts into a zip


def _text_encoder() -> nn.Module:
    """CLIP's, as SD1.5 and SDXL have it."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768,
        vocab_size=49408, max_position_embeddings=77,
    ))  # fmt: skip


def _stage(target: str, vae: dict) -> dict:
    parameters = {"embed_dim": 4, "monitor": "val/rec_loss", "ddconfig": vae, "lossconfig": LOSS}
    return {"target": target, "params": parameters}


def _configure(path: Path, target: str, parameters: dict) -> None:
    text = json.dumps({"model": {"target": target, "params": parameters}}, indent=1)  # YAML reads JSON
    path.with_suffix(".yaml").write_text(text)


def _save(path: Path, parts: dict[str, nn.Module], vae: dict, seed: int = 1) -> None:
    """Write the parts, by the beginning of their keys, and a VAE, all with random weights."""
    from ldm.modules.diffusionmodules.model import Decoder, Encoder
    from safetensors.torch import save_file

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
