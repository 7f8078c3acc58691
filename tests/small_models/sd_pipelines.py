"""Stable Diffusion pipelines with random weights, small enough to write in a test and to load in a second."""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from tests.small_models import unets

LETTERS = "abcdefghijklmnopqrstuvwxyz"
START, END = "<|startoftext|>", "<|endoftext|>"
WIDTH = 32
TIMES = [901, 801, 401, 301]  # both phases of a preset, and a match of each is kept for a step
FEW_HEADS = {"attention_head_dim": 1}  # one head; four heads of 1,024 tokens take three times as long


def write_folder(folder: Path) -> Path:
    """A diffusers folder that makes 32 px pictures; 16 x 16 tokens at its finest level."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(folder)
    text, vae = CLIPTextModel(_text_config(len(tokenizer))), _autoencoder()
    unet = unets.unet(norm_num_groups=32)
    _assembled(vae, text, tokenizer, unet).save_pretrained(folder / "pipeline")
    return folder / "pipeline"


def read_folder(folder: Path, kind: type = StableDiffusionPipeline) -> Any:
    pipe = kind.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def stable_diffusion(folder: Path) -> StableDiffusionPipeline:
    """A pipeline like SD1.5; pictures of 64 px, 32 x 32 tokens at its finest level, where presets begin."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(folder)
    text, unet = CLIPTextModel(_text_config(len(tokenizer))), unets.fixed(unets.unet(sample_size=32, **FEW_HEADS))
    return _assembled(_autoencoder(), text, tokenizer, unet)


def stable_diffusion_xl(folder: Path) -> StableDiffusionXLPipeline:
    """A pipeline like SDXL, whose attention starts at half the latent: pictures of 128 px, 32 x 32 tokens there."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(folder)
    texts = [kind(_text_config(len(tokenizer))) for kind in (CLIPTextModel, CLIPTextModelWithProjection)]
    unet = unets.fixed(unets.unet(**{**unets.SDXL, **FEW_HEADS}, sample_size=64, cross_attention_dim=2 * WIDTH))
    return StableDiffusionXLPipeline(_autoencoder(), *texts, tokenizer, tokenizer, unet, _scheduler())


def _assembled(*parts: Any) -> StableDiffusionPipeline:
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
    return CLIPTextConfig(vocab_size=words, hidden_size=WIDTH, projection_dim=16, intermediate_size=37,
                          num_hidden_layers=1, num_attention_heads=4, bos_token_id=words - 2, eos_token_id=words - 1,
                          pad_token_id=words - 1)  # fmt: skip


KINDS = {"sd15": stable_diffusion, "sdxl": stable_diffusion_xl}


def make(words: Path, kind: str = "sd15") -> Any:
    pipe = KINDS[kind](words)
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    return pipe


def draw(pipe: Any, seed: int = 0, **more: Any) -> torch.Tensor:
    """Draw the finished latent, which is quicker than the picture."""
    pipe.set_progress_bar_config(disable=True)
    call = {"prompt": "a b", "timesteps": TIMES, "guidance_scale": 3.0, "output_type": "latent"}
    return pipe(**{**call, **more}, generator=torch.Generator().manual_seed(seed)).images
