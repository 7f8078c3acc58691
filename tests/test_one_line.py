"""`tome_core.patch(pipe)`: one line puts a preset on a diffusers pipeline, one takes it off, whatever is done between.

Real pipelines with random weights. Merged pictures are held against those of pipelines that went another way: loaded
before instead of after, drawn alone instead of at once. Equal means equal bits.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tome_core
from tests import tiny_pipeline
from tests.models import TEXT, fixed
from tests.test_compile import fresh_compiler  # noqa: F401
from tests.test_patch_contract import traces
from tests.test_threads import at_once
from tome_core import MergeConfig, preset
from tome_core.phases import plain_rules

KINDS = {"sd15": tiny_pipeline.stable_diffusion, "sdxl": tiny_pipeline.stable_diffusion_xl}
PRESETS = ("balanced", "fast")
TOKENS = 1024
TIMES = [901, 801, 401, 301]  # both phases of a preset, and a match of each is kept for a step
IMAGE_TIMES = [951, *TIMES]  # of which a strength of .8 leaves those

every_kind = pytest.mark.parametrize("kind", KINDS)
every_preset = pytest.mark.parametrize("name", PRESETS)


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("words")


@pytest.fixture
def build(words) -> Callable[..., Any]:
    """Makes a pipeline, its weights always the same."""

    def make(kind: str = "sd15") -> Any:
        pipe = KINDS[kind](words)
        pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


def draw(pipe: Any, seed: int = 0, **more: Any) -> torch.Tensor:
    """The finished latent, which is quicker to have than the picture."""
    call = {"prompt": "a b", "timesteps": TIMES, "guidance_scale": 3.0, "output_type": "latent"}
    return pipe(**{**call, **more}, generator=torch.Generator().manual_seed(seed)).images


def merged_alone(pipe: Any, name: str | MergeConfig = "balanced", **more: Any) -> torch.Tensor:
    """The picture of a patch that has seen no other."""
    with tome_core.patch(pipe, name) as handle:
        picture = draw(pipe, **more)
    assert_merged(handle)
    return picture


def assert_merged(handle: Any) -> None:
    """Every call of the finest level was, and as hard as the default preset does in late steps."""
    finest = handle.report().levels[0]
    assert finest.calls_merged and not finest.calls_skipped and finest.work_saved > 0.8
    most = TOKENS * (1 - preset("balanced").ratio)
    assert all(before == TOKENS and keys <= most for before, _, keys in finest.tokens)


def differ(*pictures: torch.Tensor) -> bool:
    return not any(torch.equal(one, two) for i, one in enumerate(pictures) for two in pictures[:i])


def keeps_nothing(name: str = "balanced") -> MergeConfig:
    """The preset as a compiled model has it, and a loop that nobody said is one: matches do not live on there."""
    return MergeConfig(rules=(replace(preset(name), keep=0.0),))


# --- the line itself -------------------------------------------------------------------------------------------------


@every_kind
@every_preset
def test_one_line_merges_and_another_brings_every_bit_back(build, kind: str, name: str):
    pipe = build(kind)
    before, plain = traces(pipe.unet), draw(pipe, output_type="pt")
    tome_core.patch(pipe, name)
    merged = draw(pipe, output_type="pt")
    assert_merged(vars(pipe.unet)["_tome_core_patch"].merging)
    tome_core.remove_patch(pipe)
    assert differ(plain, merged) and torch.equal(draw(pipe, output_type="pt"), plain)
    assert traces(pipe.unet) == before and "scale_model_input" not in vars(pipe.scheduler)


def test_without_a_name_it_is_the_balanced_preset(build):
    pipe = build()
    tome_core.patch(pipe)
    assert torch.equal(draw(pipe), merged_alone(build(), "balanced"))


def test_a_scheduler_that_is_exchanged_afterwards_changes_nothing(build):
    """As nearly everybody does, and some programs for every picture."""
    pipe, other = build(), build()
    handle = tome_core.patch(pipe)
    for number in range(2):
        pipe.scheduler = other.scheduler = diffusers.UniPCMultistepScheduler.from_config(pipe.scheduler.config)
        steps = {"timesteps": None, "num_inference_steps": 12}
        assert torch.equal(draw(pipe, seed=number, **steps), merged_alone(other, seed=number, **steps))
    assert_merged(handle)


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


@pytest.mark.parametrize("kind, offload", [*(("sd15", one) for one in OFFLOADS), ("sdxl", "models")])
@pytest.mark.parametrize("patch_first", [True, False])
def test_offloading_does_not_cost_the_patch(build, kind: str, offload: str, patch_first: bool):
    pytest.importorskip("accelerate", reason="offloading is accelerate's")
    pipe = build(kind)
    plain, merged = draw(pipe), merged_alone(pipe)
    if patch_first:
        handle = tome_core.patch(pipe)
        OFFLOADS[offload](pipe)
    else:
        OFFLOADS[offload](pipe)
        handle = tome_core.patch(pipe)
    for _ in range(2):
        assert torch.equal(draw(pipe), merged)
    assert_merged(handle)
    tome_core.remove_patch(pipe)
    assert torch.equal(draw(pipe), plain)
    pipe.remove_all_hooks()
    assert torch.equal(draw(pipe), plain) and torch.equal(merged_alone(pipe), merged)


# --- LoRA ------------------------------------------------------------------------------------------------------------


def write_adapter(pipe: Any, folder: Path, name: str) -> None:
    """A LoRA of every projection, from random numbers that depend on the name."""
    peft = pytest.importorskip("peft", reason="LoRAs are peft's")
    parts = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "net.0.proj"]
    pipe.unet.add_adapter(peft.LoraConfig(r=2, target_modules=parts), name)
    dice = torch.Generator().manual_seed(sum(name.encode()))
    layers = {key: torch.randn(value.shape, generator=dice) * value.shape[1] ** -0.5
              for key, value in peft.get_peft_model_state_dict(pipe.unet, adapter_name=name).items()}  # fmt: skip
    pipe.save_lora_weights(folder, layers, weight_name=f"{name}.safetensors")


@pytest.fixture
def load(build, tmp_path) -> Callable[..., None]:
    """Loads adapters into a pipeline, as its users do; the last one named is in force."""

    def into(pipe: Any, *names: str) -> None:
        for name in names:
            file = f"{name}.safetensors"
            if not (tmp_path / file).exists():
                write_adapter(build("sdxl" if "XL" in type(pipe).__name__ else "sd15"), tmp_path, name)
            pipe.load_lora_weights(tmp_path, weight_name=file, adapter_name=name)

    return into


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


# --- the compiler ----------------------------------------------------------------------------------------------------


@every_preset
@pytest.mark.parametrize("patch_first", [True, False])
def test_a_compiled_unet_has_a_graph_for_each_phase(build, name: str, patch_first: bool):
    pipe, backend = build(), CompileCounter()
    plain, merged = draw(pipe), merged_alone(build(), keeps_nothing(name))
    if patch_first:
        handle = tome_core.patch(pipe, name)
    pipe.unet = torch.compile(pipe.unet, backend=backend, fullgraph=True)
    if not patch_first:
        handle = tome_core.patch(pipe, name)
    for _ in range(2):
        assert torch.equal(draw(pipe), merged)
    phases = {rule.effective_ratio for rule in plain_rules([preset(name)], [1])}
    assert backend.frame_count <= len(phases) and handle.report().merged_anything
    tome_core.remove_patch(pipe)
    assert torch.equal(draw(pipe), plain)


@every_preset
@pytest.mark.parametrize("patch_first", [True, False])
def test_compiled_blocks_share_a_graph_for_each_phase(build, name: str, patch_first: bool):
    pipe, backend = build(), CompileCounter()
    if not hasattr(pipe.unet, "compile_repeated_blocks"):
        pytest.skip(f"diffusers {diffusers.__version__} has no compile_repeated_blocks")
    plain, merged = draw(pipe), merged_alone(build(), keeps_nothing(name))
    if patch_first:
        handle = tome_core.patch(pipe, name)
    pipe.unet.compile_repeated_blocks(backend=backend, fullgraph=True)
    if not patch_first:
        handle = tome_core.patch(pipe, name)
    for _ in range(2):
        assert torch.equal(draw(pipe), merged)
    assert backend.frame_count <= 4 and handle.report().merged_anything  # two levels, two phases each
    tome_core.remove_patch(pipe)
    assert torch.equal(draw(pipe), plain)


# --- several pipelines, and threads ----------------------------------------------------------------------------------


def image_to_image(pipe: Any) -> tuple[Any, dict[str, Any]]:
    """A pipeline of the same modules, with a scheduler of its own, and what its call needs."""
    sibling = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    sibling.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    sibling.set_progress_bar_config(disable=True)
    return sibling, {"image": an_image(pipe), "strength": 0.8, "timesteps": IMAGE_TIMES}


def an_image(pipe: Any) -> torch.Tensor:
    side = pipe.unet.config.sample_size * pipe.vae_scale_factor
    return torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(7))


@every_kind
def test_pipelines_that_share_a_unet_share_the_patch(build, kind: str):
    """But for matches, which serve the steps of the pipeline that was patched."""
    text, (image, call) = (pipe := build(kind)), image_to_image(pipe)
    plain = draw(text), draw(image, **call)
    alone = merged_alone(text), merged_alone(image, keeps_nothing(), **call)
    tome_core.patch(text)
    for _ in range(2):
        assert torch.equal(draw(text), alone[0]) and torch.equal(draw(image, **call), alone[1])
    assert differ(*plain, *alone)
    tome_core.remove_patch(image)
    assert torch.equal(draw(text), plain[0]) and torch.equal(draw(image, **call), plain[1])


def several(count: int, *args: Any, **more: Any) -> list[torch.Tensor]:
    return [draw(*args, **more) for _ in range(count)]


@every_kind
def test_pipelines_that_share_a_unet_may_draw_at_once(build, kind: str):
    text, (image, call) = (pipe := build(kind)), image_to_image(pipe)
    for name in ("tokenizer", "tokenizer_2"):  # how it pads is a tokenizer's state: two threads cannot share one
        if getattr(image, name, None) is not None:
            setattr(image, name, copy.deepcopy(getattr(image, name)))
    alone = merged_alone(text), merged_alone(image, keeps_nothing(), **call)
    handle = tome_core.patch(text)
    both = at_once(partial(several, 3, text), partial(several, 3, image, **call))
    for expected, pictures in zip(alone, both, strict=True):
        assert all(torch.equal(one, expected) for one in pictures)
    assert_merged(handle)


def test_pipelines_of_their_own_may_draw_at_once(build):
    pipes = [build("sd15"), build("sdxl"), build("sd15")]
    alone = [merged_alone(build("sd15"), "balanced"), merged_alone(build("sdxl"), "fast"), draw(pipes[2])]
    handles = [tome_core.patch(pipes[0]), tome_core.patch(pipes[1], "fast")]
    both = at_once(*(partial(several, 2, pipe) for pipe in pipes))
    for expected, pictures in zip(alone, both, strict=True):
        assert all(torch.equal(one, expected) for one in pictures)
    for handle in handles:
        assert_merged(handle)


# --- SD.Next ---------------------------------------------------------------------------------------------------------


def test_the_readmes_file_for_sdnext_patches_what_is_loaded(build, monkeypatch):
    """Its scripts register what is called with every pipeline that it loads; it takes another sampler for each picture,
    a copy of the first one where none is named, and raises where somebody interrupts.
    """
    loaded: list[Callable[[Any], Any]] = []
    modules, callbacks = ModuleType("modules"), ModuleType("modules.script_callbacks")
    callbacks.on_model_loaded = loaded.append
    modules.script_callbacks = callbacks
    monkeypatch.setitem(sys.modules, "modules", modules)
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```py\n(.*?)^```$", text.split("## In SD.Next")[1].split("\n## ")[0], re.S | re.M)
    exec(code, {})
    pipe, merged = build(), merged_alone(build())
    loaded[0](pipe)
    default = copy.deepcopy(pipe.scheduler)

    def interrupt(*_: Any) -> None:
        raise AssertionError("Interrupted...")

    for _ in range(2):
        pipe.scheduler = copy.deepcopy(default)
        assert torch.equal(draw(pipe), merged)
        pipe.scheduler = diffusers.UniPCMultistepScheduler.from_config(default.config)
        with pytest.raises(AssertionError, match="Interrupted"):
            draw(pipe, seed=5, timesteps=None, num_inference_steps=12, callback_on_step_end=interrupt)
    assert_merged(vars(pipe.unet)["_tome_core_patch"].merging)


# --- other pipelines, other calls ------------------------------------------------------------------------------------


def _controlnet(pipe: Any, load: Any) -> tuple[Any, dict[str, Any]]:
    net = fixed(diffusers.ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(8, 8)))
    made = diffusers.StableDiffusionControlNetPipeline.from_pipe(pipe, controlnet=net)
    return made, {"image": an_image(pipe), "controlnet_conditioning_scale": 0.7}


def _guessing_controlnet(pipe: Any, load: Any) -> tuple[Any, dict[str, Any]]:
    made, call = _controlnet(pipe, load)
    return made, {**call, "guess_mode": True}


def _inpainting(pipe: Any, load: Any) -> tuple[Any, dict[str, Any]]:
    made, image = diffusers.AutoPipelineForInpainting.from_pipe(pipe), an_image(pipe)
    mask = torch.zeros_like(image[:, :1])
    mask[..., : mask.shape[-1] // 2] = 1
    return made, {"image": image, "mask_image": mask, "strength": 0.8, "timesteps": IMAGE_TIMES}


def _image_prompt(pipe: Any, load: Any) -> tuple[Any, dict[str, Any]]:
    """IP-Adapter, its weights under the names that its loader knows."""
    dice, weights = torch.Generator().manual_seed(0), {}
    names = [name for name in pipe.unet.attn_processors if name.endswith("attn2.processor")]
    for number, name in enumerate(names):
        width = pipe.unet.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for part in ("to_k_ip", "to_v_ip"):
            weights[f"{2 * number + 1}.{part}.weight"] = torch.randn(width, TEXT, generator=dice) * TEXT**-0.5
    image = {"proj.weight": torch.randn(4 * TEXT, 16, generator=dice), "proj.bias": torch.zeros(4 * TEXT),
             "norm.weight": torch.ones(TEXT), "norm.bias": torch.zeros(TEXT)}  # fmt: skip
    pipe.load_ip_adapter({"image_proj": image, "ip_adapter": weights}, "", "", image_encoder_folder=None)
    return pipe, {"ip_adapter_image_embeds": [torch.randn(2, 1, 16, generator=dice)]}


def _callback(pipe: Any, load: Any) -> tuple[Any, dict[str, Any]]:
    def change(_pipe: Any, _step: int, _time: Any, held: dict[str, Any]) -> dict[str, Any]:
        return {"latents": held["latents"] * 0.9}

    return pipe, {"callback_on_step_end": change, "callback_on_step_end_tensor_inputs": ["latents"]}


def _scaled_lora(pipe: Any, load: Any) -> tuple[Any, dict[str, Any]]:
    load(pipe, "one")
    return pipe, {"cross_attention_kwargs": {"scale": 0.4}}


USES = {
    "controlnet": _controlnet, "guessing controlnet": _guessing_controlnet, "inpainting": _inpainting,
    "image prompt": _image_prompt, "callback": _callback, "scaled lora": _scaled_lora,
    "without guidance": lambda pipe, load: (pipe, {"guidance_scale": 1.0}),
    "three pictures": lambda pipe, load: (pipe, {"num_images_per_prompt": 3}),
    "scale": lambda pipe, load: (pipe, {"cross_attention_kwargs": {"scale": 0.4}}),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_every_call_merges_and_is_the_same_again(build, load, use: str):
    pipe, call = USES[use](build(), load)
    pipe.set_progress_bar_config(disable=True)
    plain = draw(pipe, **call)
    handle = tome_core.patch(pipe)
    first = draw(pipe, **call)
    draw(pipe, **{**call, "guidance_scale": 2.0}, seed=5)
    assert torch.equal(draw(pipe, **call), first) and torch.equal(merged_alone(pipe, **call), first)
    assert_merged(handle)
    tome_core.remove_patch(pipe)
    assert differ(plain, first) and torch.equal(draw(pipe, **call), plain)


def test_an_interrupted_picture_leaves_nothing_to_the_next(build):
    pipe = build()
    plain, merged, steps = draw(pipe), merged_alone(pipe), []

    def stop(pipe: Any, step: int, _time: Any, held: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        pipe._interrupt = True
        return held

    handle = tome_core.patch(pipe)
    calls = handle.report().calls
    draw(pipe, seed=5, callback_on_step_end=stop)
    assert steps == [0] and handle.report().calls == calls + 1
    assert torch.equal(draw(pipe), merged)
    tome_core.remove_patch(pipe)
    assert torch.equal(draw(pipe), plain)
