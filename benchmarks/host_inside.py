"""``python -m benchmarks.host_inside JSON``: calls of a host's whole UNet, measured in the host's own Python.

`benchmarks.host_calls` starts this in the host's folder, with flags of the host's command line, for one arm of a case.
UNet, attention functions and built-in merging are the host's own.
"""

import importlib
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.models import SD15, SDXL
from benchmarks.timing import process_peak, reason

ROOT = Path(__file__).resolve().parent.parent
ANSWER = "measured: "  # how the line of the answer begins, because hosts print lines of their own
COMFYUI, WEBUI = "ComfyUI", "A1111"
THEIRS = {COMFYUI: 0.3, WEBUI: 0.5}  # ratios: as TomePatchModel starts, and tomesd's own, because A1111's starts at 0
UNMERGED, BUILT_IN = "unmerged", "built-in"
OURS = ("early, renewed", "early, kept", "late, renewed", "late, kept")
_TIMESTEPS = (900.0, 890.0, 100.0, 90.0)  # timesteps of the calls of `OURS`; other arms are called at the first one
ARMS = {UNMERGED: (UNMERGED,), BUILT_IN: (BUILT_IN,), "ours": OURS}  # arm -> its calls
_PACKAGE = "_tome_core_webui"  # as scripts/token_merging.py calls it
_WORDS, _SMALL = 77, 128
_TINY = "tiny "  # before a UNet's name: one of almost no channels, for tests
_OF_SDXL = {"num_head_channels": 64, "use_linear_in_transformer": True, "num_classes": "sequential"}
# the UNets by name: arguments of ComfyUI's and A1111's classes. Depths are of ComfyUI's; `_of_webui` makes A1111's
_SHAPES: dict[str, dict[str, Any]] = {
    SD15: {"in_channels": 4, "out_channels": 4, "model_channels": 320, "context_dim": 768, "num_heads": 8,
           "channel_mult": [1, 2, 4, 4], "num_res_blocks": [2] * 4, "transformer_depth": [1] * 6 + [0] * 2,
           "transformer_depth_output": [1] * 9 + [0] * 3, "transformer_depth_middle": 1},
    SDXL: {"in_channels": 4, "out_channels": 4, "model_channels": 320, "context_dim": 2048, **_OF_SDXL,
           "adm_in_channels": 2816, "channel_mult": [1, 2, 4], "num_res_blocks": [2] * 3,
           "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_output": [0] * 3 + [2] * 3 + [10] * 3,
           "transformer_depth_middle": 10},
}  # fmt: skip
_SHAPES |= {
    _TINY + SD15: {**_SHAPES[SD15], "model_channels": 32, "channel_mult": [1, 2], "num_res_blocks": [1] * 2,
                   "num_heads": 2, "transformer_depth": [1] * 2, "transformer_depth_output": [1] * 4},
    _TINY + SDXL: {**_SHAPES[SDXL], "model_channels": 32, "num_head_channels": 16, "num_res_blocks": [1] * 3,
                   "adm_in_channels": 32, "transformer_depth": [0, 1, 3],
                   "transformer_depth_output": [0, 0, 1, 1, 3, 3], "transformer_depth_middle": 3},
}  # fmt: skip


class ComfyUI:
    """A random UNet in this process's ComfyUI. case: a case of `host_calls.plan_cases`. `function`: the name of the
    host's attention function; `version`: the host's."""

    def __init__(self, case: dict[str, Any]) -> None:
        importlib.import_module("comfy.options").enable_args_parsing()
        self._nodes = importlib.import_module("comfy_nodes.nodes")
        self._samplers = importlib.import_module("comfy.samplers")
        self._sample = importlib.import_module("comfy.sample").sample_custom
        self.function = importlib.import_module("comfy.ldm.modules.attention").optimized_attention.__name__
        self.version = importlib.import_module("comfyui_version").__version__
        size = case["free"]  # ComfyUI cuts its work by it, and other programs must not change that
        importlib.import_module("comfy.model_management").get_free_memory = lambda dev=None, torch_free_too=False: (
            (size, size) if torch_free_too else size)  # fmt: skip
        self._shape, self._strength = _shape_of(case), case["strength"]
        self._model = _comfyui_model(self._shape)
        _allow_any_error()
        self._whole, self._samplers.calc_cond_batch = self._samplers.calc_cond_batch, self._timed
        self._seconds: list[float] = []

    def time_calls(self, arm: str, pixels: int) -> list[float]:
        """Make an arm's calls, those in `ARMS`; return their processor seconds, in order. pixels: a picture's side."""
        model, times = self._model, _TIMESTEPS[: len(ARMS[arm])]
        if arm == BUILT_IN:
            node = importlib.import_module("comfy_extras.nodes_tomesd").TomePatchModel
            model = node.execute(model, THEIRS[COMFYUI])[0]
        elif arm != UNMERGED:
            model = self._nodes.ApplyToMe().apply(model, self._strength)[0]
        sigmas = [self._model.get_model_object("model_sampling").sigma(torch.tensor(timestep)) for timestep in times]
        latent, *words = inputs(pixels, self._shape["context_dim"])
        positive, negative = ([[prompt, {}]] for prompt in words)
        self._seconds.clear()
        self._sample(model, latent, 7.0, self._samplers.sampler_object("euler"), torch.stack([*sigmas, sigmas[-1] * 0]),
                     positive, negative, torch.zeros_like(latent), disable_pbar=True, seed=0)  # fmt: skip
        if arm not in (UNMERGED, BUILT_IN):
            _check(self._nodes.host.find_attached(model).latest.report, pixels)
        return list(self._seconds)

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        """Call the host's function that calls the model; append CPU seconds of all threads, return its result."""
        since = time.process_time()
        out = self._whole(*args, **kwargs)
        self._seconds.append(time.process_time() - since)
        return out


