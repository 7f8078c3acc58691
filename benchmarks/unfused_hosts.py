"""``python -m benchmarks.unfused_hosts JSON``: attention as devices without fused kernels compute it, measured.

In a source's own Python: prints what the calls of its cases took. A case is ``{"source", "what", "pixels", "heads",
"preset", "free"}``; see `benchmarks.unfused`, which calls this. Sources are torch's products and hosts' own functions.

These are taken from a checkout and called with the host's flags; nothing of a host is in here. Each source gives a UNet
of one block of Stable Diffusion 1.5's finest level, whose self-attention may have fewer heads.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.memory import CallFailed, process_peak

ROOT = Path(__file__).resolve().parent.parent
CHANNELS, HEADS, CONTEXT = 320, 8, 768
WIDTH = CHANNELS // HEADS
_WEBUI_PACKAGE = "_tome_core_webui"  # as scripts/token_merging.py calls it
ANSWER = "measured: "  # how a line that is meant begins: hosts print lines of their own
_WORDS, _SMALL = 77, 128
# timesteps of calls, one after the other: between the second and the first a match is kept
TIMES = {"unmerged": {"call": 100.0}, "tomesd": {"call": 100.0},
         "early": {"new": 900.0, "kept": 890.0}, "late": {"new": 100.0, "kept": 90.0}}  # fmt: skip


class Source(NamedTuple):
    """Where an attention comes from. host: "" for torch's; flags: of the host's command line.

    at_once: how many heads' scores it has in memory whatever is free; None where it cuts as far as what is free asks.
    """

    host: str
    meaning: str
    flags: tuple[str, ...] = ()
    function: str = ""
    at_once: int | None = None

    @property
    def checkout(self) -> str | None:
        """The folder that the environment names, as tests/hosts do."""
        return os.environ.get(f"{self.host}_DIR") if self.host else str(ROOT)

    @property
    def python(self) -> str:
        """The host's own."""
        return os.environ.get(f"{self.host}_PYTHON", sys.executable)


_ON_A_CPU = ("--use-cpu", "all", "--no-half", "--precision", "full", "--skip-torch-cuda-test")
_COMFYUI, _WEBUI = "COMFYUI", "WEBUI"
SOURCES = {
    "math": Source("", "torch's math backend behind scaled_dot_product_attention, as diffusers calls it",
                   at_once=HEADS),
    "comfyui-split": Source(_COMFYUI, "ComfyUI's --use-split-cross-attention",
                            ("--cpu", "--use-split-cross-attention")),
    "comfyui-quad": Source(_COMFYUI, "ComfyUI's --use-quad-cross-attention", ("--cpu", "--use-quad-cross-attention")),
    "webui-sub-quadratic": Source(_WEBUI, "A1111's --opt-sub-quad-attention", _ON_A_CPU, "sub_quad_attention_forward"),
    "webui-split": Source(_WEBUI, "A1111's --opt-split-attention, Doggettx's", _ON_A_CPU,
                          "split_cross_attention_forward"),
    "webui-split-v1": Source(_WEBUI, "A1111's --opt-split-attention-v1, two heads at a time", _ON_A_CPU,
                             "split_cross_attention_forward_v1", 2),
    "webui-invokeai": Source(_WEBUI, "A1111's --opt-split-attention-invokeai, on a CPU in slices of 32 MiB", _ON_A_CPU,
                             "split_cross_attention_forward_invokeAI"),
}  # fmt: skip


@contextmanager
def _tomesd(unet: nn.Module) -> Iterator[None]:
    """The package, at half of the tokens."""
    tomesd = importlib.import_module("tomesd")
    holder = unet
    if hasattr(unet, "input_blocks"):  # LDM's, which it looks for inside of a model
        holder = nn.Module()
        holder.model = nn.Module()
        holder.model.diffusion_model = unet
    tomesd.apply_patch(holder, ratio=0.5)
    try:
        yield
    finally:
        tomesd.remove_patch(holder)


