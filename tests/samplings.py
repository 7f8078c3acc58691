"""A small SD1.5 whose matches are kept over steps."""

from __future__ import annotations

from diffusers import StableDiffusionPipeline

from tome_core import MergeConfig

KEPT = MergeConfig(side="kv", ratio=0.75, use_rand=False, keep=100.0, refine=1, metric="keys+values")


def pipeline_of(folder, kind=StableDiffusionPipeline):
    pipe = kind.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe
