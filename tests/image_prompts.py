"""IP-Adapters with random weights in a pipeline, loaded as its users do."""

from __future__ import annotations

from typing import Any

import torch

WORDS = 4  # that one image becomes


def load_image_prompts(pipe: Any, count: int = 1) -> dict[str, Any]:
    """Load so many adapters; gives what the pipeline's call needs for an image for each."""
    dice = torch.Generator().manual_seed(0)
    pipe.load_ip_adapter([image_adapter(pipe.unet, dice) for _ in range(count)], [""] * count, [""] * count,
                         image_encoder_folder=None)  # fmt: skip
    return {"ip_adapter_image_embeds": [torch.randn(2, 1, 16, generator=dice) for _ in range(count)]}


def image_adapter(unet: Any, dice: torch.Generator) -> dict[str, dict[str, torch.Tensor]]:
    """Its weights under the names that the loader knows."""
    text, weights = unet.config.cross_attention_dim, {}
    names = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    for number, name in enumerate(names):
        width = unet.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for part in ("to_k_ip", "to_v_ip"):
            weights[f"{2 * number + 1}.{part}.weight"] = torch.randn(width, text, generator=dice) * text**-0.5
    image = {"proj.weight": torch.randn(WORDS * text, 16, generator=dice), "proj.bias": torch.zeros(WORDS * text),
             "norm.weight": torch.ones(text), "norm.bias": torch.zeros(text)}  # fmt: skip
    return {"image_proj": image, "ip_adapter": weights}
