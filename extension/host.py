"""The interface to the webui, which may be a fork. No other file of the extension imports its modules."""

import logging
import os
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from modules import script_callbacks, scripts, shared
from torch import nn

from ..tome_core.hosting import SD, curve_of, find_unet, is_kind
from . import sdnext

Script = scripts.Script
ALWAYS_VISIBLE = scripts.AlwaysVisible
HAS_SAMPLING_HOOK = hasattr(scripts.Script, "process_before_every_sampling")  # only SD.Next has none
_WRITING = getattr(sys.modules.get("modules.processing"), "create_infotext", None)
# the webui calls the callables among a job's facts, and writes their results into the infotext
CALLS_FACTS = "callable" in getattr(getattr(_WRITING, "__code__", None), "co_names", ())
HYPERTILE = "__webui_hypertile_params"  # the attribute that A1111's HyperTile leaves on each attention
_BUILT_IN = "get_token_merging_ratio"
STAND_INS = (_BUILT_IN, sdnext.INIT_HIRES)  # methods of a job that we may replace on its object


def set_up_console(name: str) -> None:
    """Print messages of the logger `name` from INFO up on stdout, as ``ToMe: message``, and by no other handler."""
    ours, handler = logging.getLogger(name), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("ToMe: %(message)s"))
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(logging.INFO)


def listen(**callbacks: Callable) -> None:
    """Register callbacks: ``cfg_denoiser=f`` calls ``script_callbacks.on_cfg_denoiser(f)`` if that exists."""
    for name, function in callbacks.items():
        register = getattr(script_callbacks, f"on_{name}", None)
        if register is not None:
            register(function)


def option(key: str, default: Any) -> Any:
    """Return a setting of the webui; the default if the setting is None or missing."""
    value = getattr(getattr(shared, "opts", None), key, default)
    return default if value is None else value


def add_option(key: str, default: Any, label: str, help: str, arguments: dict, section: tuple[str, str]) -> None:
    """Add a setting to the settings tab, under `section` (id, title), with `help` behind its label; saved values stay.

    `arguments` make a gradio.Radio if "choices" is in them, else a gradio.Slider; {} leaves the choice to the webui.
    """
    import gradio

    component = gradio.Radio if "choices" in arguments else gradio.Slider if arguments else None
    info = shared.OptionInfo(default, label, component, arguments or None, section=section).info(help)
    info.category_id = "sd"  # with Optimizations, in A1111 and the Forges
    shared.opts.add_option(key, info)
    shared.opts.data.setdefault(key, default)  # after a request the webuis restore only saved settings


def running_unet(p: Any) -> Any:
    """A job's UNet or transformer; the loaded model's if `p` is None. TypeError: no model; ValueError: neither."""
    model = _running_model(p)
    objects = getattr(model, "forge_objects", None)
    return find_unet(model if objects is None else objects.unet.model)


def loaded_unet() -> Any | None:
    """Return the UNet of the loaded model; None if no model is loaded or its kind is not known. Loads no model."""
    data = getattr(sys.modules.get("modules.sd_models"), "model_data", None)
    if data is not None and data.sd_model is None:  # reading the webui's model would load it
        return None
    try:
        return running_unet(None)
    except (AttributeError, TypeError, ValueError):
        return None


def curve(unet: Any = None) -> str:
    """Return a UNet's curve, "sd", "sdxl" or "transformer", by default the loaded one's; "sd" if it is not known."""
    try:
        return curve_of(loaded_unet() if unet is None else unet)
    except (TypeError, ValueError):
        return SD


def _running_model(p: Any) -> Any:
    """Return the model of a job; the loaded model if the job has none, or has a diffusers pipeline."""
    model = getattr(p, "sd_model", None)
    return shared.sd_model if model is None or sdnext.is_pipeline(model) else model


