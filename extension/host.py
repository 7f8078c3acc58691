"""All that is asked of the webui, which may be a fork: the only file here that knows its modules."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from modules import script_callbacks, scripts, shared
from torch import nn

from ..tome_core.hosting import SD, find_unet, is_kind, layout_of
from . import sdnext

Script = scripts.Script
ALWAYS_VISIBLE = scripts.AlwaysVisible
HAS_SAMPLING_HOOK = hasattr(scripts.Script, "process_before_every_sampling")  # SD.Next alone has none
_WRITING = getattr(sys.modules.get("modules.processing"), "create_infotext", None)
CALLS_FACTS = "callable" in getattr(getattr(_WRITING, "__code__", None), "co_names", ())  # and writes what comes of it
HYPERTILE = "__webui_hypertile_params"  # on each attention that A1111's HyperTile has wrapped, for good
_BUILT_IN = "get_token_merging_ratio"
STAND_INS = (_BUILT_IN, sdnext.INIT_HIRES)  # methods of a job that may be ours for the time of it


def set_up_console(name: str) -> None:
    """Let our loggers, below ``name``, be heard from INFO up; the webui's may be silent below warnings. Idempotent."""
    ours, handler = logging.getLogger(name), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("ToMe: %(message)s"))
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(logging.INFO)


def listen(**callbacks: Callable) -> None:
    """Be called back: ``cfg_denoiser=f`` is ``script_callbacks.on_cfg_denoiser(f)``, where a webui has that."""
    for name, function in callbacks.items():
        register = getattr(script_callbacks, f"on_{name}", None)
        if register is not None:
            register(function)


def option(key: str, default: Any) -> Any:
    """A saved setting; the default where the settings were never built (API without user interface)."""
    value = getattr(getattr(shared, "opts", None), key, default)
    return default if value is None else value


def add_option(
    key: str, default: Any, label: str, help: str, arguments: dict[str, Any], section: tuple[str, str]
) -> None:
    """Put a setting into the settings tab. arguments: of its radio or slider; none for what suits the default."""
    import gradio

    made = gradio.Radio if "choices" in arguments else gradio.Slider if arguments else None
    info = shared.OptionInfo(default, label, made, arguments or None, section=section).info(help)
    info.category_id = "sd"  # with Optimizations, in A1111 and the Forges
    shared.opts.add_option(key, info)
    shared.opts.data.setdefault(key, default)  # after a request the webuis put back only what was saved once


def running_unet(p: Any) -> Any:
    """The UNet that samples now, in whichever of the webuis."""
    model = _running_model(p)
    objects = getattr(model, "forge_objects", None)
    return find_unet(model if objects is None else objects.unet.model)


def loaded_unet() -> Any | None:
    """The UNet of the model that is loaded; None where there is none, or none that we know."""
    data = getattr(sys.modules.get("modules.sd_models"), "model_data", None)
    if data is not None and data.sd_model is None:  # asking the webui for its model would load it
        return None
    try:
        return running_unet(None)
    except (AttributeError, TypeError, ValueError):
        return None


def layout(unet: Any = None) -> str:
    """Whose strengths a UNet has, or that of the loaded model; see `tome_core.strength`. SD's where it is not known."""
    try:
        return layout_of(loaded_unet() if unet is None else unet)
    except (TypeError, ValueError):
        return SD


def on_the_card(function: Callable[[], Any]) -> Any:
    """The function's result, run as a job is: alone, on its thread. Raises RuntimeError while a job goes on."""
    lock = getattr(sys.modules.get("modules.call_queue"), "queue_lock", None) or threading.Lock()
    if not lock.acquire(blocking=False):
        raise RuntimeError("a picture is being made; measure when it is done")
    done: Future = Future()

    def run() -> None:
        try:
            done.set_result(_in_its_place(function))
        except Exception as error:  # which Forge's main thread would swallow
            done.set_exception(error)

    try:
        main = sys.modules.get("modules_forge.main_thread")
        run() if main is None else main.run_and_wait_result(run)
    finally:
        lock.release()
    return done.result(timeout=0)


