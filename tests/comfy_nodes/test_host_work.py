"""The calls of our functions at each attention in ComfyUI."""

from functools import partial

import torch

import comfy_nodes
import tome_core
from comfy_nodes.nodes import ApplyToMe
from tests.host_doubles.comfy import BaseModel, ModelPatcher, sample
from tests.host_doubles.comfy_models import deep_unet, deeper_unet
from tests.watching.calls import functions_called
from tome_core import MergeConfig

SETTINGS = MergeConfig(side="kv", metric="keys+values", keep=1000.0, ratio=0.9375, sx=4, sy=4, use_rand=False,
                       max_downsample=8)  # fmt: skip
MOST_CALLS = 20 + 5  # at a kept self-attention, and at the attention to the prompt in the same block


@torch.inference_mode()
def test_a_kept_attention_calls_few_functions():
    calls = []
    for build in (deeper_unet, deep_unet):
        applied = ApplyToMe().apply(ModelPatcher(BaseModel(build())), settings=SETTINGS)[0]
        of_steps = [functions_called(partial(sample, applied, steps=steps, size=(16, 16)), tome_core, comfy_nodes)
                    for steps in (4, 4, 5)]  # fmt: skip
        calls.append(of_steps[2] - of_steps[1])  # the calls of one more step; the first sampling fills caches
    of_more_blocks = calls[0] - calls[1]
    blocks = of_more_blocks["merge_pair"]
    assert blocks == 7 and of_more_blocks.total() <= MOST_CALLS * blocks, of_more_blocks.most_common()
