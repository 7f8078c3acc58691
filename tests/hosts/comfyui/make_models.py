"""Run by ComfyUI's own Python in its own folder: `make_models.py FOLDER` writes small random models into FOLDER.

ComfyUI reads a model's configuration off its key names and shapes. It knows a family of UNets by 320 channels, the
width of the text and SDXL's list of depths; levels and blocks may be fewer. The file of a transformer has its
configuration as well, for the node `TestLoad`.
"""

import importlib
import json
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
    "image_model": "wan2.1", "model_type": "t2v", "dim": 256, "out_dim": 16, "num_heads": 2, "ffn_dim": 512,
    "num_layers": 3, "in_dim": 16, "patch_size": (1, 2, 2), "freq_dim": 256, "text_dim": 4096, "qk_norm": True,
    "cross_attn_norm": True,
}  # fmt: skip
TEXT = 64  # wide
FLUX2 = {
    **FLUX, "image_model": "flux2", "axes_dim": [32] * 4, "mlp_ratio": 3.0, "theta": 2000, "out_channels": 128,
    "in_channels": 128, "patch_size": 1, "global_modulation": True, "mlp_silu_act": True, "qkv_bias": False,
    "ops_bias": False, "default_ref_method": "index", "ref_index_scale": 10.0, "txt_ids_dims": [3], "vec_in_dim": None,
}  # fmt: skip
CHROMA = {key: value for key, value in FLUX.items() if key != "guidance_embed"} | {
    "image_model": "chroma", "in_channels": 64, "out_channels": 64, "in_dim": 64, "out_dim": 256, "hidden_dim": 256,
    "n_layers": 2,
}  # fmt: skip
QWEN = {
    "image_model": "qwen_image", "in_channels": 64, "num_layers": 3, "num_attention_heads": 2,
    "joint_attention_dim": TEXT,
}  # fmt: skip
HUNYUAN = {
    "image_model": "hunyuan_video", "in_channels": 16, "patch_size": [1, 2, 2], "out_channels": 16, "vec_in_dim": 768,
    "axes_dim": [16, 56, 56], "meanflow": False, "context_in_dim": TEXT, "hidden_size": 256, "mlp_ratio": 4.0,
    "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "theta": 256, "qkv_bias": True, "byt5": False,
    "guidance_embed": True, "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}  # fmt: skip
LTXV = {
    "image_model": "ltxv", "num_layers": 3, "num_attention_heads": 4, "attention_head_dim": 64,
    "cross_attention_dim": 256, "caption_channels": TEXT,
}  # fmt: skip
COSMOS = {
    "image_model": "cosmos_predict2", "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16,
    "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1, "model_channels": 256, "concat_padding_mask": True,
    "crossattn_emb_channels": TEXT, "pos_emb_cls": "rope3d", "pos_emb_learnable": True,
    "pos_emb_interpolation": "crop", "min_fps": 1, "max_fps": 30, "use_adaln_lora": True, "adaln_lora_dim": 32,
    "num_blocks": 2, "num_heads": 2, "extra_per_block_abs_pos_emb": False, "rope_enable_fps_modulation": False,
}  # fmt: skip
LUMINA = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 256, "cap_feat_dim": TEXT, "n_layers": 2,
    "n_refiner_layers": 1, "qk_norm": True, "n_heads": 4, "n_kv_heads": 2, "axes_dims": [16, 24, 24],
    "axes_lens": [300, 512, 512], "rope_theta": 10000.0, "ffn_dim_multiplier": 1.0,
}  # fmt: skip
Z_IMAGE = {**LUMINA, "n_kv_heads": 4, "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32}
KREA2 = {
    "image_model": "krea2", "features": 256, "tdim": 256, "txtdim": 16, "heads": 2, "kvheads": 1, "layers": 2,
    "patch": 2, "channels": 16, "txtlayers": 4, "txtheads": 2, "txtkvheads": 2,
}  # fmt: skip
HIDREAM = {
    "image_model": "hidream", "attention_head_dim": 128, "axes_dims_rope": [64, 32, 32],
    "caption_channels": [TEXT, TEXT], "max_resolution": [128, 128], "in_channels": 16, "llama_layers": [0, 1, 2, 2],
    "num_attention_heads": 2, "num_routed_experts": 2, "num_activated_experts": 1, "num_layers": 1,
    "num_single_layers": 2, "out_channels": 16, "patch_size": 2, "text_emb_dim": TEXT,
}  # fmt: skip
TRANSFORMERS = {  # module and class of comfy.ldm, and its configuration
    "flux": ("flux.model.Flux", FLUX), "sd3": ("modules.diffusionmodules.mmdit.MMDiT", SD3),
    "wan": ("wan.model.WanModel", WAN), "flux2": ("flux.model.Flux", FLUX2), "chroma": ("chroma.model.Chroma", CHROMA),
    "qwen_image": ("qwen_image.model.QwenImageTransformer2DModel", QWEN),
    "hunyuan_video": ("hunyuan_video.model.HunyuanVideo", HUNYUAN), "ltxv": ("lightricks.model.LTXVModel", LTXV),
    "cosmos_predict2": ("cosmos.predict2.MiniTrainDIT", COSMOS), "lumina2": ("lumina.model.NextDiT", LUMINA),
    "z_image": ("lumina.model.NextDiT", Z_IMAGE), "krea2": ("krea2.model.SingleStreamDiT", KREA2),
    "hidream": ("hidream.model.HiDreamImageTransformer2DModel", HIDREAM),
}  # fmt: skip


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


def transformer_weights(path, config, seed):
    """Random weights of a transformer, under the names that a file of it alone has for them."""
    module, _, name = path.rpartition(".")
    build = getattr(importlib.import_module(f"comfy.ldm.{module}"), name)
    model = build(**config, device="meta", dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    weights = random_weights({key: value.shape for key, value in model.state_dict().items()}, seed)
    if name == "SingleStreamDiT":  # its norms weigh by one more than they hold
        weights |= {key: torch.zeros_like(value) for key, value in weights.items() if key.endswith(".scale")}
    return weights


os.makedirs(FOLDER, exist_ok=True)
if __name__ == "__main__":
    for number, (name, config) in enumerate(MODELS.items()):
        save_file(unet_weights(config, number), f"{FOLDER}/{name}.safetensors")
    for number, (name, (path, config)) in enumerate(TRANSFORMERS.items()):
        weights = transformer_weights(path, config, number)
        save_file(weights, f"{FOLDER}/{name}.safetensors", {"config": json.dumps(config)})