def running_pipeline(p: Any) -> sdnext.RunningPipeline | None:
    """Return an object that reads SD.Next's loaded pipeline at each access; None if the job's model is no pipeline."""
    return sdnext.RunningPipeline(lambda: shared.sd_model) if sdnext.is_pipeline(_running_model(p)) else None


def reason_to_step_aside(hires: bool) -> str | None:
    """Return why a pass must not merge: an SdUnet, HyperTile or SD.Next's own merging is on in it; else None."""
    if getattr(sys.modules.get("modules.sd_unet"), "current_unet", None) is not None:
        return "an SdUnet (such as TensorRT) computes in place of the UNet's own blocks"
    if option("hypertile_enable_unet", False) or (hires and option("hypertile_enable_unet_secondpass", False)):
        return sdnext.TILED
    return sdnext.reason_to_step_aside(option, hires)


def reason_of_unet(unet: nn.Module) -> str | None:
    """Return why a UNet must not merge now: HyperTile is on in a module, perhaps since a hires pass; else None."""
    tiles = (vars(module).get(HYPERTILE) for module in unet.modules())
    return sdnext.TILED if any(getattr(params, "enabled", False) for params in tiles) else None


def read_time(params: Any) -> dict[str, float]:
    """Return the first picture's {"timestep": ...} or {"sigma": ...} in this step, at least 0. Waits for the device."""
    value = max(0.0, float(params.sigma.reshape(-1)[0]))  # UniPC's last may be slightly negative
    denoiser = getattr(params, "denoiser", None)
    # DDIM, PLMS and UniPC use timesteps, which Forge has converted to sigmas here
    counts = is_kind(denoiser, "CFGDenoiserTimesteps") and not getattr(denoiser, "classic_ddim_eps_estimation", False)
    return {"timestep" if counts else "sigma": value}


def planned_steps(params: Any) -> int:
    """Return the number of steps of the running pass, as the webui's progress shows it; 0 if it is not known."""
    return getattr(getattr(params, "denoiser", None), "steps", None) or 0


def timing_conditions(p: Any, params: Any) -> list[Any]:
    """Return what a call's duration depends on: shapes of both prompts' embeddings (None: unknown), sorted names."""
    texts = (getattr(params, name, None) for name in ("text_cond", "text_uncond"))
    tensors = (text.get("crossattn") if isinstance(text, dict) else text for text in texts)
    shapes = [getattr(tensor, "shape", None) for tensor in tensors]
    options = getattr(_patcher(p), "model_options", {}).get("transformer_options", {})
    names = {*map(str, [*(p.extra_generation_params or ()), *options, *options.get("patches", ())])}
    return [*shapes, *sorted(name for name in names if not name.startswith("ToMe"))]


def _patcher(p: Any) -> Any:
    """Return the UNet's ModelPatcher of a job in the Forges; None in the other webuis."""
    return getattr(getattr(_running_model(p), "forge_objects", None), "unet", None)


def is_stopped() -> bool:
    """Tell whether the user has interrupted the job at once or skipped this picture."""
    return any(getattr(getattr(shared, "state", None), name, False) for name in ("interrupted", "skipped"))


def to_unit_variance(p: Any, time: dict[str, float]) -> dict[str, float]:
    """Return a time of `read_time` with the sigma divided by the model's ``sigma_data``, if any. A timestep stays."""
    model = getattr(_patcher(p), "model", None)
    prediction = getattr(model, "predictor", None) or getattr(model, "model_sampling", None)
    data = getattr(prediction, "sigma_data", 1.0)
    return {name: value / data if name == "sigma" else value for name, value in time.items()}


def through_hypernetworks(tokens: Any) -> tuple[Any, Any]:
    """Return tokens ``[B, N, C]`` for keys and for values: changed by hypernetworks, or as given if none is loaded."""
    known = sys.modules.get("modules.hypernetworks.hypernetwork")
    loaded = getattr(shared, "loaded_hypernetworks", None)
    return known.apply_hypernetworks(loaded, tokens) if known is not None and loaded else (tokens, tokens)


