"""Diffusers' transformers with what people put on them: offloading, LoRA, compilers; in any order, and off again."""

from __future__ import annotations

import copy
from typing import Any

import diffusers
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import HookRegistry, apply_group_offloading
from peft import LoraConfig, get_peft_model_state_dict

import tome_core
from tests import tiny_transformers, transformer_pipelines
from tests.offloading import WAYS
from tests.thoroughness import some_quick
from tests.tiny_transformers import STRONG, call, distance
from tests.transformer_pipelines import draw

CPU = torch.device("cpu")
FEW = ("Flux", "SD3.5", "Wan")
OF_GROUPS = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")


def _blocks(model: torch.nn.Module) -> None:
    apply_group_offloading(model, CPU, offload_type="block_level", num_blocks_per_group=1)


def _leaves(model: torch.nn.Module) -> None:
    apply_group_offloading(model, CPU, offload_type="leaf_level")


def _take_off(model: torch.nn.Module) -> None:
    remove_hook_from_module(model, recurse=True)
    for name in OF_GROUPS:
        HookRegistry.check_if_exists_or_initialize(model).remove_hook(name, recurse=True)


@pytest.mark.parametrize("name", some_quick(FEW))
@pytest.mark.parametrize("offload", [*WAYS, _blocks, _leaves], ids=lambda way: way.__name__.strip("_"))
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("unpatch_first", some_quick([True, False]))
def test_offloading_and_merging_come_and_go_in_any_order(name, offload, patch_first: bool, unpatch_first: bool):
    model, arguments = tiny_transformers.make(name)
    plain = call(model, arguments)
    with tome_core.patch(model, **STRONG):
        merged = call(model, arguments)
    for is_patch in (patch_first, not patch_first):
        tome_core.patch(model, **STRONG) if is_patch else offload(model)
    for _ in range(2):
        assert torch.equal(call(model, arguments), merged)
    report = tome_core.report(model)
    assert report.merged_anything and "something else" not in str(report)
    for is_patch in (unpatch_first, not unpatch_first):
        tome_core.remove_patch(model) if is_patch else _take_off(model)
        if is_patch:  # hooks of diffusers that leave first take what stands above them along
            assert torch.equal(call(model, arguments), plain)
    assert torch.equal(call(model, arguments), plain)


def lora_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A random one of the attentions' projections, as a file holds it."""
    other = copy.deepcopy(model)
    other.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False))
    return {f"transformer.{name}": one for name, one in get_peft_model_state_dict(other).items()}


@pytest.fixture(params=FEW)
def pipe_and_call(request) -> tuple[Any, dict[str, Any]]:
    return transformer_pipelines.make(request.param)


@pytest.mark.parametrize("fused", [False, True])
def test_a_lora_that_comes_and_goes_under_merging_is_the_one_without_it(pipe_and_call, fused):
    pipe, asked = pipe_and_call
    plain, weights = draw(pipe, asked), lora_of(pipe.transformer)

    def put_on() -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            pipe.load_lora_weights(dict(weights))
        if fused:
            pipe.fuse_lora()
        return draw(pipe, asked)

    def take_off() -> torch.Tensor:
        if fused:
            pipe.unfuse_lora()
        pipe.unload_lora_weights()
        return draw(pipe, asked)

    with_lora = put_on()
    with tome_core.patch(pipe, **STRONG):
        merged = draw(pipe, asked)
    assert torch.equal(draw(pipe, asked), with_lora) and distance(with_lora, plain) > 1e-3
    assert not torch.equal(merged, with_lora) and distance(merged, with_lora) < distance(with_lora, plain)
    torch.testing.assert_close(take_off(), plain)  # unfused weights are the same but for rounding
    with tome_core.patch(pipe, **STRONG) as handle:
        alone = draw(pipe, asked)
        torch.testing.assert_close(put_on(), merged)
        torch.testing.assert_close(take_off(), alone)
        assert handle.report().work_saved > 0.8
    torch.testing.assert_close(draw(pipe, asked), plain)


def test_linear_attention_is_refused_with_a_sentence():
    sana = diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=32,
        sample_size=8,
    )  # fmt: skip
    pipe = diffusers.SanaPipeline(None, None, None, sana, diffusers.FlowMatchEulerDiscreteScheduler())
    for model in (sana, pipe):
        with pytest.raises(tome_core.UnsupportedModelError, match="Sana"):
            tome_core.patch(model)
