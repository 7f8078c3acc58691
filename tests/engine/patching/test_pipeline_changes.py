"""A patched pipeline whose model is offloaded, adapted or compiled: the patch serves it, and comes off without a trace.

Real pipelines with random weights.
"""

from __future__ import annotations

import copy
from typing import Any

import diffusers
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tome_core
from tests import transformer_pipelines
from tests.pipelines import assert_merged, differ, draw, every_kind, every_preset, merged_alone
from tests.thoroughness import some_quick
from tests.tiny_transformers import STRONG, distance
from tests.traces import traces
from tome_core.models import find_models
from tome_core.patching import handle_on

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# --- offloading ------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def _as_models(pipe: Any) -> None:
    pipe.enable_model_cpu_offload(device="cpu")  # which poses as the accelerator


def _sequentially(pipe: Any) -> None:
    """What `enable_sequential_cpu_offload` does to the UNet; with a CPU to offload to, accelerate fails in the rest."""
    from accelerate import cpu_offload

    cpu_offload(pipe.unet, CPU, offload_buffers=len(pipe.unet._parameters) > 0)


def _in_groups(pipe: Any) -> None:
    if not hasattr(pipe, "enable_group_offload"):
        pytest.skip(f"diffusers {diffusers.__version__} has no group offload")
    pipe.enable_group_offload(CPU, CPU, num_blocks_per_group=1)


def _as_sdnext_does(pipe: Any) -> None:
    """SD.Next's "balanced": one hook for all models, which hooks them anew, and dispatches one, while it is called."""
    from accelerate import dispatch_model
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    models = [one for one in pipe.components.values() if isinstance(one, torch.nn.Module)]

    def rehook(module: torch.nn.Module) -> None:
        remove_hook_from_module(module, recurse=True)
        add_hook_to_module(module, hook, append=True)
        module._hf_hook.execution_device = CPU

    class Balanced(ModelHook):
        last: Any = None

        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
            if self.last is not module:
                for other in models:
                    if other is not module:
                        rehook(other)
                places = dict.fromkeys((name for name, _ in module.named_children()), "cpu")
                dispatch_model(module, places, CPU, force_hooks=True)
            self.last = module
            return args, kwargs

    hook = Balanced()
    for one in models:
        rehook(one)


OFFLOADS = {"models": _as_models, "sequential": _sequentially, "groups": _in_groups, "SD.Next": _as_sdnext_does}


@pytest.mark.slow
@pytest.mark.parametrize("kind, offload", [*(("sd15", one) for one in OFFLOADS), ("sdxl", "models")])
@pytest.mark.parametrize("patch_first", [True, False])
def test_offloading_does_not_cost_the_patch(build, kind: str, offload: str, patch_first: bool):
    pytest.importorskip("accelerate", reason="offloading is accelerate's")
    pipe = build(kind)
    plain, merged = draw(pipe), merged_alone(pipe)
    for is_patch in (patch_first, not patch_first):
        tome_core.patch(pipe) if is_patch else OFFLOADS[offload](pipe)
    for _ in range(2):
        assert torch.equal(draw(pipe), merged)
    assert_merged(handle_on(pipe.unet))
    tome_core.remove_patch(pipe)
    assert torch.equal(draw(pipe), plain)
    pipe.remove_all_hooks()
    assert torch.equal(draw(pipe), plain) and torch.equal(merged_alone(pipe), merged)


# --- LoRA ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_kind
@every_preset
def test_a_lora_may_come_and_go_while_a_patch_is_on(build, load, kind: str, name: str):
    pipe, other = build(kind), build(kind)
    plain, merged = draw(pipe), merged_alone(pipe, name)
    handle = tome_core.patch(pipe, name)
    draw(pipe)
    load(pipe, "one")
    load(other, "one")
    assert torch.equal(draw(pipe), merged_alone(other, name)) and differ(draw(pipe), draw(other), merged)
    for each in (pipe, other):
        each.unload_lora_weights()
    assert torch.equal(draw(pipe), merged)
    assert_merged(handle)
    tome_core.remove_patch(pipe)
    assert torch.equal(draw(pipe), plain) and traces(pipe.unet) == traces(other.unet)


def test_a_patch_that_comes_off_leaves_the_lora_in(build, load):
    pipe = build()
    plain = draw(pipe)
    tome_core.patch(pipe)
    load(pipe, "one")
    draw(pipe)
    tome_core.remove_patch(pipe)
    with_lora = build()
    load(with_lora, "one")
    assert torch.equal(draw(pipe), draw(with_lora)) and differ(draw(pipe), plain)
    pipe.unload_lora_weights()
    assert torch.equal(draw(pipe), plain)