def _in_its_place(function: Callable[[], Any]) -> Any:
    names = ("backend.memory_management", "ldm_patched.modules.model_management")  # Forge's, reForge's
    memory = next((sys.modules[name] for name in names if name in sys.modules), None)
    objects = getattr(shared.sd_model, "forge_objects", None)
    if memory is not None and objects is not None:
        memory.load_model_gpu(objects.unet)
    with autocast():
        return function()


def _running_model(p: Any) -> Any:
    model = getattr(p, "sd_model", None)
    return shared.sd_model if model is None or sdnext.is_pipeline(model) else model


def running_pipeline(p: Any) -> sdnext.RunningPipeline | None:
    """Whichever pipeline samples now, in SD.Next; None in the others, whose models are none."""
    return sdnext.RunningPipeline(lambda: shared.sd_model) if sdnext.is_pipeline(_running_model(p)) else None


def reason_to_step_aside(hires: bool) -> str | None:
    """Why the UNet's attention must be left alone in this pass; None where nothing speaks against it."""
    if getattr(sys.modules.get("modules.sd_unet"), "current_unet", None) is not None:
        return "an SdUnet (such as TensorRT) computes in place of the UNet's own blocks"
    if option("hypertile_enable_unet", False) or (hires and option("hypertile_enable_unet_secondpass", False)):
        return sdnext.TILED
    return sdnext.reason_to_step_aside(option, hires)


def reason_of_unet(unet: nn.Module) -> str | None:
    """The same, of what is on the UNet as a pass begins: HyperTile of a hires pass stays on until its job ends."""
    return sdnext.TILED if any(getattr(vars(one).get(HYPERTILE), "enabled", False) for one in unet.modules()) else None


def read_time(params: Any) -> dict[str, float]:
    """The step's time by name, sigma or timestep. Waits for the device where that has it."""
    value = max(0.0, float(params.sigma.reshape(-1)[0]))  # UniPC's last may be just below
    denoiser = getattr(params, "denoiser", None)
    # DDIM, PLMS and UniPC count in timesteps, which Forge has turned into sigmas by now
    counts = is_kind(denoiser, "CFGDenoiserTimesteps") and not getattr(denoiser, "classic_ddim_eps_estimation", False)
    return {"timestep" if counts else "sigma": value}


def beside(p: Any, params: Any) -> list[Any]:
    """Shapes of the texts of a denoiser's call, and names of what else infotexts and the Forges' patchers tell of."""
    texts = (getattr(params, name, None) for name in ("text_cond", "text_uncond"))
    shapes = [getattr(one.get("crossattn") if isinstance(one, dict) else one, "shape", None) for one in texts]
    options = getattr(_patcher(p), "model_options", {}).get("transformer_options", {})
    names = {*map(str, [*(p.extra_generation_params or ()), *options, *options.get("patches", ())])}
    return [*shapes, *sorted(one for one in names if not one.startswith("ToMe"))]


def _patcher(p: Any) -> Any:
    return getattr(getattr(_running_model(p), "forge_objects", None), "unet", None)


def is_stopped() -> bool:
    """Has the user ended the job, or skipped this picture?"""
    return any(getattr(getattr(shared, "state", None), name, False) for name in ("interrupted", "skipped"))


def relative(p: Any, time: dict[str, float]) -> dict[str, float]:
    """The same time, its sigma as if pictures varied by 1, which A1111 takes them to do always."""
    model = getattr(_patcher(p), "model", None)
    prediction = getattr(model, "predictor", None) or getattr(model, "model_sampling", None)
    data = getattr(prediction, "sigma_data", 1.0)
    return {name: value / data if name == "sigma" else value for name, value in time.items()}


def through_hypernetworks(tokens: Any) -> tuple[Any, Any]:
    """What the loaded hypernetworks make of tokens ``[B, N, C]`` before keys and values are projected from them."""
    known = sys.modules.get("modules.hypernetworks.hypernetwork")
    loaded = getattr(shared, "loaded_hypernetworks", None)
    return known.apply_hypernetworks(loaded, tokens) if known is not None and loaded else (tokens, tokens)


