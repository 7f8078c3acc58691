"""Run by ComfyUI's own Python in its own folder: `make_transformers.py FOLDER` writes small random transformers there.

ComfyUI reads a model's configuration off its key names and shapes: depths, and widths in whole heads, may be smaller.
"""

# ruff: noqa: I001
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import make_models  # first: it takes the arguments, and puts ComfyUI into the path

import comfy.ops
import torch
from comfy.ldm.flux.model import Flux
from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT
from comfy.ldm.wan.model import WanModel
from safetensors.torch import save_file

FLUX = {
    "image_model": "flux", "axes_dim": [16, 56, 56], "num_heads": 2, "mlp_ratio": 4.0, "theta": 10000,
    "out_channels": 16, "qkv_bias": True, "txt_ids_dims": [], "in_channels": 16, "hidden_size": 256,
    "context_in_dim": 64, "vec_in_dim": 768, "depth": 2, "depth_single_blocks": 2, "patch_size": 2,
    "guidance_embed": True,
}  # fmt: skip
SD3 = {
    "in_channels": 16, "patch_size": 2, "out_channels": 16, "depth": 4, "input_size": None, "adm_in_channels": 2048,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 256}},
    "num_patches": 36864, "pos_embed_max_size": 192, "qk_norm": "rms", "pos_embed_scaling_factor": None,
}  # fmt: skip
WAN = {
    "model_type": "t2v", "dim": 256, "out_dim": 16, "num_heads": 2, "ffn_dim": 512, "num_layers": 3, "in_dim": 16,
    "patch_size": (1, 2, 2), "freq_dim": 256, "text_dim": 4096, "qk_norm": True, "cross_attn_norm": True,
}  # fmt: skip
MODELS = {"flux": (Flux, FLUX), "sd3": (MMDiT, SD3), "wan": (WanModel, WAN)}


def weights(build, config, seed):
    """Random weights, under the names that a file of the diffusion model alone has for them."""
    model = build(**config, device="meta", dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    return make_models.random_weights(shapes, seed)


if __name__ == "__main__":
    for number, (name, (build, config)) in enumerate(MODELS.items()):
        save_file(weights(build, config, number), f"{make_models.FOLDER}/{name}.safetensors")
        print(name, flush=True)
