"""Run by ComfyUI's own Python in its own folder: `make_checkpoints.py FOLDER` writes what the example workflows load.

Random weights: SD1.5's text encoder with a small UNet, SDXL's two text encoders with another, and the smallest VAE that
ComfyUI knows.
"""

import json
import os

from make_models import FOLDER, MODELS, random_weights, unet_weights

# isort: split
# behind the first, which lets ComfyUI be imported
import comfy
import comfy.ops
import torch
from comfy.clip_model import CLIPTextModel
from comfy.taesd.taesd import TAESD
from safetensors.torch import save_file

CLIP_L, CLIP_G = "sd1_clip_config.json", "clip_config_bigg.json"


def text_weights(config, prefix, seed):
    """Random weights of one of ComfyUI's CLIP text encoders."""
    with open(os.path.join(os.path.dirname(comfy.ops.__file__), config)) as facts:
        model = CLIPTextModel(json.load(facts), torch.float16, "meta", comfy.ops.disable_weight_init)
    weights = random_weights({key: value.shape for key, value in model.state_dict().items()}, seed)
    return {prefix + key: value for key, value in weights.items()}


def vae_weights():
    """Random weights of TAESD, which decodes a picture in an instant."""
    weights = random_weights({key: value.shape for key, value in TAESD().state_dict().items() if value.dim()}, 9)
    weights["taesd_decoder.19.weight"] *= 0.15  # what follows a ReLU is bright: most would be whiter than white
    weights["taesd_decoder.19.bias"] += 0.1
    return {f"first_stage_model.{key}": value for key, value in weights.items()}


SDXL_L, SDXL_G = "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model.transformer."
CHECKPOINTS = {
    "v1-5-pruned-emaonly-fp16": lambda: {
        **unet_weights(MODELS["sd1"], 0), **text_weights(CLIP_L, "cond_stage_model.transformer.", 5),
    },
    "sd_xl_base_1.0": lambda: {
        **unet_weights(MODELS["sdxl"], 3), **text_weights(CLIP_L, SDXL_L, 5), **text_weights(CLIP_G, SDXL_G, 6),
    },
}  # fmt: skip

for name, weights in CHECKPOINTS.items():
    save_file({**weights(), **vae_weights()}, f"{FOLDER}/{name}.safetensors")
    print(name, flush=True)
