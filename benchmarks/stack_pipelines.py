"""Diffusers' own pipelines around the scene models, a UNet of Stable Diffusion 1.5's shape, and Wan transformers.

All are told prompts as embeddings and asked for latents, so that none needs a text encoder or a decoder.

Wan's have random weights, so that their calls can be timed. Their tokens are those of 33 frames of 480 x 832 px,
14,040, and their heads 128 wide as Wan's are, but fewer. What merging can gain is attention's share of a block's
products: 85 % with two heads, 73 % with seven, as Wan 14B has at 720p and 81 frames (72 %); Wan 1.3B has 50 % at 14,040
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

import tome_core
from benchmarks.attention_work import CallTimes
from benchmarks.models import fill
from benchmarks.stack_arms import THEIRS_FIRST, WITH_MERGING, WITH_OTHER, Drawn, summarize
from benchmarks.stack_beside import PLAIN_PIPELINE, Beside
from demo import model, prompt, sampler
from demo.prompt import NULL_TOKEN

_PAIRS = ((700, 650), (200, 150))  # neighbours of 20 steps, early and late: the second keeps the first one's match
_NOISE = ((0.7, 0.65), (0.2, 0.15))  # the same for Wan, as sigmas
FILM, FRAMES = (480, 832), 33
_WORDS, _TEXT = 128, 64
_SHAPE = {"patch_size": (1, 2, 2), "attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": _TEXT,
          "freq_dim": 256}  # fmt: skip
WANS = {
    "wan": {"num_attention_heads": 2, "ffn_dim": 1536, "num_layers": 4},
    "wan, 7 heads": {"num_attention_heads": 7, "ffn_dim": 2419, "num_layers": 2},
}
_TINY = {"attention_head_dim": 16, "num_attention_heads": 2, "ffn_dim": 64}


class ScenePipelines:
    """A scene model, which draws pictures that can be compared."""

    def __init__(self, path: Path, prompts: tuple[str, ...], steps: int) -> None:
        self.model, self.prompts, self.steps = model.load(path), prompts, steps
        self.network = self.model.network

    def make(self, kind: str = PLAIN_PIPELINE, **more: Any) -> Any:
        """A pipeline of this class of diffusers'; all of them are around one UNet."""
        return _around(self.network, sampler.solver(self.model, self.steps), kind, **more)

    def draw(self, pipe: Any, number: int, **call: Any) -> np.ndarray:
        """uint8 ``[H, W, 3]``: the same prompt and start noise for equal numbers."""
        tokens = prompt.tokens(self.prompts[number % len(self.prompts)])
        words = torch.tensor([tokens, [NULL_TOKEN] * len(tokens)])
        with torch.no_grad():
            latents = _latents(pipe, self.model.emb(words), number, num_inference_steps=self.steps, **call)
            return sampler.to_bytes(model.decode(latents, self.model.haar_gain))[0]


def make_unet(tiny: bool) -> torch.nn.Module:
    """diffusers' UNet of Stable Diffusion 1.5's shape, or with almost no channels, with random weights."""
    settings = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
    if tiny:
        settings |= {"norm_num_groups": 8, "cross_attention_dim": 16, "layers_per_block": 1, "attention_head_dim": 2,
                     "block_out_channels": (8, 8, 16, 16)}  # fmt: skip
    return fill(lambda: diffusers.UNet2DConditionModel(**settings), "cpu", torch.float32)


