"""The question whether code below a block may need every token: known code takes fewer, all other code is named."""

import functools
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.group_offloading import LayerExecutionTrackerHook, LazyPrefetchGroupOffloadingHook
from diffusers.hooks.hooks import HookRegistry
from diffusers.hooks.hooks import ModelHook as DiffusersHook
from diffusers.models.attention_processor import SlicedAttnProcessor
from diffusers.pipelines.ledits_pp.pipeline_leditspp_stable_diffusion_xl import LEDITSCrossAttnProcessor
from peft import LoraConfig
from torch import nn

from tests.small_models.unets import ldm_sd1, sd15
from tome_core import patch
from tome_core.models import every_token, wrap
from tome_core.models.every_token import ModulesBelow, why_of_arguments
from tome_core.models.unet_blocks import find_blocks

PARTS = ("norm1", "attn1", "attn1.to_q", "attn1.to_out.0", "attn2", "attn2.to_k", "norm3", "ff", "ff.net.0.proj")
CPU = torch.device("cpu")


def a_hook(*_: Any) -> None:
    """A hook of another program."""


@pytest.fixture
def block() -> nn.Module:
    return find_blocks(sd15())[0].block


@pytest.fixture
def below(block) -> ModulesBelow:
    """The modules below the block, none of which may need every token so far."""
    below = ModulesBelow(block)
    assert below.why() == ""
    return below


class OwnHook(ModelHook):
    """A hook of another program, by accelerate's class."""


class OwnDiffusersHook(DiffusersHook):
    """A hook of another program, by diffusers' class."""


class OwnProcessor:
    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return args[0]


class OwnLinear(nn.Linear):
    """Another program's layer."""


def replace_forward(part: nn.Module) -> None:
    part.forward = functools.partial(type(part).forward, part)


FOREIGN = {
    "a hook": lambda part: part.register_forward_hook(a_hook),
    "a hook before": lambda part: part.register_forward_pre_hook(a_hook),
    "a hook with keywords": lambda part: part.register_forward_hook(a_hook, with_kwargs=True),
    "accelerate's": lambda part: add_hook_to_module(part, OwnHook()),
    "one of accelerate's": lambda part: add_hook_to_module(part, SequentialHook(AlignDevicesHook(CPU), OwnHook())),
    "diffusers'": lambda part: HookRegistry.check_if_exists_or_initialize(part).register_hook(OwnDiffusersHook(), "x"),
    "a method": replace_forward,
    "a class": lambda part: setattr(part, "__class__", type("Own", (type(part),), {"forward": a_hook})),
}


@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_code_at_each_module_is_named_whenever_it_comes(path, kind, block, below):
    FOREIGN[kind](block.get_submodule(path))
    assert f" {path}" in below.why(), below.why()
    assert ModulesBelow(block).why() == below.why()


def test_what_leaves_is_no_reason_any_more(block, below):
    for put_on, take_off in ((lambda: block.ff.register_forward_hook(a_hook), lambda hook: hook.remove()),
                             (lambda: replace_forward(block.ff), lambda _: delattr(block.ff, "forward"))):  # fmt: skip
        thing = put_on()
        assert below.why()
        take_off(thing)
        assert below.why() == ""


@pytest.mark.parametrize("attention", ["attn1", "attn2"])
def test_processors_and_layers_of_others_are_named_and_processors_of_diffusers_pipelines(attention, block, below):
    """The last ones may keep maps of attention, from which the pipeline makes a mask of the picture."""
    part = block.get_submodule(attention)
    mine, part.processor = part.processor, OwnProcessor()
    assert "OwnProcessor" in below.why() and f" {attention} " in below.why()
    part.processor = mine
    assert below.why() == ""
    part.set_processor(SlicedAttnProcessor(1))
    assert below.why() == "", "diffusers' own"
    part.set_processor(LEDITSCrossAttnProcessor(None, "up", False, 1))
    assert f"LEDITSCrossAttnProcessor at {attention} " in below.why()
    part.set_processor(mine)
    assert below.why() == ""
    part.to_v = OwnLinear(8, 8)
    assert "OwnLinear" in below.why() and f"{attention}.to_v" in below.why()


