"""Run by ComfyUI's own Python in its own folder: `make_motion.py FOLDER` writes what AnimateDiff animates SD1.5 with.

Random weights: a UNet with all of SD1.5's widths, which a motion module has to fit, but with attention at its finest
level only; and a motion module for the way down. A gigabyte, so it is made only where the pack is there.
"""

import os

from make_models import FOLDER, SD1, random_weights, unet_weights

# isort: split
# behind the first, which lets ComfyUI be imported
import torch
from safetensors.torch import save_file

WIDTHS = (320, 640, 1280, 1280)
FRAMES = 32
UNET = {
    **SD1, "in_channels": 4, "num_res_blocks": [2, 2, 2, 2], "channel_mult": [1, 2, 4, 4],
    "transformer_depth": [1, 1, 0, 0, 0, 0, 0, 0], "transformer_depth_output": [1, 1, 1, *[0] * 9],
    "transformer_depth_middle": -1,
}  # fmt: skip


def module(width):
    """Shapes of one of AnimateDiff's temporal transformers."""
    shapes = {f"{name}.weight": (width, width) for name in ("proj_in", "proj_out")}
    shapes |= {f"{name}.bias": (width,) for name in ("proj_in", "proj_out")}
    norms = ["norm", *(f"transformer_blocks.0.{name}" for name in ("norms.0", "norms.1", "ff_norm"))]
    shapes |= {f"{norm}.{part}": (width,) for norm in norms for part in ("weight", "bias")}
    for number in range(2):
        attention = f"transformer_blocks.0.attention_blocks.{number}"
        shapes |= {f"{attention}.{name}.weight": (width, width) for name in ("to_q", "to_k", "to_v", "to_out.0")}
        shapes |= {f"{attention}.to_out.0.bias": (width,), f"{attention}.pos_encoder.pe": (1, FRAMES, width)}
    for name, out, into in (("net.0.proj", 8 * width, width), ("net.2", width, 4 * width)):
        linear = f"transformer_blocks.0.ff.{name}"
        shapes |= {f"{linear}.weight": (out, into), f"{linear}.bias": (out,)}
    return shapes


MOTION = {
    f"down_blocks.{block}.motion_modules.{number}.temporal_transformer.{key}": shape
    for block, width in enumerate(WIDTHS) for number in range(2) for key, shape in module(width).items()
}  # fmt: skip

for place in ("diffusion_models", "animatediff_models"):
    os.makedirs(f"{FOLDER}/{place}", exist_ok=True)
save_file(unet_weights(UNET, 8), f"{FOLDER}/diffusion_models/sd1_wide.safetensors")
save_file(random_weights({key: torch.Size(shape) for key, shape in MOTION.items()}, 9),
          f"{FOLDER}/animatediff_models/motion.safetensors")  # fmt: skip
