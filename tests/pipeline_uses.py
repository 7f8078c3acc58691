"""What people do with a pipeline beside drawing from words: each use gives the pipeline and what its call needs."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.models import fixed
from tests.pipelines import an_image


def _controlnet(pipe: Any, load: Any) -> tuple[Any, dict[str, Any]]:
    net = fixed(diffusers.ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(8, 8)))
    made = diffusers.StableDiffusionControlNetPipeline.from_pipe(pipe, controlnet=net)
    return made, {"image": an_image(pipe), "controlnet_conditioning_scale": 0.7}


USES = {
    "controlnet": _controlnet,
    "callback": lambda pipe, load: (pipe, {
        "callback_on_step_end": lambda *given: {"latents": given[-1]["latents"] * 0.9},
        "callback_on_step_end_tensor_inputs": ["latents"],
    }),
    "without guidance": lambda pipe, load: (pipe, {"guidance_scale": 1.0}),
    "three pictures": lambda pipe, load: (pipe, {"num_images_per_prompt": 3}),
    "scale": lambda pipe, load: (pipe, {"cross_attention_kwargs": {"scale": 0.4}}),
}  # fmt: skip
