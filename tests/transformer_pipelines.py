"""Diffusers' own pipelines around tiny transformers with random weights, told their prompts as embeddings.

By the names of their classes, because an older diffusers lacks some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from PIL import Image

from tests import tiny_transformers
from tests.tiny_transformers import HEADS, WORDS

Call = dict[str, Any]
Made = tuple[Any, Call]


def _flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler()


def _words(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def _all_seen() -> torch.Tensor:
    return torch.ones(1, WORDS, dtype=torch.long)


def _both(**given: Any) -> Call:
    """The same for the prompt and for the negative one, which is half of it."""
    negative = {f"negative_{name}": one * 0.5 if torch.is_tensor(one) and one.is_floating_point() else one
                for name, one in given.items()}  # fmt: skip
    return {**given, **negative}


def decoder() -> Any:
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4, block_out_channels=[8] * 4, latent_channels=4, norm_num_groups=2,
        scaling_factor=1.0, shift_factor=0.0,
    )  # fmt: skip


def _flux(kind: str, model: Any) -> Made:
    pipe = getattr(diffusers, kind)(_flow(), decoder(), None, None, None, None, model)
    return pipe, {"prompt_embeds": _words(1, WORDS, 32), "pooled_prompt_embeds": _words(1, 32), "height": 512,
                  "width": 512}  # fmt: skip


def _flux_of_a_picture(kind: str, model: Any) -> Made:
    pipe, call = _flux(kind, model)
    return pipe, {**call, "image": Image.new("RGB", (512, 512), "teal"), "strength": 0.5, "num_inference_steps": 4}


def _sd3(kind: str, model: Any) -> Made:
    pipe = getattr(diffusers, kind)(model, _flow(), None, *[None] * 6)
    return pipe, {**_both(prompt_embeds=_words(1, WORDS, 32), pooled_prompt_embeds=_words(1, 32)), "height": 512,
                  "width": 512}  # fmt: skip


def _qwen(kind: str, model: Any) -> Made:
    pipe = getattr(diffusers, kind)(_flow(), None, None, None, model)
    return pipe, {**_both(prompt_embeds=_words(1, WORDS, 32), prompt_embeds_mask=_all_seen()), "height": 512,
                  "width": 512}  # fmt: skip


def _z_image(kind: str, model: Any) -> Made:
    pipe = getattr(diffusers, kind)(_flow(), None, None, None, model)
    words = _words(WORDS, 32)
    return pipe, {"prompt_embeds": [words], "negative_prompt_embeds": [words * 0.5], "height": 512, "width": 512}


def _lumina(kind: str, model: Any) -> Made:
    pipe = getattr(diffusers, kind)(model, _flow(), None, None, None)
    return pipe, {**_both(prompt_embeds=_words(1, WORDS, 32), prompt_attention_mask=_all_seen().bool()), "height": 512,
                  "width": 512}  # fmt: skip


def _wan(kind: str, model: Any, **more: Any) -> Made:
    pipe = getattr(diffusers, kind)(None, None, None, _flow(), model, **more)
    return pipe, {**_both(prompt_embeds=_words(1, WORDS, 32)), "height": 256, "width": 256, "num_frames": 9}


def _wan_of_two(kind: str, model: Any) -> Made:
    return _wan(kind, model, transformer_2=tiny_transformers.make("Wan")[0], boundary_ratio=0.9)


def _wan_of_a_picture(kind: str, _: Any) -> Made:
    """Its transformer is given the picture's latent and a mask beside the noise."""
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), in_channels=36, out_channels=16, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=2,
        rope_max_seq_len=64, **HEADS,
    ).eval()  # fmt: skip
    pipe = getattr(diffusers, kind)(None, None, vae, _flow(), transformer=model)
    return pipe, {**_both(prompt_embeds=_words(1, WORDS, 32)), "image": Image.new("RGB", (256, 256), "teal"),
                  "height": 256, "width": 256, "num_frames": 9}  # fmt: skip


def _hunyuan(kind: str, model: Any) -> Made:
    pipe = getattr(diffusers, kind)(None, None, model, None, _flow(), None, None)
    return pipe, {"prompt_embeds": _words(1, WORDS, 32), "pooled_prompt_embeds": _words(1, 32),
                  "prompt_attention_mask": _all_seen(), "height": 256, "width": 256, "num_frames": 9}  # fmt: skip


def _ltx(kind: str, model: Any) -> Made:
    pipe = getattr(diffusers, kind)(_flow(), None, None, None, model)
    return pipe, {**_both(prompt_embeds=_words(1, WORDS, 32), prompt_attention_mask=_all_seen()), "height": 512,
                  "width": 512, "num_frames": 17}  # fmt: skip


def _pixart(kind: str, model: Any) -> Made:
    pipe = getattr(diffusers, kind)(None, None, None, model, diffusers.DPMSolverMultistepScheduler())
    return pipe, {**_both(prompt_embeds=_words(1, WORDS, 32), prompt_attention_mask=_all_seen()), "height": 512,
                  "width": 512, "negative_prompt": None, "use_resolution_binning": False}  # fmt: skip


PIPELINES: dict[str, tuple[str, str, Callable[[str, Any], Made]]] = {
    "Flux": ("FluxPipeline", "Flux", _flux),
    "Flux, image to image": ("FluxImg2ImgPipeline", "Flux", _flux_of_a_picture),
    "SD3.5": ("StableDiffusion3Pipeline", "SD3.5", _sd3),
    "Qwen-Image": ("QwenImagePipeline", "Qwen-Image", _qwen),
    "Z-Image": ("ZImagePipeline", "Z-Image", _z_image),
    "Lumina 2": ("Lumina2Pipeline", "Lumina 2", _lumina),
    "Wan": ("WanPipeline", "Wan", _wan),
    "Wan 2.2, of two transformers": ("WanPipeline", "Wan", _wan_of_two),
    "Wan, image to video": ("WanImageToVideoPipeline", "Wan", _wan_of_a_picture),
    "HunyuanVideo": ("HunyuanVideoPipeline", "HunyuanVideo", _hunyuan),
    "LTX": ("LTXPipeline", "LTX", _ltx),
    "PixArt alpha": ("PixArtAlphaPipeline", "PixArt", _pixart),
    "PixArt sigma": ("PixArtSigmaPipeline", "PixArt", _pixart),
}
PRESENT = [name for name, (kind, *_) in PIPELINES.items() if hasattr(diffusers, kind)]


def make(name: str) -> Made:
    """The pipeline, and what its prompt, its size and its kind want in a call."""
    kind, model, build = PIPELINES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe, call = build(kind, tiny_transformers.make(model)[0])
    pipe.set_progress_bar_config(disable=True)
    return pipe, call


def draw(pipe: Any, call: Call, **more: Any) -> torch.Tensor:
    """The latents of two steps, from one seed."""
    generator = torch.Generator().manual_seed(1)
    given = {"num_inference_steps": 2, "output_type": "latent", **call, **more}
    return torch.as_tensor(pipe(generator=generator, return_dict=False, **given)[0])


def transformers_of(pipe: Any) -> list[torch.nn.Module]:
    """One, or Wan 2.2's two."""
    return [one for one in (pipe.transformer, getattr(pipe, "transformer_2", None)) if one is not None]
