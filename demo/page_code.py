"""The page's settings as something to copy: a script, a webui's payload, a ComfyUI node, a link. Pure functions.

Each says the strength, and what was changed by hand beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlencode

from tome_core import MergeConfig, form
from tome_core import strength as config_of_strength
from tome_core.settings.presets import SD

DEFAULT_MODEL = "stable-diffusion-v1-5/stable-diffusion-v1-5"
WEBUI_TITLE = "Token Merging (ToMe)"
_NOT_IN_COMFYUI = ("merge_crossattn", "merge_mlp")  # its node has no such inputs
_IN_LINK = ("prompt", "seed", "steps", "strength", *form.NAMES)
SCRIPT = '''\
import torch
import tome_core
from diffusers import AutoPipelineForText2Image

pipe = AutoPipelineForText2Image.from_pretrained({model!r})
with tome_core.patch(pipe, {how}) as merging:
    generator = torch.Generator().manual_seed({seed})
    image = pipe({prompt!r}, num_inference_steps={steps}, generator=generator).images[0]
    print(merging.report())
image.save("merged.png")
'''


@dataclass(frozen=True)
class Wanted:
    """A picture and how to merge in it. seed: 0..2**31; steps: 1..1000; config: the strength's, or changed by hand.

    layout: of the model, which says what a strength stands for.
    """

    prompt: str
    seed: int
    steps: int
    strength: float
    config: MergeConfig
    layout: str = SD

    @classmethod
    def of_strength(cls, prompt: str, seed: int, steps: int, strength: float, layout: str = SD) -> Wanted:
        """Raises ValueError for what is no strength."""
        return cls(prompt, seed, steps, strength, config_of_strength(strength, layout=layout), layout)

    @property
    def picture(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "seed": self.seed, "steps": self.steps}

    @cached_property
    def changes(self) -> dict[str, Any]:
        """What was changed by hand: the form's values that are not the strength's, by name."""
        of_strength = form.values_of(config_of_strength(self.strength, layout=self.layout))
        return {name: value for name, value in form.values_of(self.config).items() if value != of_strength[name]}


def script(wanted: Wanted, model: str = DEFAULT_MODEL) -> str:
    """A Python program that makes the picture with diffusers; `model`: a diffusers folder or a model's name."""
    how = f"strength={wanted.strength!r}"
    if wanted.changes:  # then what is not at the engine's default, a line each
        values, default = form.values_of(wanted.config), form.values_of(MergeConfig())
        lines = "".join(f"\n    {one.setting}={one.read(values[one.name])!r}," for one in form.FIELDS
                        if values[one.name] != default[one.name])  # fmt: skip
        how = f"tome_core.MergeConfig({lines}\n)" if lines else "tome_core.MergeConfig()"
    return SCRIPT.format(model=model, how=how, **wanted.picture)


def webui(wanted: Wanted) -> str:
    """JSON for a webui's /sdapi/v1/txt2img: the panel's values by name."""
    panel = {"enabled": True, "strength": wanted.strength, **wanted.changes}
    return json.dumps({**wanted.picture, "alwayson_scripts": {WEBUI_TITLE: {"args": [panel]}}}, indent=2)


def comfyui(wanted: Wanted) -> str:
    """The nodes as a prompt of ComfyUI's API has them: ApplyToMe as "5", whose model comes from node "4".

    If more than its times was changed by hand, a ToMeSettings beside it says all that it knows.
    """
    settings = {name: value for name, value in form.values_of(wanted.config).items() if name not in _NOT_IN_COMFYUI}
    times = {name: settings.pop(name) for name in ("start", "end")}
    apply = {"model": ["4", 0], "strength": wanted.strength, **times}
    nodes = {"5": {"class_type": "ApplyToMe", "inputs": apply}}
    if set(wanted.changes) & set(settings):
        apply["settings"] = ["6", 0]
        nodes["6"] = {"class_type": "ToMeSettings", "inputs": settings}
    return json.dumps(nodes, indent=2)


def query(wanted: Wanted) -> str:
    """The query of a link that restores the page."""
    return urlencode({**wanted.picture, "strength": wanted.strength, **wanted.changes})


def from_query(parameters: Mapping[str, str], start: Wanted) -> Wanted:
    """What a link asks for; what it leaves out is as in `start`.

    Raises ValueError for a name that is none and for a value that is not possible.
    """
    unknown = [name for name in parameters if name not in _IN_LINK]
    if unknown:
        raise ValueError(f"the link's {unknown[0][:40]!r} is no setting; there are {', '.join(_IN_LINK)}")
    asked = {**start.picture, "strength": start.strength, **parameters}
    seed, steps, strength = (_number(str(asked[name])) for name in ("seed", "steps", "strength"))
    changes = {one.name: _read(one, parameters[one.name]) for one in form.FIELDS if one.name in parameters}
    return Wanted(asked["prompt"], seed, steps, strength, change(strength, start.layout, changes), start.layout)


def change(strength: float, layout: str, changes: Mapping[str, Any]) -> MergeConfig:
    """The strength's config with values of the form's in it. Raises ValueError for what is not possible."""
    try:
        return form.change(config_of_strength(strength, layout=layout), changes)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _read(field: form.Field, text: str) -> Any:
    """A control's value from a link's text."""
    if isinstance(field.default, bool):
        return {"True": True, "False": False}.get(text, text)
    return text if field.choices else _number(text)


def _number(text: str) -> Any:
    """A whole number, a number, or the text itself, which is then refused by whoever checks it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
