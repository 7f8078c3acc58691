"""A small checkpoint with random weights in SD1.5's layout: two levels, real CLIP and VAE widths."""

from __future__ import annotations

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


def make(path: Path) -> None:
    """Write the checkpoint, and beside it the configuration that A1111 needs for what is not SD1.5's own size."""
    from ldm.modules.diffusionmodules.model import Decoder, Encoder
    from ldm.modules.diffusionmodules.openaimodel import UNetModel
    from safetensors.torch import save_file
    from transformers import CLIPTextConfig, CLIPTextModel

    text = CLIPTextModel(CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768,
        vocab_size=49408, max_position_embeddings=77,
    ))  # fmt: skip
    parts = {
        "model.diffusion_model.": UNetModel(**UNET),
        "first_stage_model.encoder.": Encoder(**VAE),
        "first_stage_model.decoder.": Decoder(**VAE),
        "first_stage_model.quant_conv.": nn.Conv2d(8, 8, 1),
        "first_stage_model.post_quant_conv.": nn.Conv2d(4, 4, 1),
        "cond_stage_model.transformer.": text,
    }
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for prefix, module in parts.items():
        for key, value in module.state_dict().items():
            name = key if key.startswith("text_model.") or "cond_stage" not in prefix else f"text_model.{key}"
            weights[prefix + name] = _random(key, value, generator)
    save_file(weights, path, metadata={"format": "pt"})
    path.with_suffix(".yaml").write_text(_configuration())


def _random(key: str, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    if value.dim() > 1:
        return (torch.randn(value.shape, generator=generator) * value[0].numel() ** -0.5).half().contiguous()
    if key.endswith("final_layer_norm.bias"):  # the webui divides by the mean of the text's embedding
        return (0.1 + 0.1 * torch.randn(value.shape, generator=generator)).half()
    return (torch.zeros if key.endswith("bias") else torch.ones)(value.shape).half()


def _configuration() -> str:
    import json

    stage = {"embed_dim": 4, "monitor": "val/rec_loss", "ddconfig": VAE, "lossconfig": {"target": "torch.nn.Identity"}}
    parameters = {
        "linear_start": 0.00085, "linear_end": 0.012, "num_timesteps_cond": 1, "log_every_t": 200, "timesteps": 1000,
        "first_stage_key": "jpg", "cond_stage_key": "txt", "image_size": 64, "channels": 4,
        "cond_stage_trainable": False, "conditioning_key": "crossattn", "monitor": "val/loss_simple_ema",
        "scale_factor": 0.18215, "use_ema": False,
        "unet_config": {"target": "ldm.modules.diffusionmodules.openaimodel.UNetModel", "params": UNET},
        "first_stage_config": {"target": "ldm.models.autoencoder.AutoencoderKL", "params": stage},
        "cond_stage_config": {"target": "ldm.modules.encoders.modules.FrozenCLIPEmbedder"},
    }  # fmt: skip
    target = "ldm.models.diffusion.ddpm.LatentDiffusion"
    return json.dumps({"model": {"target": target, "params": parameters}}, indent=1)  # YAML reads JSON
