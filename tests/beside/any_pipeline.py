"""Any pipeline of diffusers from small parts: what its class asks for is read from its types, and tried."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from tests import models, tiny_pipeline, tiny_transformers, transformer_pipelines
from tests.transformer_pipelines import ALL_SEEN, FILM, PICTURE, POOLED, WORDS, Way

IN_CHANNELS = (4, 9, 8, 5, 7)  # of UNets: plain, for inpainting, beside a picture, a depth, a small picture
PICTURES = ("image", "control_image", "conditioning_frames", "init_image", "control_video", "last_image", "cond_image",
            "example_image", "original_image")  # fmt: skip
MASKS = ("mask_image", "control_mask", "mask")
GIVEN = {"prompt": "a b", "source_prompt": "a", "num_inference_steps": 2, "num_frames": 2, "video_length": 2,
         "token_indices": [1], "gligen_phrases": ["a"], "gligen_boxes": [[0.1, 0.1, 0.6, 0.6]], "control_mode": [0],
         "class_labels": [1], "height": 64, "width": 64, "strength": 0.8,
         "processing_resolution": 64}  # fmt: skip
PROMPT = {"prompt_embeds": WORDS, "negative_prompt_embeds": WORDS, "prompt_attention_mask": ALL_SEEN,
          "negative_prompt_attention_mask": ALL_SEEN, "pooled_prompt_embeds": POOLED,
          "negative_pooled_prompt_embeds": POOLED}  # fmt: skip
Make = Callable[[], tuple[Any, dict[str, Any]]]


def makers(kind: type, network: type) -> Iterator[Make]:
    """Ways to make a pipeline, and what it is called with; the first that draws unmerged serves. network: the class of
    the one that it is around.
    """
    ways = transformer_pipelines.PIPELINES
    yield from (lambda name=name: transformer_pipelines.make(name) for name, way in ways.items()
                if way.kind == kind.__name__)  # fmt: skip
    tiny = [name for name, one in tiny_transformers.MODELS.items() if one.kind == network.__name__]
    known = [way for way in ways.values() if way.model in tiny]
    known += [Way(kind.__name__, name, {**PROMPT, **size}) for name in tiny for size in (PICTURE, FILM)]
    yield from (lambda way=way: like(kind, around(way), way.call) for way in known)
    if not tiny:
        parts = tiny_pipeline.stable_diffusion_xl if "tokenizer_2" in inspect.signature(kind).parameters else \
            tiny_pipeline.stable_diffusion  # fmt: skip
        yield from (lambda count=count: like(kind, with_channels(network, parts(Path(mkdtemp())), count), {})
                    for count in IN_CHANNELS)  # fmt: skip


def around(way: Way) -> dict[str, Any]:
    """The parts of a transformer's pipeline."""
    return {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(), **way.parts(),
            "transformer": way.parts().get("transformer") or tiny_transformers.build(way.model)}  # fmt: skip


def with_channels(kind: type, pipe: Any, count: int) -> dict[str, Any]:
    """The parts of a UNet's pipeline, around a UNet of this class that is given so many channels."""
    config, known = {**pipe.unet.config, "in_channels": count}, inspect.signature(kind).parameters
    if count == 7:
        config["num_class_embeds"] = 1000
    for name in ("down_block_types", "up_block_types"):
        if kind is not type(pipe.unet):  # its own kinds of blocks: with attention at the latent's level, and without
            config[name] = (known[name].default[0], known[name].default[-1])
    made = kind(**{name: one for name, one in config.items() if name in known})
    return {**pipe.components, "unet": models.fixed(made), "requires_safety_checker": False}


def like(kind: type, own: dict[str, Any], call: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A pipeline of this class from another's parts, and what it asks for in a call."""
    hints, parts = typing.get_type_hints(kind.__init__), {}
    for name, one in inspect.signature(kind).parameters.items():
        made = own.get(name) if own.get(name) is not None else part_of(own, name, hints.get(name))
        if made is not None or one.default in (None, one.empty):
            parts[name] = made
    pipe, asked = kind(**parts), inspect.signature(kind.__call__).parameters
    pipe.set_progress_bar_config(disable=True)
    given = {**GIVEN, **call}
    picture, white = (Image.new("RGB", (given["width"], given["height"]), color) for color in ("teal", "white"))
    given |= {**dict.fromkeys(PICTURES, picture), **dict.fromkeys(MASKS, white), "video": [picture] * 9, **call}
    if "prompt_embeds" in call:
        del given["prompt"]
    return pipe, {name: one for name, one in given.items() if name in asked}


def part_of(own: dict[str, Any], name: str, hint: Any) -> Any:
    """A small one; None if none is known. own: the parts that there are."""
    kinds = [one for one in typing.get_args(hint) or [hint] if inspect.isclass(one)]
    network = own.get("unet") or own.get("transformer")
    if name == "vae":
        found = (way.parts().get("vae") for way in transformer_pipelines.PIPELINES.values())
        return next((one for one in found if isinstance(one, tuple(kinds))), None)
    if name == "controlnet" and "unet" in own:
        made = next(one for one in kinds if hasattr(one, "from_unet"))
        return models.fixed(made.from_unet(network, conditioning_embedding_out_channels=(8, 8)))
    if name == "controlnet":
        return models.fixed(kinds[0].from_config(network.config))
    if name == "motion_adapter":
        return models.fixed(diffusers.MotionAdapter(
            block_out_channels=(32, 64), motion_layers_per_block=1, motion_norm_num_groups=8))  # fmt: skip
    if name == "image_encoder" and "CLIP" in str(hint):
        return CLIPVisionModelWithProjection(CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, image_size=32, num_hidden_layers=1, num_attention_heads=2,
            patch_size=8, projection_dim=32)).eval()  # fmt: skip
    return CLIPImageProcessor(size=32, crop_size=32) if "CLIPImageProcessor" in str(hint) else None


@torch.no_grad()
def draw(pipe: Any, call: dict[str, Any]) -> torch.Tensor:
    """What it gives, whatever that is, as one tensor."""
    asked = inspect.signature(pipe.__call__).parameters
    more = {"generator": torch.Generator().manual_seed(1), "output_type": "latent", "num_inference_steps": 2}
    out = pipe(**{name: one for name, one in {**more, **call}.items() if name in asked}, return_dict=False)[0]
    return torch.as_tensor(np.asarray(out.float() if torch.is_tensor(out) else out)).float()