class Webui:
    """A random UNet in A1111, loaded from the working directory, and set up by a case of `host_calls.plan_cases`.
    `function`: the name of the host's attention function; `version`: the host's.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        importlib.import_module("modules.shared_init").initialize()
        importlib.import_module("modules.processing")  # before what it imports, which imports it
        optimizations = importlib.import_module("modules.sd_hijack_optimizations")
        parent = sys.modules[_PACKAGE] = types.ModuleType(_PACKAGE)
        parent.__path__ = [str(ROOT)]
        importlib.import_module(".extension.attentions", _PACKAGE).describe()
        self._ours = importlib.import_module(".tome_core", _PACKAGE)
        _allow_any_error()
        known: list[Any] = []
        optimizations.list_optimizers(known)
        next(way for way in known if way.cmd_opt == case["flag"].strip("-").replace("-", "_")).apply()
        optimizations.get_available_vram = lambda: case["free"]
        self.function = importlib.import_module("ldm.modules.attention").CrossAttention.forward.__name__
        self.version = Path("CHANGELOG.md").read_text(encoding="utf-8").split(maxsplit=2)[1]  # of its first heading
        self._shape, self._strength = _shape_of(case), case["strength"]
        ldm = "sgm" if case["unet"] == SDXL else "ldm"
        kind = importlib.import_module(f"{ldm}.modules.diffusionmodules.openaimodel").UNetModel
        with torch.device("meta"):  # its own weights would take minutes
            unet = kind(**_of_webui(self._shape))
        importlib.import_module("modules.devices").dtype_unet = torch.float32  # as it says of a model that it loads
        self._model = nn.Module()  # as A1111's merging looks for a UNet
        self._model.model = nn.Module()
        self._model.model.diffusion_model = self._unet = randomize(unet.to_empty(device="cpu").eval())

    def time_calls(self, arm: str, pixels: int) -> list[float]:
        """Make an arm's calls, those in `ARMS`; return their processor seconds, in order. pixels: a picture's side."""
        built_in = importlib.import_module("modules.sd_models").apply_token_merging
        built_in(self._model, THEIRS[WEBUI] if arm == BUILT_IN else 0)
        handle = None
        if arm not in (UNMERGED, BUILT_IN):
            handle = self._ours.patch(self._unet, strength=self._strength, host_clock=True)
        latent, *words = inputs(pixels, self._shape["context_dim"])
        vector = [torch.zeros(2, size)] if (size := self._shape.get("adm_in_channels")) else []
        seconds, sampling = [], object()
        for timestep in _TIMESTEPS[: len(ARMS[arm])]:
            since = time.process_time()
            if handle is not None:
                handle.set_time(timestep=timestep, sampling=sampling, pictures=1)
            self._unet(latent.expand(2, -1, -1, -1), torch.full((2,), timestep), torch.cat(words), *vector)
            seconds.append(time.process_time() - since)
        if handle is not None:
            handle.remove()
            _check(handle.report(), pixels)
        return seconds


def _allow_any_error() -> None:
    """Let a strength keep the keys of its curve, because random weights err more than trained ones."""
    for name in [name for name in sys.modules if name.endswith("tome_core.engine.own_error")]:
        sys.modules[name].allowed = lambda *args: float("inf")


def _check(report: Any, pixels: int) -> None:
    """Raise RuntimeError if the engine's `Report` counts no merged call. Pictures below 512 px a side pass."""
    if pixels >= 512 and not report.merged_anything:
        raise RuntimeError(f"nothing merged: {report}")