class Loaded(NamedTuple):
    """A host's attention, ready to be called.

    unet: of one block, on a CPU, its weights random. attention: makes a self-attention of so many heads.
    say_free: tells the host's function how many bytes are free, by which it cuts its work. around: what has to be
    entered for a call. tomesd: what has to be entered for the host's tomesd at half of the tokens.
    """

    unet: nn.Module
    attention: Callable[[int], nn.Module]
    say_free: Callable[[int], None] = lambda size: None
    around: Callable[[], AbstractContextManager] = nullcontext
    tomesd: Callable[[nn.Module], AbstractContextManager] = _tomesd


class OneBlock(nn.Module):
    """A transformer where LDM's UNets have their first."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.input_blocks = nn.ModuleList([nn.ModuleList([transformer])])
        self.middle_block = self.output_blocks = nn.ModuleList()
        self.patches: dict[str, list[Callable]] = {}  # of ComfyUI's attention patches, by kind

    def forward(self, x: torch.Tensor, timesteps: Any = None, context: torch.Tensor | None = None) -> torch.Tensor:
        """x: ``[B, 320, H, W]``; context: ``[B, M, 768]``. Returns the shape of x."""
        options = {"patches": self.patches, "original_shape": list(x.shape)}
        return self.input_blocks[0][0](x, context, **({"transformer_options": options} if self.patches else {}))


def load(name: str) -> Loaded:
    """In the process of the source's own Python, its checkout the working folder and its flags in ``sys.argv``."""
    source = SOURCES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if source.host == _COMFYUI:
            return _of_comfyui()
        return _of_webui(source.function) if source.host == _WEBUI else _of_torch()


def _of_torch() -> Loaded:
    diffusers = importlib.import_module("diffusers")
    attention = importlib.import_module("diffusers.models.attention_processor")
    kernels = importlib.import_module("torch.nn.attention")

    class OneBlock(diffusers.ModelMixin):
        """A transformer where diffusers' UNets have their first; tomesd knows diffusers' by this base."""

        def __init__(self, transformer: nn.Module) -> None:
            super().__init__()
            self.down_blocks, self.up_blocks = nn.ModuleList([nn.ModuleList([transformer])]), nn.ModuleList()

        def forward(self, x: torch.Tensor, timestep: Any = None, context: torch.Tensor | None = None) -> torch.Tensor:
            """As of LDM's."""
            return self.down_blocks[0][0](x, encoder_hidden_states=context, return_dict=False)[0]

    made = OneBlock(diffusers.Transformer2DModel(HEADS, WIDTH, CHANNELS, cross_attention_dim=CONTEXT))
    return Loaded(
        made, lambda heads: attention.Attention(CHANNELS, heads=heads, dim_head=WIDTH),
        around=lambda: kernels.sdpa_kernel(kernels.SDPBackend.MATH),
    )  # fmt: skip


def _of_comfyui() -> Loaded:
    importlib.import_module("comfy.options").enable_args_parsing()
    attention = importlib.import_module("comfy.ldm.modules.attention")
    importlib.import_module("comfy_nodes.slot").register()
    own = {"operations": torch.nn, "dtype": torch.float32}

    def say_free(size: int) -> None:
        attention.model_management.get_free_memory = lambda dev=None, torch_free_too=False: (
            (size, size) if torch_free_too else size)  # fmt: skip

    transformer = attention.SpatialTransformer(CHANNELS, HEADS, WIDTH, context_dim=CONTEXT, **own)
    return Loaded(OneBlock(transformer), lambda heads: attention.CrossAttention(
        CHANNELS, heads=heads, dim_head=WIDTH, **own), say_free, tomesd=_patch_by_comfyui)  # fmt: skip


@contextmanager
def _patch_by_comfyui(unet: OneBlock) -> Iterator[None]:
    """ComfyUI's own node, which merges half of the queries and keeps every key: tomesd does not know its blocks."""
    patches = unet.patches
    model = types.SimpleNamespace(
        clone=lambda: model,
        set_model_attn1_patch=lambda patch: patches.update(attn1_patch=[patch]),
        set_model_attn1_output_patch=lambda patch: patches.update(attn1_output_patch=[patch]),
    )
    importlib.import_module("comfy_extras.nodes_tomesd").TomePatchModel.execute(model, 0.5)
    try:
        yield
    finally:
        patches.clear()