def of_package(kind: type, package: str) -> type:
    return type(kind.__name__, (kind,), {"__module__": package})


@pytest.mark.parametrize("package, is_known", [
    ("torch.nn.modules.linear", True), ("diffusers.models.lora", True), ("diffusers.quantizers.gguf.utils", True),
    ("peft.tuners.lora.layer", True), ("ldm.modules.attention", True), ("sgm.modules.attention", True),
    ("bitsandbytes.nn.modules", True), ("a_host.attention", True), ("diffusers.pipelines.x", False),
    ("torchextra", False), ("peft.utils", False)])
def test_layers_of_known_packages_take_fewer_tokens_in_a_block_of_any_program(package, is_known, block):
    block.__class__ = of_package(type(block), "a_host.blocks")
    block.ff.net[2].__class__ = of_package(nn.Linear, package)
    assert ("Linear at ff.net.2 " in ModulesBelow(block).why()) != is_known
    block.ff.register_forward_hook(hook := functools.partial(a_hook))
    hook.__module__ = "a_host.blocks"
    assert ModulesBelow(block).why(), "its hooks are named"


def test_a_block_is_not_asked_again_unless_something_changed(block, below, monkeypatch):
    monkeypatch.setattr(every_token, "_reasons", lambda *_: iter(["asked"]))
    assert below.why() == ""
    block.ff.register_forward_hook(a_hook)
    assert below.why() == "asked"


def test_a_known_hook_that_gives_way_to_another_is_noticed(block, below):
    known = functools.partial(a_hook)
    known.__module__ = "torch.nn.utils"
    hook = block.ff.register_forward_pre_hook(known)
    assert below.why() == ""
    hook.remove()
    block.ff.register_forward_pre_hook(a_hook)
    assert "a hook on ff " in below.why()


def test_the_inner_method_of_ldms_blocks_is_asked_too():
    block = find_blocks(ldm_sd1())[0].block
    below = ModulesBelow(block)
    assert below.why() == ""
    block._forward = functools.partial(type(block)._forward, block)
    assert "in its place, at the block" in below.why()
    del block._forward
    assert below.why() == ""


def test_an_idle_wrapper_of_a_registered_kind_is_no_reason(block, monkeypatch):
    monkeypatch.setattr(wrap, "_WRAPPERS", {"partial": lambda module, method: getattr(method, "below", None)})
    replace_forward(block.attn1)
    assert "at attn1" in ModulesBelow(block).why()
    block.attn1.forward.below = type(block.attn1).forward.__get__(block.attn1)
    assert ModulesBelow(block).why() == ""


@pytest.mark.parametrize("register", [
    nn.modules.module.register_module_forward_hook, nn.modules.module.register_module_forward_pre_hook])
def test_the_block_itself_and_hooks_on_every_module_are_asked_too(register, block, below):
    with register(a_hook):
        assert "all modules" in below.why()
    assert below.why() == ""
    block.register_forward_hook(a_hook)
    assert "the block" in below.why()


def test_a_method_that_a_program_puts_on_a_class_is_named(block, below, monkeypatch):
    monkeypatch.setattr(type(block.ff), "forward", lambda self, x: x)
    assert " ff " in below.why()


def lora(model: nn.Module) -> None:
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "proj"]))


def prefetching(model: nn.Module) -> None:
    """The hooks of group offloading by streams, which needs CUDA to be switched on."""
    block = find_blocks(model)[0].block
    for hook in (LayerExecutionTrackerHook(lambda: None), LazyPrefetchGroupOffloadingHook()):
        HookRegistry.check_if_exists_or_initialize(block.ff).register_hook(hook, type(hook).__name__)


