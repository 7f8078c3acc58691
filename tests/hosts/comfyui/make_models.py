"""Run by ComfyUI's own Python in its own folder: `make_models.py KIND FOLDER` writes random models into FOLDER.

ComfyUI reads a model's configuration off its key names and shapes. It knows a family of UNets by 320 channels, the
width of the text and SDXL's list of depths; levels and blocks may be fewer. The file of a transformer has its
configuration as well, for the node `TestLoad`.
"""

import importlib
import json
import os
import sys

KIND, FOLDER = sys.argv[1], os.path.abspath(sys.argv[2])
sys.argv = [sys.argv[0], "--cpu"]  # ComfyUI parses what is left
sys.path.insert(0, os.getcwd())

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_detection  # noqa: E402
import comfy.ops  # noqa: E402
import torch  # noqa: E402
from comfy.clip_model import CLIPTextModel  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel  # noqa: E402
from comfy.taesd.taesd import TAESD  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

SD1 = {
    "num_heads": 8, "num_head_channels": -1, "context_dim": 768, "use_linear_in_transformer": False, "in_channels": 4,
    "num_res_blocks": [1, 1], "channel_mult": [1, 1], "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1,
}  # fmt: skip
# all of SD1.5's widths, which a motion module has to fit, but attention at the finest level only
WIDTHS = (320, 640, 1280, 1280)
SD1_WIDE = {
    **SD1, "num_res_blocks": [2, 2, 2, 2], "channel_mult": [1, 2, 4, 4], "transformer_depth": [1, 1, 0, 0, 0, 0, 0, 0],
    "transformer_depth_output": [1, 1, 1, *[0] * 9], "transformer_depth_middle": -1,
}  # fmt: skip
SDXL = {
    "num_heads": -1, "num_head_channels": 64, "context_dim": 2048, "use_linear_in_transformer": True, "in_channels": 4,
    "num_classes": "sequential", "adm_in_channels": 2816, "num_res_blocks": [2, 2, 2], "channel_mult": [1, 1, 1],
    "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
    "transformer_depth_middle": 1,
}  # fmt: skip
TEXT = 64  # wide
FLUX = {
    "image_model": "flux", "axes_dim": [16, 56, 56], "num_heads": 2, "mlp_ratio": 4.0, "theta": 10000,
    "out_channels": 16, "qkv_bias": True, "txt_ids_dims": [], "in_channels": 16, "hidden_size": 256,
    "context_in_dim": TEXT, "vec_in_dim": 768, "depth": 2, "depth_single_blocks": 2, "patch_size": 2,
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
QWEN = {
    "image_model": "qwen_image", "in_channels": 64, "num_layers": 3, "num_attention_heads": 2,
    "joint_attention_dim": TEXT,
}  # fmt: skip
HUNYUAN = {
    **FLUX, "image_model": "hunyuan_video", "patch_size": [1, 2, 2], "theta": 256, "meanflow": False, "byt5": False,
    "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}  # fmt: skip
del HUNYUAN["txt_ids_dims"]
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
Z_IMAGE = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 256, "cap_feat_dim": TEXT, "n_layers": 2,
    "n_refiner_layers": 1, "qk_norm": True, "n_heads": 4, "n_kv_heads": 4, "axes_dims": [16, 24, 24],
    "axes_lens": [300, 512, 512], "rope_theta": 10000.0, "ffn_dim_multiplier": 1.0, "z_image_modulation": True,
    "time_scale": 1000.0, "pad_tokens_multiple": 32,
}  # fmt: skip
KREA2 = {
    "image_model": "krea2", "features": 256, "tdim": 256, "txtdim": 16, "heads": 2, "kvheads": 1, "layers": 2,
    "patch": 2, "channels": 16, "txtlayers": 4, "txtheads": 2, "txtkvheads": 2,
}  # fmt: skip
TRANSFORMERS = {  # module and class of comfy.ldm, and its configuration
    "flux": ("flux.model.Flux", FLUX), "sd3": ("modules.diffusionmodules.mmdit.MMDiT", SD3),
    "wan": ("wan.model.WanModel", WAN), "qwen_image": ("qwen_image.model.QwenImageTransformer2DModel", QWEN),
    "hunyuan_video": ("hunyuan_video.model.HunyuanVideo", HUNYUAN), "ltxv": ("lightricks.model.LTXVModel", LTXV),
    "cosmos_predict2": ("cosmos.predict2.MiniTrainDIT", COSMOS), "z_image": ("lumina.model.NextDiT", Z_IMAGE),
    "krea2": ("krea2.model.SingleStreamDiT", KREA2),
}  # fmt: skip


def random_weights(shapes, prefix="", seed=0):
    """Attention stays alive and nothing overflows: deviation 1/sqrt(fan in), norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for key, shape in shapes.items():
        if len(shape) > 1:
            deviation = torch.Size(shape[1:]).numel() ** -0.5
            weights[prefix + key] = (torch.randn(shape, generator=generator) * deviation).half()
        else:
            weights[prefix + key] = (torch.zeros if key.endswith("bias") else torch.ones)(shape).half()
    return weights


def shapes_of(model):
    return {key: value.shape for key, value in model.state_dict().items() if value.dim()}


def unet(config):
    model = UNetModel(
        image_size=32, out_channels=4, model_channels=320, use_spatial_transformer=True, legacy=False,
        device="meta", dtype=torch.float16, operations=comfy.ops.disable_weight_init, **config,
    )  # fmt: skip
    return random_weights(shapes_of(model), "model.diffusion_model.")


def transformer(path, config):
    module, _, name = path.rpartition(".")
    build = getattr(importlib.import_module(f"comfy.ldm.{module}"), name)
    model = build(**config, device="meta", dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    weights = random_weights(shapes_of(model))
    if name == "SingleStreamDiT":  # its norms weigh by one more than they hold
        weights |= {key: torch.zeros_like(value) for key, value in weights.items() if key.endswith(".scale")}
    return weights


def text_encoder():
    with open(os.path.join(os.path.dirname(comfy.ops.__file__), "sd1_clip_config.json")) as facts:
        model = CLIPTextModel(json.load(facts), torch.float16, "meta", comfy.ops.disable_weight_init)
    return random_weights(shapes_of(model), "cond_stage_model.transformer.")


def vae():
    """TAESD, the smallest that ComfyUI knows."""
    return random_weights(shapes_of(TAESD()), "first_stage_model.")


def motion_module(width):
    """Shapes of one of AnimateDiff's temporal transformers, for 32 frames."""
    block, square = "transformer_blocks.0", (width, width)
    attentions = [f"{block}.attention_blocks.{number}" for number in range(2)]
    weights = {f"{name}.{part}": square for name in attentions for part in ("to_q", "to_k", "to_v")}
    with_bias = {
        "proj_in": square, "proj_out": square, **{f"{name}.to_out.0": square for name in attentions},
        f"{block}.ff.net.0.proj": (8 * width, width), f"{block}.ff.net.2": (width, 4 * width),
        **dict.fromkeys(["norm", *(f"{block}.{name}" for name in ("norms.0", "norms.1", "ff_norm"))], (width,)),
    }  # fmt: skip
    return {
        **{f"{name}.weight": shape for name, shape in (weights | with_bias).items()},
        **{f"{name}.bias": (shape[0],) for name, shape in with_bias.items()},
        **{f"{name}.pos_encoder.pe": (1, 32, width) for name in attentions},
    }  # fmt: skip


def save(weights, place, config=None):
    path = f"{FOLDER}/{place}.safetensors"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    save_file(weights, path, config and {"config": json.dumps(config)})


def graphs():
    """What the graphs of the tests load."""
    for name, config in (("sd1", SD1), ("sdxl", SDXL)):
        save(unet(config), f"diffusion_models/{name}")
    for name, (path, config) in TRANSFORMERS.items():
        save(transformer(path, config), f"diffusion_models/{name}", config)


def checkpoint():
    """What the example workflows load."""
    save({**unet(SD1), **text_encoder(), **vae()}, "checkpoints/v1-5-pruned-emaonly-fp16")


def motion():
    """What AnimateDiff animates SD1.5 with, a gigabyte."""
    save(unet(SD1_WIDE), "diffusion_models/sd1_wide")
    shapes = {f"down_blocks.{block}.motion_modules.{number}.temporal_transformer.{key}": shape
              for block, width in enumerate(WIDTHS) for number in range(2)
              for key, shape in motion_module(width).items()}  # fmt: skip
    save(random_weights(shapes), "animatediff_models/motion")


{"graphs": graphs, "checkpoint": checkpoint, "motion": motion}[KIND]()
