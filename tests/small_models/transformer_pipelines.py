"""Diffusers' own pipelines, by name, around tiny transformers; prompts are embeddings."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import torch
from PIL import Image

from tests.small_models import dits

Call = dict[str, Any]
PICTURE = {"height": 512, "width": 512}
FILM = {"height": 256, "width": 256, "num_frames": 9}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


WORDS, POOLED = _noise(1, dits.WORDS, 32), _noise(1, 32)
FLAT_WORDS = _noise(dits.WORDS, 32)
ALL_SEEN = torch.ones(1, dits.WORDS, dtype=torch.long)


def _both(**given: Any) -> Call:
    """The same arguments for the prompt and for the negative prompt, which is half of it."""
    negative = {f"negative_{name}": value * 0.5 if torch.is_tensor(value) and value.is_floating_point() else value
                for name, value in given.items()}  # fmt: skip
    return {**given, **negative}


def decoder() -> Any:
    return diffusers.AutoencoderKL(in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 4,
                                   up_block_types=["UpDecoderBlock2D"] * 4, block_out_channels=[8] * 4,
                                   latent_channels=4, norm_num_groups=2, scaling_factor=1.0,
                                   shift_factor=0.0)  # fmt: skip


def _wan_of_a_picture() -> dict[str, Any]:
    """The transformer gets the picture's latent and a mask as well as the noise."""
    vae = diffusers.AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                                     temperal_downsample=[False, True, True]).eval()  # fmt: skip
    settings = {**dits.MODELS["Wan"].settings, "in_channels": 36, "out_channels": 16}
    return {"vae": vae, "transformer": dits.sized("WanTransformer3DModel", **settings).eval()}


class Way(NamedTuple):
    """A pipeline's class, its transformer, a call's arguments, and its parts but for a solver; all others are None."""

    kind: str
    model: str
    call: Call
    parts: Callable[[], dict[str, Any]] = dict


FLUX = {"prompt_embeds": WORDS, "pooled_prompt_embeds": POOLED, **PICTURE}
WAN = {**_both(prompt_embeds=WORDS), **FILM}
PIXART = {**_both(prompt_embeds=WORDS, prompt_attention_mask=ALL_SEEN), **PICTURE, "negative_prompt": None,
          "use_resolution_binning": False}  # fmt: skip
PIPELINES = {
    "Flux": Way("FluxPipeline", "Flux", FLUX, lambda: {"vae": decoder()}),
    "Flux, image to image": Way(
        "FluxImg2ImgPipeline", "Flux",
        {**FLUX, "image": Image.new("RGB", (512, 512), "teal"), "strength": 0.5, "num_inference_steps": 4},
        lambda: {"vae": decoder()},
    ),
    "SD3.5": Way("StableDiffusion3Pipeline", "SD3.5",
                 {**_both(prompt_embeds=WORDS, pooled_prompt_embeds=POOLED), **PICTURE}),
    "Qwen-Image": Way("QwenImagePipeline", "Qwen-Image",
                      {**_both(prompt_embeds=WORDS, prompt_embeds_mask=ALL_SEEN), **PICTURE}),
    "Z-Image": Way("ZImagePipeline", "Z-Image",
                   {"prompt_embeds": [FLAT_WORDS], "negative_prompt_embeds": [FLAT_WORDS * 0.5], **PICTURE}),
    "Lumina 2": Way("Lumina2Pipeline", "Lumina 2",
                    {**_both(prompt_embeds=WORDS, prompt_attention_mask=ALL_SEEN.bool()), **PICTURE}),
    "Wan": Way("WanPipeline", "Wan", WAN),
    "Wan 2.2, of two transformers": Way(
        "WanPipeline", "Wan", WAN, lambda: {"transformer_2": dits.make("Wan")[0], "boundary_ratio": 0.9}),
    "Wan, image to video": Way("WanImageToVideoPipeline", "Wan",
                               {**WAN, "image": Image.new("RGB", (256, 256), "teal")}, _wan_of_a_picture),
    "LTX": Way("LTXPipeline", "LTX",
               {**_both(prompt_embeds=WORDS, prompt_attention_mask=ALL_SEEN), **PICTURE, "num_frames": 17}),
    "PixArt sigma": Way("PixArtSigmaPipeline", "PixArt", PIXART,
                        lambda: {"scheduler": diffusers.DPMSolverMultistepScheduler()}),
    "Mochi": Way("MochiPipeline", "Mochi", {
        **_both(prompt_embeds=WORDS, prompt_attention_mask=ALL_SEEN.bool()), **PICTURE, "num_frames": 13,
    }, lambda: {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)}),
    "HiDream": Way("HiDreamImagePipeline", "HiDream", {
        **_both(prompt_embeds_t5=WORDS, prompt_embeds_llama3=_noise(2, 1, dits.WORDS, 32),
                pooled_prompt_embeds=POOLED), **PICTURE}, lambda: {"vae": decoder()}),
}  # fmt: skip
PRESENT = [name for name, way in PIPELINES.items() if hasattr(diffusers, way.kind)]


def make(name: str) -> tuple[Any, Call]:
    """The pipeline, and a call's arguments for its prompt, its size and its kind."""
    way = PIPELINES[name]
    kind = getattr(diffusers, way.kind)
    parts = {it.name: None for it in inspect.signature(kind).parameters.values() if it.default is it.empty}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts |= {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
                  "transformer": dits.make(way.model)[0], **way.parts()}  # fmt: skip
        pipe = kind(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe, dict(way.call)


def draw(pipe: Any, call: Call, **more: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    given = {"num_inference_steps": 2, "output_type": "latent", **call, **more}
    return torch.as_tensor(pipe(generator=generator, return_dict=False, **given)[0])


def transformers_of(pipe: Any) -> list[torch.nn.Module]:
    return [part for part in (pipe.transformer, getattr(pipe, "transformer_2", None)) if part is not None]
