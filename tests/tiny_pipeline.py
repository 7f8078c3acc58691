"""A whole Stable Diffusion pipeline with random weights, small enough to write in a test and to load in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from tests import models

LETTERS = "abcdefghijklmnopqrstuvwxyz"
START, END = "<|startoftext|>", "<|endoftext|>"
WIDTH = 32
FEW_HEADS = {"attention_head_dim": 1}  # what the name means; four heads of 1,024 tokens take three times as long


def write_folder(folder: Path) -> Path:
    """A diffusers folder that makes 32 px pictures; 16 x 16 tokens at its finest level."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(folder)
    text, vae = CLIPTextModel(_text_config(len(tokenizer))), _autoencoder()
    unet = models.unet(norm_num_groups=32)
    _assembled(vae, text, tokenizer, unet).save_pretrained(folder / "pipeline")
    return folder / "pipeline"


def stable_diffusion(folder: Path) -> StableDiffusionPipeline:
    """As SD1.5 is built; pictures of 64 px, 32 x 32 tokens at its finest level, which is where presets begin."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(folder)
    text, unet = CLIPTextModel(_text_config(len(tokenizer))), models.fixed(models.unet(sample_size=32, **FEW_HEADS))
    return _assembled(_autoencoder(), text, tokenizer, unet)


def stable_diffusion_xl(folder: Path) -> StableDiffusionXLPipeline:
    """As SDXL is built, whose attention starts at half the latent: pictures of 128 px, 32 x 32 tokens there."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(folder)
    texts = [kind(_text_config(len(tokenizer))) for kind in (CLIPTextModel, CLIPTextModelWithProjection)]
    unet = models.fixed(models.unet(**{**models.SDXL, **FEW_HEADS}, sample_size=64, cross_attention_dim=2 * WIDTH))
    return StableDiffusionXLPipeline(_autoencoder(), *texts, tokenizer, tokenizer, unet, _scheduler())


def _assembled(*parts: Any) -> StableDiffusionPipeline:
    """Of a VAE, a text encoder, a tokenizer and a UNet."""
    return StableDiffusionPipeline(*parts, _scheduler(), None, None, requires_safety_checker=False)


def _autoencoder() -> AutoencoderKL:
    return AutoencoderKL(block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2,
                         up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4)  # fmt: skip


def _scheduler() -> DDIMScheduler:
    return DDIMScheduler(clip_sample=False, steps_offset=1)


def _tokenizer(folder: Path) -> CLIPTokenizer:
    words = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), START, END]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77)


def _text_config(words: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=words, hidden_size=WIDTH, projection_dim=16, intermediate_size=37, num_hidden_layers=1,
        num_attention_heads=4, bos_token_id=words - 2, eos_token_id=words - 1, pad_token_id=words - 1,
    )  # fmt: skip


def write_single_file(path: Path) -> Path:
    """A checkpoint in the layout of SD1.5's single files, of the same sizes as the folder's pipeline.

    The UNet and the autoencoder are the original classes, so that the names in the file are the original ones.
    """
    from ldm.modules.diffusionmodules.model import Decoder, Encoder

    torch.manual_seed(1)
    unet = models.ldm(attention_resolutions=[1])
    sizes = {"ch": 32, "out_ch": 3, "ch_mult": (1, 2), "num_res_blocks": 1, "attn_resolutions": [], "in_channels": 3}
    sizes |= {"resolution": 32, "z_channels": 4, "double_z": True}
    parts = {
        "model.diffusion_model": unet,
        "first_stage_model.encoder": Encoder(**sizes),
        "first_stage_model.decoder": Decoder(**sizes),
        "first_stage_model.quant_conv": torch.nn.Conv2d(8, 8, 1),
        "first_stage_model.post_quant_conv": torch.nn.Conv2d(4, 4, 1),
    }
    weights = {f"{part}.{name}": value for part, module in parts.items() for name, value in module.state_dict().items()}
    text = CLIPTextModel(_text_config(len(LETTERS) * 2 + 2)).state_dict()
    prefix = "cond_stage_model.transformer.text_model."
    weights |= {prefix + name.removeprefix("text_model."): value for name, value in text.items()}
    save_file({name: value.clone().contiguous() for name, value in weights.items()}, path)
    return path