def _shape_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of `_SHAPES` for a case of `host_calls.plan_cases`."""
    return _SHAPES[_TINY + case["unet"] if case["tiny"] else case["unet"]]


def _comfyui_model(shape: dict[str, Any]) -> Any:
    """Make a random UNet in ComfyUI's ModelPatcher, on the CPU. shape: an entry of `_SHAPES`, the UNet's arguments."""
    base, known, patcher = (importlib.import_module(f"comfy.{name}")
                            for name in ("model_base", "supported_models", "model_patcher"))  # fmt: skip
    cpu, kind = torch.device("cpu"), known.SDXL if "adm_in_channels" in shape else known.SD15
    usual = {"num_head_channels": -1, "use_linear_in_transformer": False}
    same = {"use_spatial_transformer": True, "legacy": False, "image_size": 32, "dtype": torch.float32}
    settings = kind({**usual, **shape, **same})
    settings.unet_config |= {name: shape[name] for name in ("num_heads",) if name in shape}
    settings.latent_format.latent_channels, settings.latent_format.scale_factor = shape["in_channels"], 1.0
    model = base.BaseModel(settings, model_type=base.ModelType.EPS, device=torch.device("meta"))
    if size := shape.get("adm_in_channels"):  # zeros for pooled words and sizes
        model.encode_adm = lambda **_: torch.zeros(1, size)
    randomize(model.diffusion_model.to_empty(device=cpu))
    return patcher.ModelPatcher(model.eval(), load_device=cpu, offload_device=cpu)


def _of_webui(shape: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of A1111's class of UNets, LDM's or SDXL's, for a shape."""
    count, *_ = shape["num_res_blocks"]
    depths = [shape["transformer_depth"][level * count] for level in range(len(shape["channel_mult"]))]
    attended = [2**level for level, depth in enumerate(depths) if depth]
    made = {name: value for name, value in shape.items() if not name.startswith("transformer_depth")}
    made |= {"num_res_blocks": count, "attention_resolutions": attended, "use_spatial_transformer": True,
             "use_checkpoint": False}  # fmt: skip
    if "adm_in_channels" not in shape:
        return {**made, "image_size": 32, "legacy": False}
    return {**made, "transformer_depth": depths, "spatial_transformer_attn_type": "softmax"}


def randomize(unet: nn.Module) -> nn.Module:
    """Set a UNet's weights in place, the same every time: matrices random, norms 1, biases 0; return the UNet."""
    dice = torch.Generator().manual_seed(0)
    for name, weight in unet.requires_grad_(False).named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, weight[0].numel() ** -0.5, generator=dice)
        else:
            weight.data.fill_(float(name.endswith("weight")))
    return unet


def inputs(pixels: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a latent ``[1, 4, pixels / 8, pixels / 8]`` and two prompts ``[1, 77, width]``, the same every time."""
    dice, side = torch.Generator().manual_seed(1), pixels // 8
    return (torch.randn(1, 4, side, side, generator=dice),
            *(torch.randn(1, _WORDS, width, generator=dice) for _ in range(2)))  # fmt: skip


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Measure one arm of a case in this process's host, ComfyUI or the webui.

    case: of `host_calls.plan_cases`, with ``arm``, a key of `ARMS`. Returns ``seconds``, a dict from each name in
    ``ARMS[arm]`` to its seconds, ``peak_mib`` (None off Linux), ``function``, the name of the host's attention,
    ``version`` of the host and ``torch``; or ``failed`` alone, the reason.
    """
    try:
        host = {COMFYUI: ComfyUI, WEBUI: Webui}[case["host"]](case)
        host.time_calls(UNMERGED, _SMALL)  # libraries allocate some memory only once
        seconds: list[float] = []
        peak = process_peak(lambda: seconds.extend(host.time_calls(case["arm"], case["pixels"])))
    except Exception as error:
        return {"failed": reason(error)}
    return {"function": host.function, "version": host.version, "torch": torch.__version__,
            "seconds": dict(zip(ARMS[case["arm"]], seconds, strict=True)), "peak_mib": peak}  # fmt: skip


def main() -> None:
    """Measure the case that the first argument holds as JSON, and print one line: `ANSWER` and the result as JSON."""
    case = json.loads(sys.argv.pop(1))  # the rest of the command line is the host's own
    torch.set_num_threads(1)
    with torch.inference_mode():
        print(f"{ANSWER}{json.dumps(measure(case))}", flush=True)


if __name__ == "__main__":
    main()
