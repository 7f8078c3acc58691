"""`make_models.py KIND FOLDER`, run by ComfyUI's Python in its folder, writes random models. ComfyUI knows a family of
UNets by 320 channels, the text's width and SDXL's depths; a transformer's file has its configuration for `TestLoad`."""

import importlib
import json
import os
import sys

KIND, FOLDER = sys.argv[1], os.path.abspath(sys.argv[2])
sys.argv = [sys.argv[0], "--cpu"]  # ComfyUI parses what is left

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_detection  # noqa: E402
import comfy.ops  # noqa: E402
import torch  # noqa: E402
from comfy.clip_model import CLIPTextModel  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel  # noqa: E402
from comfy.taesd.taesd import TAESD  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

SD1 = {"num_heads": 8, "num_head_channels": -1, "context_dim": 768, "use_linear_in_transformer": False,
       "in_channels": 4, "num_res_blocks": [1, 1], "channel_mult": [1, 1], "transformer_depth": [1, 1],
       "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1}  # fmt: skip
SDXL = {"num_heads": -1, "num_head_channels": 64, "context_dim": 2048, "use_linear_in_transformer": True,
        "in_channels": 4, "num_classes": "sequential", "adm_in_channels": 2816, "num_res_blocks": [2, 2, 2],
        "channel_mult": [1, 1, 1], "transformer_depth": [0, 0, 2, 2, 10, 10],
        "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1], "transformer_depth_middle": 1}  # fmt: skip
TEXT = 64  # wide
FLUX = {"image_model": "flux", "axes_dim": [16, 56, 56], "num_heads": 2, "mlp_ratio": 4.0, "theta": 10000,
        "out_channels": 16, "qkv_bias": True, "txt_ids_dims": [], "in_channels": 16, "hidden_size": 256,
        "context_in_dim": TEXT, "vec_in_dim": 768, "depth": 2, "depth_single_blocks": 2, "patch_size": 2,
        "guidance_embed": True}  # fmt: skip
SD3 = {"in_channels": 16, "patch_size": 2, "out_channels": 16, "depth": 4, "input_size": None, "adm_in_channels": 2048,
       "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 256}},
       "num_patches": 36864, "pos_embed_max_size": 192, "qk_norm": "rms", "pos_embed_scaling_factor": None}  # fmt: skip
WAN = {"image_model": "wan2.1", "model_type": "t2v", "dim": 256, "out_dim": 16, "num_heads": 2, "ffn_dim": 512,
       "num_layers": 3, "in_dim": 16, "patch_size": (1, 2, 2), "freq_dim": 256, "text_dim": 4096, "qk_norm": True,
       "cross_attn_norm": True}  # fmt: skip
QWEN = {"image_model": "qwen_image", "in_channels": 64, "num_layers": 3, "num_attention_heads": 2,
        "joint_attention_dim": TEXT}  # fmt: skip
Z_IMAGE = {"image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 256, "cap_feat_dim": TEXT,
           "n_layers": 3, "n_refiner_layers": 1, "qk_norm": True, "n_heads": 4, "n_kv_heads": 4,
           "axes_dims": [16, 24, 24], "axes_lens": [300, 512, 512], "rope_theta": 10000.0, "ffn_dim_multiplier": 1.0,
           "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32}  # fmt: skip
TRANSFORMERS = {  # module and class of comfy.ldm, and its configuration
    "flux": ("flux.model.Flux", FLUX), "sd3": ("modules.diffusionmodules.mmdit.MMDiT", SD3),
    "wan": ("wan.model.WanModel", WAN), "qwen_image": ("qwen_image.model.QwenImageTransformer2DModel", QWEN),
    "z_image": ("lumina.model.NextDiT", Z_IMAGE),
}  # fmt: skip


def random_weights(model, prefix=""):
    """Draw weights with which attention matters and nothing overflows: deviation 1/sqrt(fan in), norms 1, biases 0."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for key, shape in ((key, value.shape) for key, value in model.state_dict().items() if value.dim()):
        if len(shape) > 1:
            deviation = torch.Size(shape[1:]).numel() ** -0.5
            weights[prefix + key] = (torch.randn(shape, generator=generator) * deviation).half()
        else:
            weights[prefix + key] = (torch.zeros if key.endswith("bias") else torch.ones)(shape).half()
    return weights


def unet(config):
    model = UNetModel(image_size=32, out_channels=4, model_channels=320, use_spatial_transformer=True, legacy=False,
                      device="meta", dtype=torch.float16, operations=comfy.ops.disable_weight_init,
                      **config)  # fmt: skip
    return random_weights(model, "model.diffusion_model.")


def transformer(path, config):
    module, _, name = path.rpartition(".")
    build = getattr(importlib.import_module(f"comfy.ldm.{module}"), name)
    model = build(**config, device="meta", dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    return random_weights(model)


def save(weights, place, config=None):
    path = f"{FOLDER}/{place}.safetensors"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    save_file(weights, path, config and {"config": json.dumps(config)})


def graphs():
    for name, config in (("sd1", SD1), ("sdxl", SDXL)):
        save(unet(config), f"diffusion_models/{name}")
    for name, (path, config) in TRANSFORMERS.items():
        save(transformer(path, config), f"diffusion_models/{name}", config)


def checkpoint():
    """Write the checkpoint of the example workflows, with TAESD, the smallest VAE that ComfyUI knows."""
    with open(os.path.join(os.path.dirname(comfy.ops.__file__), "sd1_clip_config.json")) as facts:
        text = CLIPTextModel(json.load(facts), torch.float16, "meta", comfy.ops.disable_weight_init)
    parts = {"cond_stage_model.transformer.": text, "first_stage_model.": TAESD()}
    weights = {key: value for prefix, model in parts.items() for key, value in random_weights(model, prefix).items()}
    save({**unet(SD1), **weights}, "checkpoints/v1-5-pruned-emaonly-fp16")


{"graphs": graphs, "checkpoint": checkpoint}[KIND]()
