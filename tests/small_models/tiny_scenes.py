"""Small scene models with random weights, for tests of everything but quality itself."""

import torch

from demo import model

SIDE = 16  # tokens a side at the finest level
UNET = {**model.UNET, "sample_size": SIDE, "block_out_channels": [32, 32], "attention_head_dim": [2, 2],
        "down_block_types": ["CrossAttnDownBlock2D"] * 2, "up_block_types": ["CrossAttnUpBlock2D"] * 2}  # fmt: skip
FLUX = {**model.LAYOUTS["flux"], "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2}
UNET_XL = {**model.UNET_XL, "sample_size": SIDE}  # SDXL's layout in full, at a small size


def make(unet: dict = UNET) -> model.SceneModel:
    """Make a model with the same weights each time; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model.make(unet).eval()