def gains_file() -> str | None:
    """For what was measured, where the webui keeps what it can do without; None where it tells of no such place."""
    data = getattr(sys.modules.get("modules.paths_internal"), "data_path", None)
    if data is None:
        return None
    return os.path.join(os.environ.get("SD_WEBUI_CACHE_DIR", os.path.join(data, "cache")), "tome_core_gains.json")


def autocast() -> AbstractContextManager:
    """The precision in which the webui samples."""
    devices = sys.modules.get("modules.devices")
    context = getattr(devices, "without_autocast" if getattr(devices, "unet_needs_upcast", False) else "autocast", None)
    return nullcontext() if context is None else context()


def has_hires(p: Any) -> bool:
    """Will there be a hires pass?"""
    return bool(getattr(p, "enable_hr", False))


def size_of(p: Any, hires: bool) -> tuple[int, int]:
    """Width and height of a pass in pixels; 0 where they are not known."""
    names = ("hr_upscale_to_x", "hr_upscale_to_y") if hires else ("width", "height")
    return tuple(int(getattr(p, name, 0) or 0) for name in names)


def hires_size(width: int, height: int, scale: float, resize_x: int, resize_y: int) -> tuple[int, int]:
    """What the webui makes of the controls of Hires. fix."""
    from modules.processing import StableDiffusionProcessingTxt2Img as Job

    asked = {"width": width, "height": height, "hr_scale": scale, "hr_resize_x": resize_x, "hr_resize_y": resize_y}
    if hasattr(Job, sdnext.INIT_HIRES):  # SD.Next's, of which none is made for this
        p = SimpleNamespace(**asked, hr_upscaler="", hr_sampler_name="")
        Job.init_hr(p)
    else:
        p = Job(**asked, enable_hr=True)
        p.calculate_target_resolution()
    return size_of(p, hires=True)


def silence_built_in(p: Any, silences: Callable[[Any, bool], bool]) -> None:
    """Turn the webui's own token merging, and its infotext, off in passes of this job that ``silences(p, hires)``."""
    this = weakref.ref(p)

    def ratio(for_hr: bool = False) -> float:
        job = this()
        own = 0.0 if job is None else built_in_ratio(job, for_hr)
        return 0 if own and silences(job, for_hr) else own

    setattr(p, _BUILT_IN, ratio)


def built_in_ratio(p: Any, hires: bool) -> float:
    """The ratio of the webui's own token merging in a pass, as if we were not there; 0 is off."""
    own = getattr(type(p), _BUILT_IN, None)
    return 0.0 if own is None else own(p, for_hr=hires) or 0.0


def plot_module() -> Any | None:
    """The module of the X/Y/Z plot, which the webui runs anew at each reload."""
    return next((one.module for one in getattr(scripts, "scripts_data", ())
                 if one.script_class.__module__ in ("xyz_grid.py", "scripts.xyz_grid")), None)  # fmt: skip


def accordion(is_on: bool, label: str, elem_id: str) -> Any:
    """A context whose result is a checkbox, folded out while it is checked."""
    from modules.ui_components import InputAccordion

    return InputAccordion(is_on, label=label, elem_id=elem_id)


def has_setting_called(key: str) -> bool:
    """Would the webui take this key of a pasted infotext for one of its own settings?"""
    return any(name == key for name, _ in getattr(sys.modules.get("modules.infotext"), "mapping", ()))


def add_message(p: Any, processed: Any, text: str) -> None:
    """Put a line under the finished picture, or under whatever a script that somebody selected makes of this job."""
    if not is_of_script(p):
        processed.comments = f"{getattr(processed, 'comments', '') or ''}{text}\n"
    elif hasattr(p, "comment"):
        p.comment(text)


class Fact(dict):
    """For API callers, who get no comments. It may lie among a job's own facts: if called it stays out of infotexts."""

    def __call__(self, **facts: Any) -> None:
        """Nothing to write."""


def is_of_script(p: Any) -> bool:
    """Does a script that somebody selected run this job? It goes on with the job's pictures, and makes the result."""
    arguments = getattr(p, "script_args", None)
    return bool(arguments and arguments[0])
