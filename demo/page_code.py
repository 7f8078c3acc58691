"""The page's settings as something to copy: a script, a webui's payload, a ComfyUI node, a link. Pure functions.

Every format holds resolved values and no preset's name, so that it means the same after presets have changed; but for
ComfyUI's, where a strength is the one number to go on with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from demo import page_hosts
from demo.page_controls import NAMES, SETTINGS, config_of, shown, values_of
from tome_core import MergeConfig, form, strength

DEFAULT_MODEL = "stable-diffusion-v1-5/stable-diffusion-v1-5"
_PICTURE = ("prompt", "seed", "steps")
_STRENGTHS = 20
_IN_LINK = {"merge_seed" if name in _PICTURE else name: name for name in NAMES}
SCRIPT = '''\
import torch
import tome_core
from diffusers import AutoPipelineForText2Image

pipe = AutoPipelineForText2Image.from_pretrained({model!r})
config = tome_core.MergeConfig({settings})
with tome_core.patch(pipe, config) as merging:
    generator = torch.Generator().manual_seed({seed})
    image = pipe({prompt!r}, num_inference_steps={steps}, generator=generator).images[0]
    print(merging.report())
image.save("merged.png")
'''


@dataclass(frozen=True)
class Wanted:
    """A picture and how to merge in it. seed: 0..2**31; steps: 1..1000."""

    prompt: str
    seed: int
    steps: int
    config: MergeConfig = MergeConfig()  # noqa: RUF009 - frozen


def differing(config: MergeConfig) -> dict[str, Any]:
    """The settings that are not at the engine's defaults."""
    return {name: config.value(name) for name in NAMES if config.value(name) != SETTINGS[name]["default"]}


def script(wanted: Wanted, model: str = DEFAULT_MODEL) -> str:
    """A Python program that makes the picture with diffusers; `model`: a diffusers folder or a model's name."""
    settings = "".join(f"\n    {name}={value!r}," for name, value in differing(wanted.config).items())
    settings += "\n" if settings else ""
    return SCRIPT.format(model=model, settings=settings, seed=wanted.seed, prompt=wanted.prompt, steps=wanted.steps)


def webui(wanted: Wanted) -> str:
    """JSON for a webui's /sdapi/v1/txt2img: the panel's values, by position."""
    host = page_hosts.webui()
    own = {"enabled": True, "preset": page_hosts.custom(host.field("preset").choices)}
    values = []
    for one in host.FIELDS:
        value = _in_a_hosts_words(one.name, one.engine, host.CHOICES, wanted.config) if one.engine else None
        values.append(own.get(one.name, one.default) if value is None else value)
    panel = {host.field("enabled").label: {"args": values}}
    picture = {"prompt": wanted.prompt, "seed": wanted.seed, "steps": wanted.steps}
    return json.dumps({**picture, "alwayson_scripts": panel}, indent=2)


def comfyui(config: MergeConfig) -> str:
    """The nodes as a prompt of ComfyUI's API has them: ApplyToMe as "5", whose model comes from node "4".

    With a strength where one stands for the config, else with a ToMeSettings.
    """
    settings = form.values_of(config)
    inputs = {"model": ["4", 0], **{name: settings.pop(name) for name in ("start", "end")}}
    value = _strength_of(config)
    if value is not None:
        return json.dumps({"5": {"class_type": "ApplyToMe", "inputs": {**inputs, "strength": value}}}, indent=2)
    nodes = {
        "5": {"class_type": "ApplyToMe", "inputs": {**inputs, "settings": ["6", 0]}},
        "6": {"class_type": "ToMeSettings", "inputs": settings},
    }
    return json.dumps(nodes, indent=2)


def _strength_of(config: MergeConfig) -> float | None:
    """The strength, in steps of the node's widget, whose config this is but for its times."""
    always = replace(config, start_percent=0.0, end_percent=1.0)
    return next((step / _STRENGTHS for step in range(_STRENGTHS + 1) if strength(step / _STRENGTHS) == always), None)


def lost(config: MergeConfig) -> dict[str, tuple[str, ...]]:
    """Host -> the settings that are not at their defaults and that the host has no control for."""
    known = {
        "webui": {one.engine for one in page_hosts.webui().FIELDS},
        "ComfyUI": {one.setting for one in form.FIELDS},
    }
    return {host: tuple(name for name in differing(config) if name not in names) for host, names in known.items()}


def _in_a_hosts_words(name: str, engine: str, choices: Mapping[str, Mapping[str, Any]], config: MergeConfig) -> Any:
    """What a host writes for a value of the engine; None where it has no word for it, and for None itself."""
    value = config.value(engine)
    if name in choices:
        return next((word for word, means in choices[name].items() if means == value), None)
    return value


def query(wanted: Wanted) -> str:
    """The query of a link that restores the page: the picture, the method, and what is not at the engine's default."""
    found = {"method": wanted.config.value("method"), **differing(wanted.config)}
    settings = {name: shown(engine, found[engine]) for name, engine in _IN_LINK.items() if engine in found}
    return urlencode({"prompt": wanted.prompt, "seed": wanted.seed, "steps": wanted.steps, **settings})


def from_query(parameters: Mapping[str, str], start: Wanted) -> Wanted:
    """What a link asks for. Settings that it leaves out are at the engine's defaults; all, and the picture, as `start`.

    Raises ValueError for a name that is none and for a setting that is not possible.
    """
    unknown = [name for name in parameters if name not in (*_PICTURE, *_IN_LINK)]
    if unknown:
        raise ValueError(f"the link's {unknown[0]!r} is no setting; there are {', '.join((*_PICTURE, *_IN_LINK))}")
    values = values_of(MergeConfig() if set(parameters) - set(_PICTURE) else start.config)
    for name, engine in _IN_LINK.items():
        if name in parameters:
            values[engine] = _read(engine, parameters[name])
    seed, steps = (_number(parameters.get(name, str(getattr(start, name)))) for name in ("seed", "steps"))
    return Wanted(parameters.get("prompt", start.prompt), seed, steps, config_of(values))


def _read(name: str, text: str) -> Any:
    """A control's value from a link's text."""
    default = SETTINGS[name]["default"]
    if isinstance(default, bool):
        return {"True": True, "False": False}.get(text, text)
    return text if "minimum" not in SETTINGS[name] else _number(text)


def _number(text: str) -> Any:
    """A whole number, a number, or the text itself, which is then refused by whoever checks it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
