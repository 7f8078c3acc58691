"""A narrow checkpoint with random weights in SDXL's layout, for A1111: one text encoder, and little depth."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from tests.hosts.webui.make_checkpoint import NARROW_VAE, VAE, save, text_encoder

UNET = {
    "in_channels": 4, "out_channels": 4, "model_channels": 64, "attention_resolutions": [2], "num_res_blocks": 1,
    "channel_mult": [1, 2], "num_head_channels": 64, "use_spatial_transformer": True, "transformer_depth": 2,
    "context_dim": 768, "use_linear_in_transformer": True, "use_checkpoint": False, "legacy": False,
}  # fmt: skip
SIZE_WIDTH, TIME_WIDTH = 1536, 256  # of the sizes' embedding, and of the time's to which it is added
SIZES = ("original_size_as_tuple", "crop_coords_top_left", "target_size_as_tuple")


def make(path: Path) -> None:
    """Write the checkpoint, and beside it the configuration that A1111 needs for what is not SDXL's own size."""
    from ldm.modules.diffusionmodules.openaimodel import UNetModel

    sizes = nn.Sequential(nn.Linear(SIZE_WIDTH, TIME_WIDTH), nn.SiLU(), nn.Linear(TIME_WIDTH, TIME_WIDTH))
    parts = {
        "model.diffusion_model.": UNetModel(**{**UNET, "context_dim": [768, 768]}, image_size=32),
        "model.diffusion_model.label_emb.0.": sizes,
        "conditioner.embedders.0.transformer.": text_encoder(),
    }
    save(path, parts, VAE | NARROW_VAE)
    path.with_suffix(".yaml").write_text(json.dumps(_configuration()))


def _configuration() -> dict:
    steps = "sgm.modules.diffusionmodules"
    text = {"input_key": "txt", "target": "sgm.modules.encoders.modules.FrozenCLIPEmbedder",
            "params": {"layer": "hidden", "layer_idx": 11}}  # fmt: skip
    sizes = [{"input_key": key, "target": "sgm.modules.encoders.modules.ConcatTimestepEmbedderND",
              "params": {"outdim": 256}} for key in SIZES]  # fmt: skip
    denoiser = {
        "num_idx": 1000, "weighting_config": {"target": f"{steps}.denoiser_weighting.EpsWeighting"},
        "scaling_config": {"target": f"{steps}.denoiser_scaling.EpsScaling"},
        "discretization_config": {"target": f"{steps}.discretizer.LegacyDDPMDiscretization"},
    }  # fmt: skip
    stage = {"embed_dim": 4, "monitor": "val/rec_loss", "ddconfig": {**VAE, **NARROW_VAE, "attn_type": "vanilla"},
             "lossconfig": {"target": "torch.nn.Identity"}}  # fmt: skip
    parameters = {
        "scale_factor": 0.13025, "disable_first_stage_autocast": True,
        "denoiser_config": {"target": f"{steps}.denoiser.DiscreteDenoiser", "params": denoiser},
        "network_config": {"target": f"{steps}.openaimodel.UNetModel",
                           "params": {**UNET, "spatial_transformer_attn_type": "softmax",
                                      "num_classes": "sequential", "adm_in_channels": SIZE_WIDTH}},
        "conditioner_config": {"target": "sgm.modules.GeneralConditioner",
                               "params": {"emb_models": [{"is_trainable": False, **one} for one in (text, *sizes)]}},
        "first_stage_config": {"target": "sgm.models.autoencoder.AutoencoderKLInferenceWrapper", "params": stage},
    }  # fmt: skip
    return {"model": {"target": "sgm.models.diffusion.DiffusionEngine", "params": parameters}}