@pytest.mark.slow
def test_each_picture_is_its_adapters_own(build, load):
    """A match that one adapter's keys found must not serve another's."""
    pipe, other = build(), build()
    handle = tome_core.patch(pipe)
    load(pipe, "one", "two")
    load(other, "one", "two")
    pictures = []
    for adapters, weights in (("one", 1.0), ("two", 1.0), (["one", "two"], [0.3, 0.7]), ("one", 0.5), ("one", 1.0)):
        for each in (pipe, other):
            each.set_adapters(adapters, weights)
        pictures.append(draw(pipe))
        assert torch.equal(pictures[-1], merged_alone(other))
    pipe.disable_lora()
    assert torch.equal(draw(pipe), merged_alone(build()))
    assert differ(*pictures[:4]) and torch.equal(pictures[0], pictures[4])
    assert_merged(handle)


def test_a_lora_may_be_fused_and_unfused_while_a_patch_is_on(build, load):
    pipe, other = build(), build()
    tome_core.patch(pipe)
    for each in (pipe, other):
        load(each, "one")
        each.fuse_lora()
    fused = draw(pipe)
    assert torch.equal(fused, merged_alone(other)) and differ(fused, merged_alone(build()))
    for step in ("unfuse_lora", "unload_lora_weights"):
        for each in (pipe, other):
            getattr(each, step)()
        assert torch.equal(draw(pipe), merged_alone(other))
    tome_core.remove_patch(pipe)
    assert torch.equal(draw(pipe), draw(other))


def lora_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A random one of a transformer's attentions' projections, as a file holds it."""
    peft = pytest.importorskip("peft", reason="LoRAs are peft's")
    other, parts = copy.deepcopy(model), ["to_q", "to_k", "to_v", "to_out.0"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        other.add_adapter(peft.LoraConfig(r=4, target_modules=parts, init_lora_weights=False))
    return {f"transformer.{name}": one for name, one in peft.get_peft_model_state_dict(other).items()}


@pytest.mark.parametrize("name", some_quick(["Flux", "SD3.5", "Wan"]))
@pytest.mark.parametrize("fused", [False, True])
def test_a_transformers_lora_that_comes_and_goes_under_merging_is_the_one_without_it(name: str, fused: bool):
    pipe, asked = transformer_pipelines.make(name)
    plain, weights = transformer_pipelines.draw(pipe, asked), lora_of(pipe.transformer)

    def put_on() -> torch.Tensor:
        pipe.load_lora_weights(dict(weights))
        if fused:
            pipe.fuse_lora()
        return transformer_pipelines.draw(pipe, asked)

    def take_off() -> torch.Tensor:
        if fused:
            pipe.unfuse_lora()
        pipe.unload_lora_weights()
        return transformer_pipelines.draw(pipe, asked)

    with_lora = put_on()
    with tome_core.patch(pipe, **STRONG):
        merged = transformer_pipelines.draw(pipe, asked)
    assert torch.equal(transformer_pipelines.draw(pipe, asked), with_lora) and distance(with_lora, plain) > 1e-3
    assert not torch.equal(merged, with_lora) and distance(merged, with_lora) < distance(with_lora, plain)
    torch.testing.assert_close(take_off(), plain)  # unfused weights are the same but for rounding
    with tome_core.patch(pipe, **STRONG) as handle:
        alone = transformer_pipelines.draw(pipe, asked)
        torch.testing.assert_close(put_on(), merged)
        torch.testing.assert_close(take_off(), alone)
        assert handle.report().work_saved > 0.8
    torch.testing.assert_close(transformer_pipelines.draw(pipe, asked), plain)


# --- the compiler ----------------------------------------------------------------------------------------------------


def _whole(pipe: Any, backend: Any) -> None:
    pipe.unet = torch.compile(pipe.unet, backend=backend, fullgraph=True)


def _by_blocks(pipe: Any, backend: Any) -> None:
    if not hasattr(pipe.unet, "compile_repeated_blocks"):
        pytest.skip(f"diffusers {diffusers.__version__} has no compile_repeated_blocks")
    pipe.unet.compile_repeated_blocks(backend=backend, fullgraph=True)


@pytest.mark.slow
@every_preset
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("compiles, levels", [(_whole, 1), (_by_blocks, 2)])
def test_what_is_compiled_has_one_graph_for_both_phases(build, name, patch_first: bool, compiles: Any, levels: int):
    pipe, backend = build(), CompileCounter()
    plain, merged = draw(pipe), merged_alone(build(), name)
    for is_patch in (patch_first, not patch_first):
        tome_core.patch(pipe, name) if is_patch else compiles(pipe, backend)
    for _ in range(2):
        assert torch.equal(draw(pipe), merged)
    assert backend.frame_count == levels
    assert_merged(handle_on(find_models(pipe)[0]))
    tome_core.remove_patch(pipe)
    assert torch.equal(draw(pipe), plain)
