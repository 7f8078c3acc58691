"""Diffusers' own WanPipeline around Wan transformers with random weights, whose calls can be timed.

Their tokens are those of 33 frames of 480 x 832 px, 14,040, and their heads 128 wide as Wan's are, but fewer. What
merging can gain is attention's share of a block's products: 85 % with two heads, 73 % with seven, as Wan 14B has at
720p and 81 frames (72 %); Wan 1.3B has 50 % at 14,040 tokens.
"""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import torch

PIXELS, FRAMES = (480, 832), 33
_WORDS, _TEXT = 128, 64
_SHAPE = {"patch_size": (1, 2, 2), "attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": _TEXT,
          "freq_dim": 256}  # fmt: skip
WANS = {
    "wan": {"num_attention_heads": 2, "ffn_dim": 1536, "num_layers": 4},
    "wan, 7 heads": {"num_attention_heads": 7, "ffn_dim": 2419, "num_layers": 2},
}
_TINY = {"attention_head_dim": 16, "num_attention_heads": 2, "ffn_dim": 64}
_PAIRS = ((0.7, 0.65), (0.2, 0.15))  # sigmas; neighbours of 20 steps, early and late


class WanPipelines:
    """As `stack_pipelines.RandomPipelines`, with a film for a picture: two neighbouring steps without guidance.

    name: one of `WANS`.
    """

    def __init__(self, name: str, tiny: bool = False) -> None:
        self.height, self.width = (64, 64) if tiny else PIXELS
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
        pipe.scheduler.pair = _PAIRS[number % 2]
        return pipe(prompt_embeds=words, guidance_scale=1.0, height=self.height, width=self.width,
                    num_frames=self.frames, num_inference_steps=2, generator=generator, output_type="latent",
                    **call).frames[0].numpy()  # fmt: skip


class _Neighbours(diffusers.FlowMatchEulerDiscreteScheduler):
    """Two steps, whatever is asked for. pair: their sigmas."""

    pair = _PAIRS[0]

    def set_timesteps(self, num_inference_steps: int | None = None, device: Any = None, **more: Any) -> None:
        """As the pipeline calls it."""
        super().set_timesteps(sigmas=list(self.pair), device=device)
