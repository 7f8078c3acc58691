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
_WORDS, _WIDTH, _SMALL = 77, 768, 128
_SD15 = {"in_channels": 4, "out_channels": 4, "model_channels": 320, "context_dim": _WIDTH, "num_heads": 8,
         "channel_mult": [1, 2, 4, 4], "num_res_blocks": [2] * 4, "transformer_depth": [1] * 6 + [0] * 2,
         "transformer_depth_output": [1] * 9 + [0] * 3, "transformer_depth_middle": 1}  # fmt: skip
_TINY = {**_SD15, "model_channels": 32, "channel_mult": [1, 2], "num_res_blocks": [1] * 2, "num_heads": 2,
         "transformer_depth": [1] * 2, "transformer_depth_output": [1] * 4}  # fmt: skip


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
        self._model, self._strength = _comfyui_model(case["tiny"]), case["strength"]
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
        latent, *words = inputs(pixels)
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
        sizes, self._strength = _TINY if case["tiny"] else _SD15, case["strength"]
        shape = {key: value for key, value in sizes.items() if not key.startswith("transformer_depth")}
        kind = importlib.import_module("ldm.modules.diffusionmodules.openaimodel").UNetModel
        unet = kind(**{**shape, "num_res_blocks": shape["num_res_blocks"][0]}, image_size=32, legacy=False,
                    attention_resolutions=[1, 2] if case["tiny"] else [4, 2, 1], use_spatial_transformer=True,
                    use_checkpoint=False)  # fmt: skip
        importlib.import_module("modules.devices").dtype_unet = torch.float32  # as it says of a model that it loads
        self._model = nn.Module()  # as A1111's merging looks for a UNet
        self._model.model = nn.Module()
        self._model.model.diffusion_model = self._unet = randomize(unet).eval().requires_grad_(False)

    def time_calls(self, arm: str, pixels: int) -> list[float]:
        """Make an arm's calls, those in `ARMS`; return their processor seconds, in order. pixels: a picture's side."""
        built_in = importlib.import_module("modules.sd_models").apply_token_merging
        built_in(self._model, THEIRS[WEBUI] if arm == BUILT_IN else 0)
        handle = None
        if arm not in (UNMERGED, BUILT_IN):
            handle = self._ours.patch(self._unet, strength=self._strength, host_clock=True)
        latent, *words = inputs(pixels)
        seconds, sampling = [], object()
        for timestep in _TIMESTEPS[: len(ARMS[arm])]:
            since = time.process_time()
            if handle is not None:
                handle.set_time(timestep=timestep, sampling=sampling, pictures=1)
            self._unet(latent.expand(2, -1, -1, -1), torch.full((2,), timestep), torch.cat(words))
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


def _comfyui_model(tiny: bool) -> Any:
    """Make a UNet of SD1.5's shape, or a tiny one, with random weights in ComfyUI's ModelPatcher, on the CPU."""
    base, known, patcher = (importlib.import_module(f"comfy.{name}")
                            for name in ("model_base", "supported_models", "model_patcher"))  # fmt: skip
    config, cpu = _TINY if tiny else _SD15, torch.device("cpu")
    heads = {"num_head_channels": -1, "use_spatial_transformer": True, "legacy": False, "image_size": 32}
    settings = known.SD15({**config, **heads, "use_linear_in_transformer": False, "dtype": torch.float32})
    settings.unet_config["num_heads"] = config["num_heads"]
    settings.latent_format.latent_channels, settings.latent_format.scale_factor = config["in_channels"], 1.0
    model = base.BaseModel(settings, model_type=base.ModelType.EPS).eval().requires_grad_(False)
    randomize(model.diffusion_model)
    return patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def randomize(unet: nn.Module) -> nn.Module:
    """Set a UNet's weights in place, the same every time: matrices random, norms 1, biases 0; return the UNet."""
    dice = torch.Generator().manual_seed(0)
    for name, weight in unet.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, weight[0].numel() ** -0.5, generator=dice)
        else:
            weight.data.fill_(float(name.endswith("weight")))
    return unet


def inputs(pixels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a latent ``[1, 4, pixels / 8, pixels / 8]`` and two prompts ``[1, 77, 768]``, the same ones every time."""
    dice, side = torch.Generator().manual_seed(1), pixels // 8
    return (torch.randn(1, 4, side, side, generator=dice),
            *(torch.randn(1, _WORDS, _WIDTH, generator=dice) for _ in range(2)))  # fmt: skip


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