class RandomPipelines:
    """A UNet of random weights, whose calls can be timed; pictures are two neighbouring steps."""

    def __init__(self, unet: torch.nn.Module, pixels: int) -> None:
        self.network, self.pixels = unet, pixels

    def make(self, kind: str = PLAIN_PIPELINE, **more: Any) -> Any:
        """As of `ScenePipelines`."""
        scheduler = diffusers.DPMSolverMultistepScheduler(beta_schedule="scaled_linear", steps_offset=1)
        return _around(self.network, scheduler, kind, **more)

    def draw(self, pipe: Any, number: int, **call: Any) -> np.ndarray:
        """The latent, float32 ``[4, h, w]``; even numbers are early steps, odd ones late ones."""
        width = self.network.config.cross_attention_dim
        words = torch.randn(2, 77, width, generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            return _latents(pipe, words, number, timesteps=list(_PAIRS[number % 2]), height=self.pixels,
                            width=self.pixels, **call)[0].numpy()  # fmt: skip


class WanPipelines:
    """As `RandomPipelines`, with a film for a picture: two neighbouring steps without guidance.

    name: one of `WANS`.
    """

    def __init__(self, name: str, tiny: bool = False) -> None:
        self.height, self.width = (64, 64) if tiny else FILM
        self.frames = 9 if tiny else FRAMES
        shape = {**_SHAPE, **WANS[name], **(_TINY if tiny else {})}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.network = diffusers.WanTransformer3DModel(**shape).eval().requires_grad_(False)

    def make(self, kind: str = "WanPipeline", **more: Any) -> Any:
        """A pipeline of this class of diffusers'; all of them are around one transformer."""
        pipe = getattr(diffusers, kind)(None, None, None, _Neighbours(), self.network, **more)
        pipe.set_progress_bar_config(disable=True)
        pipe.denoising_start = 0.0  # its steps are some of a film's, not a pass that begins late
        return pipe

    def draw(self, pipe: Any, number: int, **call: Any) -> np.ndarray:
        """The latent, float32 ``[16, frames, h, w]``; even numbers are early steps, odd ones late ones."""
        generator = torch.Generator().manual_seed(number)
        words = torch.randn(1, _WORDS, _TEXT, generator=generator)
        pipe.scheduler.pair = _NOISE[number % 2]
        return pipe(prompt_embeds=words, guidance_scale=1.0, height=self.height, width=self.width,
                    num_frames=self.frames, num_inference_steps=2, generator=generator, output_type="latent",
                    **call).frames[0].numpy()  # fmt: skip


class _Neighbours(diffusers.FlowMatchEulerDiscreteScheduler):
    """Two steps, whatever is asked for. pair: their sigmas."""

    pair = _NOISE[0]

    def set_timesteps(self, num_inference_steps: int | None = None, device: Any = None, **more: Any) -> None:
        """As the pipeline calls it."""
        super().set_timesteps(sigmas=list(self.pair), device=device)


def draw_arm(
    pipelines: ScenePipelines | RandomPipelines | WanPipelines, beside: Beside, number: int, preset: str, arm: str
) -> Drawn:
    """One arm of a comparison; the seconds are those of the network's calls."""
    with_other = arm in WITH_OTHER
    pipe = pipelines.make(beside.pipeline, **beside.made_with) if with_other else pipelines.make()
    said: dict[str, Any] = {}
    merging = _merging(pipe, preset, said) if arm in WITH_MERGING else nullcontext()
    other = beside.put_on(pipe) if with_other else nullcontext()
    with CallTimes(pipelines.network) as times, ExitStack() as stack:
        for context in (other, merging) if arm == THEIRS_FIRST else (merging, other):
            stack.enter_context(context)
        picture = pipelines.draw(pipe, number, **(beside.call if with_other else {}))
    return Drawn(picture, sum(times.seconds), len(times.seconds), said)


@contextmanager
def _merging(pipe: Any, preset: str, said: dict[str, Any]) -> Iterator[None]:
    """said: filled with what the report says in the end."""
    with tome_core.patch(pipe, preset) as handle:
        yield
        said.update(summarize(handle.report()))


def _around(unet: torch.nn.Module, scheduler: Any, kind: str, **more: Any) -> Any:
    pipe = getattr(diffusers, kind)(
        vae=None, text_encoder=None, tokenizer=None, unet=unet, safety_checker=None, scheduler=scheduler,
        feature_extractor=None, requires_safety_checker=False, **more,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _latents(pipe: Any, words: torch.Tensor, seed: int, **call: Any) -> torch.Tensor:
    """words: of the prompt and of the negative one, ``[2, M, D]``."""
    with_prompt, without = words[:, None]
    return pipe(prompt_embeds=with_prompt, negative_prompt_embeds=without, guidance_scale=sampler.GUIDANCE,
                generator=torch.Generator().manual_seed(seed), output_type="latent", **call).images  # fmt: skip
