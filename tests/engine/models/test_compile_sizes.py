"""Proportional attention in compiled UNets: one graph, no breaks, and the way and the pictures of an eager one."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from tome_core.attention.core import BIAS, WIDER_HEADS
from torch._dynamo.testing import CompileCounter

import tome_core
from tests.compiling import SMALL, TIMES, compiled, skip_where_unpatched_fails
from tests.models import BY_NAME, call_case
from tome_core import MergeConfig
from tome_core.models.unet_blocks import find_unet

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WAYS = [
    (name, way)
    for name in ("one_level", "sdxl", "ip_adapter_masks", "lora", "comfy_double_with_patches")
    for way in (WIDER_HEADS, BIAS)
    if way == WIDER_HEADS or not name.startswith("comfy")  # the double's takes no bias
]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["qkv", "kv"])
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_one_graph_serves_all_times(name: str, way: str, side: str, request):
    if way == WIDER_HEADS:
        request.getfixturevalue("wide_heads")
    case, config = BY_NAME.get(name, SMALL), MergeConfig(side=side)
    skip_where_unpatched_fails(case)
    backend = CompileCounter()
    plain, model = case.build(), case.build()
    with tome_core.patch(plain, config), tome_core.patch(model, config) as handle:
        whole = compiled(model, backend)
        for time in TIMES[:4]:
            assert torch.equal(call_case(case, whole, timestep=time), call_case(case, plain, timestep=time))
        assert backend.frame_count == 1
        assert handle.report().levels[0].traced_routes == (way,)
        assert f"compiled with proportional attention: {way}" in str(handle.report())


def each(model, change) -> None:
    """Change every self-attention."""
    for block in list(find_unet(model).modules()):
        if hasattr(block, "attn1"):
            change(block.attn1)


def _bypass(attention):
    """A forward of somebody's own on a projection, as loaders of LoRA put it there."""
    forward = attention.to_q.forward
    attention.to_q.forward = lambda x: forward(x) + 1


def _plain_processor(attention):
    attention.set_processor(AttnProcessor())


def _doubled(attention):
    attention.set_processor(Doubled())


class Doubled(AttnProcessor2_0):
    """A processor that nobody knows."""

    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)


NOT_KNOWN = "q, k, v together, without sizes, because Doubled is not known"


@pytest.mark.slow
@pytest.mark.parametrize("name, change, way, when", [
    (*changed, when) for when in ("before the patch", "before the compiler", "after a call") for changed in (
        ("small", _bypass, BIAS), ("ldm_sd1", _bypass, WIDER_HEADS), ("small", _plain_processor, BIAS),
        ("small", _doubled, NOT_KNOWN),
    ) if changed[1] is not _bypass or when != "after a call"  # no compiler looks at a projection's attributes again
])  # fmt: skip
def test_what_changes_an_attention_is_in_the_graph_that_is_made_after_it(name, change, way, when):
    """A graph does not outlive the processors that it was made of: without a patch a compiler makes a new one, too."""
    case, config = BY_NAME.get(name, SMALL), MergeConfig(side="kv", ratio=0.75)
    plain, model = case.build(), case.build()
    each(plain, change)
    if when == "before the patch":
        each(model, change)
    with tome_core.patch(plain, config), tome_core.patch(model, config) as handle:
        if when == "before the compiler":
            each(model, change)
        expected, whole = call_case(case, plain, timestep=TIMES[0]), compiled(model, CompileCounter())
        if when == "after a call":
            call_case(case, whole, timestep=TIMES[0])
            each(model, change)
        assert torch.equal(call_case(case, whole, timestep=TIMES[0]), expected)
        routes = handle.report().levels[0].traced_routes
        assert way in routes and (when == "after a call" or routes == (way,))
