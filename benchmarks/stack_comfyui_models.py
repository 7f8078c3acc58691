"""A scene model, and a UNet of Stable Diffusion 1.5's shape with random weights, as ComfyUI's own models.

For its own Python, its checkout the working folder. The UNet of a scene model is of diffusers' making, with other heads
and norms than ComfyUI reads off a file, so those are set here.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from demo.places import PlacedConv

_SD15 = {"in_channels": 4, "out_channels": 4, "model_channels": 320, "context_dim": 768, "num_heads": 8,
         "channel_mult": [1, 2, 4, 4], "num_res_blocks": [2] * 4, "transformer_depth": [1] * 6 + [0] * 2,
         "transformer_depth_output": [1] * 9 + [0] * 3, "transformer_depth_middle": 1}  # fmt: skip
_TINY = {**_SD15, "model_channels": 32, "channel_mult": [1, 2], "num_res_blocks": [1] * 2, "num_heads": 2,
         "transformer_depth": [1] * 2, "transformer_depth_output": [1] * 4}  # fmt: skip


def scenes(path: str) -> tuple[Any, torch.Tensor]:
    """ComfyUI's patcher around a scene model of this file, and its prompt embedding ``[V, D]``."""
    with safe_open(path, "pt") as file:
        told = file.metadata()
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    unet, scheduler = json.loads(told["unet_config"]), json.loads(told["scheduler"])
    levels, blocks = len(unet["block_out_channels"]), unet["layers_per_block"]
    config = {
        "in_channels": unet["in_channels"], "out_channels": unet["out_channels"],
        "model_channels": unet["block_out_channels"][0], "context_dim": unet["cross_attention_dim"],
        "num_heads": unet["attention_head_dim"][0],  # diffusers means the number of heads by it
        "channel_mult": [width // unet["block_out_channels"][0] for width in unet["block_out_channels"]],
        "num_res_blocks": [blocks] * levels, "transformer_depth": [1] * levels * blocks,
        "transformer_depth_output": [1] * levels * (blocks + 1), "transformer_depth_middle": 1,
    }  # fmt: skip
    heads = dict(zip(unet["block_out_channels"], unet["attention_head_dim"], strict=True))
    settings = {"linear_start": scheduler["beta_start"], "linear_end": scheduler["beta_end"],
                "zsnr": scheduler["rescale_betas_zero_snr"]}  # fmt: skip
    model = _made(config, "V_PREDICTION", settings)
    for module in model.diffusion_model.modules():
        if isinstance(module, nn.GroupNorm):
            module.num_groups = unet["norm_num_groups"]
        elif type(module).__name__ == "CrossAttention":
            module.heads = heads[module.to_q.weight.shape[1]]
    names = importlib.import_module("comfy.utils").unet_to_diffusers(config)
    if unet.get("places"):
        first = model.diffusion_model.input_blocks[0]
        first[0] = PlacedConv(first[0]).requires_grad_(False)
        names["conv_in.place.weight"] = "input_blocks.0.0.place.weight"
    found = {names[name.removeprefix("unet.")]: one for name, one in weights.items() if name.startswith("unet.")}
    model.diffusion_model.load_state_dict(found)
    return _patcher(model), weights["emb.weight"]


def random(tiny: bool) -> Any:
    """ComfyUI's patcher around a UNet of Stable Diffusion 1.5's shape, or around a tiny one: for tests."""
    model = _made(_TINY if tiny else _SD15, "EPS", {})
    dice = torch.Generator().manual_seed(0)
    for name, weight in model.diffusion_model.named_parameters():
        if weight.dim() > 1:  # attention stays alive and nothing overflows
            weight.data.normal_(0, weight[0].numel() ** -0.5, generator=dice)
        else:
            weight.data.fill_(float(name.endswith("weight")))
    return _patcher(model)


def _made(config: dict[str, Any], prediction: str, settings: dict[str, Any]) -> nn.Module:
    base, known = importlib.import_module("comfy.model_base"), importlib.import_module("comfy.supported_models")
    heads = {"num_head_channels": -1, "use_spatial_transformer": True, "legacy": False, "image_size": 32}
    found = known.SD15({**config, **heads, "use_linear_in_transformer": False, "dtype": torch.float32})
    found.unet_config["num_heads"] = config["num_heads"]
    found.sampling_settings.update(settings)
    found.latent_format.latent_channels, found.latent_format.scale_factor = config["in_channels"], 1.0
    return base.BaseModel(found, model_type=base.ModelType[prediction]).eval().requires_grad_(False)


def _patcher(model: nn.Module) -> Any:
    cpu = torch.device("cpu")
    return importlib.import_module("comfy.model_patcher").ModelPatcher(model, load_device=cpu, offload_device=cpu)