def gains_file() -> str | None:
    """Return the pictures' times' path in $SD_WEBUI_CACHE_DIR or data/cache; None if the data folder is unknown."""
    data = getattr(sys.modules.get("modules.paths_internal"), "data_path", None)
    if data is None:
        return None
    return os.path.join(os.environ.get("SD_WEBUI_CACHE_DIR", os.path.join(data, "cache")), "tome_core_gains.json")


def has_hires(p: Any) -> bool:
    """Tell whether a job `p` has a hires pass, the second pass of Hires. fix."""
    return bool(getattr(p, "enable_hr", False))


def size_of(p: Any, hires: bool) -> tuple[int, int]:
    """Return the (width, height) of a job's first pass, or of its hires pass, in pixels; 0 for each side not known."""
    names = ("hr_upscale_to_x", "hr_upscale_to_y") if hires else ("width", "height")
    return tuple(int(getattr(p, name, 0) or 0) for name in names)


def hires_size(width: int, height: int, scale: float, resize_x: int, resize_y: int) -> tuple[int, int]:
    """Let the webui compute a hires pass's (width, height) in pixels, by `scale` if both sides to resize to are 0."""
    from modules.processing import StableDiffusionProcessingTxt2Img as Job

    values = {"width": width, "height": height, "hr_scale": scale, "hr_resize_x": resize_x, "hr_resize_y": resize_y}
    if hasattr(Job, sdnext.INIT_HIRES):  # SD.Next, whose job need not be made for this
        p = SimpleNamespace(**values, hr_upscaler="", hr_sampler_name="")
        Job.init_hr(p)
    else:
        p = Job(**values, enable_hr=True)
        p.calculate_target_resolution()
    return size_of(p, hires=True)


def silence_built_in(p: Any, silences: Callable[[Any, bool], bool]) -> None:
    """Let `p` give the webui's own token merging the ratio 0 in passes for which ``silences(p, hires)`` is true."""
    this = weakref.ref(p)

    def ratio(for_hr: bool = False) -> float:
        job = this()
        own = 0.0 if job is None else built_in_ratio(job, for_hr)
        return 0 if own and silences(job, for_hr) else own

    setattr(p, _BUILT_IN, ratio)


def built_in_ratio(p: Any, hires: bool) -> float:
    """Return the user's ratio of the webui's own token merging in a pass, also if silenced; 0 if off or absent."""
    own = getattr(type(p), _BUILT_IN, None)
    return 0.0 if own is None else own(p, for_hr=hires) or 0.0


def plot_module() -> Any | None:
    """Return the current module of the webui's X/Y/Z plot, which each reload makes again; None if there is none."""
    return next((data.module for data in getattr(scripts, "scripts_data", ())
                 if data.script_class.__module__ in ("xyz_grid.py", "scripts.xyz_grid")), None)  # fmt: skip


def has_setting_called(key: str) -> bool:
    """Tell whether SD.Next reads an infotext key of this name as one of its own settings; False in other webuis."""
    return any(name == key for name, _ in getattr(sys.modules.get("modules.infotext"), "mapping", ()))


def add_message(p: Any, processed: Any, text: str) -> None:
    """Add a line below the finished picture: to the result's comments, or to the job's if a selected script runs it."""
    arguments = getattr(p, "script_args", None)
    if not arguments or not arguments[0]:  # no script that the user selected, such as X/Y/Z plot, runs the job
        processed.comments = f"{getattr(processed, 'comments', '') or ''}{text}\n"
    elif hasattr(p, "comment"):
        p.comment(text)


class CallableReport(dict):
    """A dict with the report for API callers. It is callable, so that the webui does not write it into infotexts."""

    def __call__(self, **facts: Any) -> None:
        """Return None, so that the webui writes nothing into the infotext."""
