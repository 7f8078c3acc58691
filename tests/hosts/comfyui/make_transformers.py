"""Run by ComfyUI's own Python in its own folder: `make_transformers.py FOLDER` writes small random transformers there.

ComfyUI reads a model's configuration off its key names and shapes: depths, and widths in whole heads, may be smaller.
What it takes for granted of `OTHERS` is in the file too, as `config`.
"""

# ruff: noqa: I001
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import make_models  # first: it takes the arguments, and puts ComfyUI into the path

import comfy.ops
import torch
from comfy.ldm.chroma.model import Chroma
from comfy.ldm.cosmos.predict2 import MiniTrainDIT
from comfy.ldm.flux.model import Flux
from comfy.ldm.hidream.model import HiDreamImageTransformer2DModel
from comfy.ldm.hunyuan_video.model import HunyuanVideo
from comfy.ldm.krea2.model import SingleStreamDiT
from comfy.ldm.lightricks.model import LTXVModel
from comfy.ldm.lumina.model import NextDiT
from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
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
OTHERS = {
    "flux2": (Flux, FLUX2), "chroma": (Chroma, CHROMA), "qwen_image": (QwenImageTransformer2DModel, QWEN),
    "hunyuan_video": (HunyuanVideo, HUNYUAN), "ltxv": (LTXVModel, LTXV), "cosmos_predict2": (MiniTrainDIT, COSMOS),
    "lumina2": (NextDiT, LUMINA), "z_image": (NextDiT, Z_IMAGE), "krea2": (SingleStreamDiT, KREA2),
    "hidream": (HiDreamImageTransformer2DModel, HIDREAM),
}  # fmt: skip


def weights(build, config, seed):
    """Random weights, under the names that a file of the diffusion model alone has for them."""
    model = build(**config, device="meta", dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    found = make_models.random_weights(shapes, seed)
    if build is SingleStreamDiT:  # its norms weigh by one more than they hold
        found |= {key: torch.zeros_like(value) for key, value in found.items() if key.endswith(".scale")}
    return found


if __name__ == "__main__":
    for number, (name, (build, config)) in enumerate((MODELS | OTHERS).items()):
        told = {"config": json.dumps(config)} if name in OTHERS else None
        save_file(weights(build, config, number), f"{make_models.FOLDER}/{name}.safetensors", told)
        print(name, flush=True)