def _of_webui(function: str) -> Loaded:
    importlib.import_module("modules.shared_init").initialize()
    importlib.import_module("modules.processing")  # before what it imports, which imports it
    optimizations = importlib.import_module("modules.sd_hijack_optimizations")
    ldm = importlib.import_module("ldm.modules.attention")
    package = sys.modules[_WEBUI_PACKAGE] = types.ModuleType(_WEBUI_PACKAGE)
    package.__path__ = [str(ROOT)]
    importlib.import_module(".extension.attentions", _WEBUI_PACKAGE).describe()
    ours = {name: module for name, module in sys.modules.items() if name.startswith(f"{_WEBUI_PACKAGE}.tome_core")}
    sys.modules.update({name.removeprefix(f"{_WEBUI_PACKAGE}."): module for name, module in ours.items()})
    ldm.CrossAttention.forward = getattr(optimizations, function)

    def say_free(size: int) -> None:
        optimizations.get_available_vram = lambda: size

    transformer = ldm.SpatialTransformer(CHANNELS, HEADS, WIDTH, context_dim=CONTEXT, use_checkpoint=False)
    return Loaded(OneBlock(transformer), lambda heads: ldm.CrossAttention(
        CHANNELS, heads=heads, dim_head=WIDTH), say_free)  # fmt: skip


def inputs(pixels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One picture's tokens as a latent ``[1, 320, h, w]``, a timestep, a prompt ``[1, 77, 768]``."""
    dice = torch.Generator().manual_seed(1)
    side = pixels // 8
    return (torch.randn(1, CHANNELS, side, side, generator=dice), torch.tensor([100]),
            torch.randn(1, _WORDS, CONTEXT, generator=dice))  # fmt: skip


@contextmanager
def put_on(loaded: Loaded, what: str, preset: str) -> Iterator[Callable[[float], None]]:
    """Merging of this kind; gives what is told the timestep before a call."""
    if what == "unmerged":
        yield lambda timestep: None
    elif what == "tomesd":
        with loaded.tomesd(loaded.unet):
            yield lambda timestep: None
    else:
        tome_core = importlib.import_module("tome_core")
        with tome_core.patch(loaded.unet, preset, host_clock=True) as merging:
            sampling = object()
            yield lambda timestep: merging.set_time(timestep=timestep, sampling=sampling)
            if not merging.report().merged_anything:
                raise RuntimeError(f"nothing merged: {merging.report()}")


def measure(loaded: Loaded, case: dict[str, Any]) -> dict[str, Any]:
    """peak_mib: the highest of its calls, beyond the model; seconds: processor time of each."""
    block = next(module for module in loaded.unet.modules() if type(module).__name__ == "BasicTransformerBlock")
    block.attn1 = loaded.attention(case["heads"])
    loaded.unet.eval().requires_grad_(False)
    loaded.say_free(case["free"] * case["heads"] // HEADS)
    times = TIMES[case["what"]]
    seconds = torch.zeros(len(times)).share_memory_()  # written in a fork

    def run() -> None:
        with put_on(loaded, case["what"], case["preset"]) as tell:
            for number, timestep in enumerate(times.values()):
                tell(timestep)
                since = time.process_time()
                loaded.unet(*inputs(case["pixels"]))
                seconds[number] = time.process_time() - since

    with torch.inference_mode(), loaded.around():
        peak = process_peak(run, lambda: loaded.unet(*inputs(_SMALL)))
    return {"peak_mib": peak, "seconds": dict(zip(times, seconds.tolist(), strict=True))}


def main() -> None:
    """Measure the cases that the command line names, all of one source: a line of JSON each."""
    cases = json.loads(sys.argv.pop(1))  # what is left is the host's own
    torch.set_num_threads(1)
    loaded = load(cases[0]["source"])
    for case in cases:
        try:
            answer = measure(loaded, case)
        except CallFailed as error:
            answer = {"failed": str(error)}
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