KNOWN = {
    "nothing": lambda model: None,
    "peft's LoRA": lora,
    "accelerate's offloading": lambda model: accelerate.cpu_offload(model, CPU, offload_buffers=True),
    "diffusers' offloading": lambda model: apply_group_offloading(model, CPU, offload_type="leaf_level"),
    "diffusers' casts of weights": lambda model: (lora(model), model.enable_layerwise_casting(torch.float16)),
    "diffusers' offloading by streams": prefetching,
    "a layer whose method is of C": lambda model: [setattr(part, "__class__", type(
        "Linear", (nn.Linear,), {"__module__": "torch.nn", "forward": staticmethod(torch.Tensor.relu)}))
        for part in model.modules() if type(part) is nn.Linear],
    "weight norm": lambda model: [nn.utils.weight_norm(part) for part in model.modules() if type(part) is nn.Linear],
    "parametrized weights": lambda model: [nn.utils.parametrizations.spectral_norm(part) for part in model.modules()
                                           if type(part) is nn.Linear],
    "dynamic quantisation": lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True),
    "ComfyUI-GGUF's layers": lambda model: [setattr(part, "__class__", type(
        "Linear", (type("GGMLLayer", (nn.Module,), {}), nn.Linear), {"__module__": "custom_nodes.ComfyUI-GGUF.ops"}))
        for part in model.modules() if type(part) is nn.Linear],
    "our patch": lambda model: patch(model, strength=0.5),
    "a hook that left": lambda model: remove_hook_from_module(add_hook_to_module(model, OwnHook())),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KNOWN)
def test_known_code_takes_fewer_tokens(kind):
    model = sd15()
    KNOWN[kind](model)
    assert [ModulesBelow(place.block).why() for place in find_blocks(model)] == [""] * len(find_blocks(model))


def replaced(*_: Any) -> None:
    """A patch of another node's."""


def why_of(options: dict[str, Any]) -> str:
    return why_of_arguments((), {"transformer_options": options})


ANYWHERE, HERE = {"block": ("input", 4), "block_index": 3}, ("input", 4, 3)
NEEDS = ({"patches": {"attn1_patch": [replaced]}}, {"patches": {"attn2_output_patch": [replaced]}},
         {"patches": {"middle_patch": [replaced]}}, {"patches_replace": {"attn1": {HERE: replaced}}},
         {"patches_replace": {"attn2": {("input", 4): replaced}}})  # fmt: skip
NEEDS_NOT = ({}, {"patches": {"attn1_patch": []}}, {"patches": {"input_block_patch": [replaced]}}, {"patches": None},
             {"patches_replace": None}, {"patches_replace": {"attn1": None}},
             {"patches_replace": {"attn1": {}}}, {"patches_replace": {"attn2": {("input", 4, 2): replaced}}},
             {"patches_replace": {"attn1": {("middle", 0): replaced}}}, {"patches_replace": {"dit": {HERE: replaced}}})


@pytest.mark.parametrize("options", NEEDS)
def test_a_patch_at_this_block_is_named(options):
    assert "replaced" in why_of_arguments((None, ANYWHERE | options), {}) and "replaced" in why_of(ANYWHERE | options)


@pytest.mark.parametrize("options", NEEDS_NOT)
def test_what_one_block_forbids_another_need_not_and_without_a_blocks_name_any_patch_counts(options):
    assert why_of(ANYWHERE | options) == ""
    assert "replaced" in why_of({"patches_replace": {"attn1": {HERE: replaced}}})


@pytest.mark.parametrize("kwargs, why", [
    ({"attention_mask": torch.ones(1, 4)}, "an attention mask is on"), ({"attention_mask": None}, ""),
    ({"cross_attention_kwargs": {"scale": 1.0, "gligen": {}}}, ""), ({"cross_attention_kwargs": None}, ""),
    ({"cross_attention_kwargs": {"ip_adapter_masks": []}}, "(ip_adapter_masks)")])
def test_masks_and_arguments_for_processors_are_asked(kwargs, why):
    assert why in why_of_arguments((), kwargs) if why else why_of_arguments((), kwargs) == ""
