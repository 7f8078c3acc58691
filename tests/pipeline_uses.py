"""What people do with a pipeline beside drawing from words: each use gives the pipeline and what its call needs."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from tests.models import TEXT, fixed
from tests.pipelines import IMAGE_TIMES, an_image


def _controlnet(pipe: Any, load: Any) -> tuple[Any, dict[str, Any]]:
    net = fixed(diffusers.ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(8, 8)))
    made = diffusers.StableDiffusionControlNetPipeline.from_pipe(pipe, controlnet=net)
    return made, {"image": an_image(pipe), "controlnet_conditioning_scale": 0.7}


def _guessing_controlnet(pipe: Any, load: Any) -> tuple[Any, dict[str, Any]]:
    made, call = _controlnet(pipe, load)
    return made, {**call, "guess_mode": True}


def _inpainting(pipe: Any, load: Any) -> tuple[Any, dict[str, Any]]:
    made, image = diffusers.AutoPipelineForInpainting.from_pipe(pipe), an_image(pipe)
    mask = torch.zeros_like(image[:, :1])
    mask[..., : mask.shape[-1] // 2] = 1
    return made, {"image": image, "mask_image": mask, "strength": 0.8, "timesteps": IMAGE_TIMES}


def _image_prompt(pipe: Any, load: Any) -> tuple[Any, dict[str, Any]]:
    """IP-Adapter, its weights under the names that its loader knows."""
    dice, weights = torch.Generator().manual_seed(0), {}
    names = [name for name in pipe.unet.attn_processors if name.endswith("attn2.processor")]
    for number, name in enumerate(names):
        width = pipe.unet.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for part in ("to_k_ip", "to_v_ip"):
            weights[f"{2 * number + 1}.{part}.weight"] = torch.randn(width, TEXT, generator=dice) * TEXT**-0.5
    image = {"proj.weight": torch.randn(4 * TEXT, 16, generator=dice), "proj.bias": torch.zeros(4 * TEXT),
             "norm.weight": torch.ones(TEXT), "norm.bias": torch.zeros(TEXT)}  # fmt: skip
    pipe.load_ip_adapter({"image_proj": image, "ip_adapter": weights}, "", "", image_encoder_folder=None)
    return pipe, {"ip_adapter_image_embeds": [torch.randn(2, 1, 16, generator=dice)]}


def _callback(pipe: Any, load: Any) -> tuple[Any, dict[str, Any]]:
    def change(_pipe: Any, _step: int, _time: Any, held: dict[str, Any]) -> dict[str, Any]:
        return {"latents": held["latents"] * 0.9}

    return pipe, {"callback_on_step_end": change, "callback_on_step_end_tensor_inputs": ["latents"]}


def _scaled_lora(pipe: Any, load: Any) -> tuple[Any, dict[str, Any]]:
    load(pipe, "one")
    return pipe, {"cross_attention_kwargs": {"scale": 0.4}}


USES = {
    "controlnet": _controlnet, "guessing controlnet": _guessing_controlnet, "inpainting": _inpainting,
    "image prompt": _image_prompt, "callback": _callback, "scaled lora": _scaled_lora,
    "without guidance": lambda pipe, load: (pipe, {"guidance_scale": 1.0}),
    "three pictures": lambda pipe, load: (pipe, {"num_images_per_prompt": 3}),
    "scale": lambda pipe, load: (pipe, {"cross_attention_kwargs": {"scale": 0.4}}),
}  # fmt: skip
