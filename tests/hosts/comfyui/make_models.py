"""Run by ComfyUI's own Python in its own folder: `make_models.py FOLDER` writes small random UNets into FOLDER.

ComfyUI reads a UNet's configuration off its key names and shapes. 320 channels, the width of the text and SDXL's
list of depths are what it knows a family by; levels and blocks may be fewer.
"""

import os
import sys

FOLDER = os.path.abspath(sys.argv[1])
sys.argv = [sys.argv[0], "--cpu"]  # ComfyUI parses what is left
sys.path.insert(0, os.getcwd())

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_detection  # noqa: E402
import comfy.ops  # noqa: E402
import torch  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

TWO_LEVELS = {
    "num_res_blocks": [1, 1], "channel_mult": [1, 1], "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1,
}  # fmt: skip
SD1 = {"num_heads": 8, "num_head_channels": -1, "context_dim": 768, "use_linear_in_transformer": False}
SD2 = {"num_heads": -1, "num_head_channels": 64, "context_dim": 1024, "use_linear_in_transformer": True}
SDXL = {
    "num_heads": -1, "num_head_channels": 64, "context_dim": 2048, "use_linear_in_transformer": True,
    "num_classes": "sequential", "adm_in_channels": 2816, "num_res_blocks": [2, 2, 2], "channel_mult": [1, 1, 1],
    "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
    "transformer_depth_middle": 1,
}  # fmt: skip
MODELS = {
    "sd1": {**SD1, **TWO_LEVELS, "in_channels": 4},
    "sd1_inpainting": {**SD1, **TWO_LEVELS, "in_channels": 9},
    "sd2": {**SD2, **TWO_LEVELS, "in_channels": 4},
    "sdxl": {**SDXL, "in_channels": 4},
    "sd1_growing": {**SD1, **TWO_LEVELS, "in_channels": 4, "channel_mult": [1, 2]},  # FreeU looks for twice the width
}


def random_weights(shapes, seed):
    """Attention stays alive and nothing overflows: deviation 1/sqrt(fan in), norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for key, shape in shapes.items():
        if len(shape) > 1:
            deviation = shape[1:].numel() ** -0.5
            weights[key] = (torch.randn(shape, generator=generator) * deviation).half()
        else:
            weights[key] = (torch.zeros if key.endswith("bias") else torch.ones)(shape).half()
    return weights


def unet_weights(config, seed):
    """Random weights of a UNet, under the names that a checkpoint has for them."""
    unet = UNetModel(
        image_size=32, out_channels=4, model_channels=320, use_spatial_transformer=True, legacy=False,
        device="meta", dtype=torch.float16, operations=comfy.ops.disable_weight_init, **config,
    )  # fmt: skip
    weights = random_weights({key: value.shape for key, value in unet.state_dict().items()}, seed)
    return {f"model.diffusion_model.{key}": value for key, value in weights.items()}


os.makedirs(FOLDER, exist_ok=True)
if __name__ == "__main__":
    for number, (name, config) in enumerate(MODELS.items()):
        save_file(unet_weights(config, number), f"{FOLDER}/{name}.safetensors")
        print(name, flush=True)
