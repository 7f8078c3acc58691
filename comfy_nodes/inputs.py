"""The inputs of ApplyToMe, made from the engine's own description of its settings.

Saved workflows know widgets by their position: new ones are only ever appended to `SETTINGS`.
"""

from __future__ import annotations

from typing import Any

from .engine import tome_core

PRESETS = ("custom",)
# input -> setting of the engine, in the order of the node
SETTINGS = {
    "ratio": "ratio",
    "level": "max_downsample",
    "start_percent": "start_percent",
    "end_percent": "end_percent",
    "min_pixels": "min_pixels",
    "method": "method",
    "merge_what": "side",
    "merge_crossattn": "merge_crossattn",
    "merge_mlp": "merge_mlp",
    "sx": "sx",
    "sy": "sy",
    "use_rand": "use_rand",
    # not `seed`: ComfyUI gives a widget of that name a randomising control, which would sample anew every time
    "merge_seed": "seed",
}
# what people read -> what the engine takes
CHOICES = {
    "level": {"automatic": None, **{f"up to /{d}": d for d in (1, 2, 4, 8)}},
    "merge_what": {"automatic": None, "q+k+v": "qkv", "k+v": "kv", "q": "q"},
}
LEVEL_HELP = (
    "Which resolutions of the UNet merge. Automatic is the finest that has attention: 64x64 tokens on SD1.5 at "
    "512 px, 32x32 on SDXL. Up to /2 is every block down-sampled at most twofold from the latent, and so on; up to "
    "/1 reaches nothing on SDXL."
)
PRESET_HELP = "Custom: the settings below."


def described() -> dict[str, dict[str, Any]]:
    """Each input's setting as the engine describes it."""
    settings = {setting["name"]: setting for setting in tome_core.describe_settings()}
    found = {name: dict(settings[setting]) for name, setting in SETTINGS.items()}
    found["level"] |= {"label": "Level", "help": LEVEL_HELP}
    return found


def input_types() -> dict[str, dict[str, tuple]]:
    """ComfyUI's INPUT_TYPES without the model. All but preset and ratio may be missing from a prompt."""
    widgets = {name: _widget(name, setting) for name, setting in described().items()}
    preset = (list(PRESETS), {"default": PRESETS[0], "display_name": "Preset", "tooltip": PRESET_HELP})
    return {"required": {"preset": preset, "ratio": widgets.pop("ratio")}, "optional": widgets}


def config_of(values: dict[str, Any]) -> Any:
    """The MergeConfig of a node's values; what is missing or None is the default.

    Raises ValueError or TypeError, with value, range and remedy, for what the engine refuses.
    """
    preset = values.get("preset")
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset={preset!r} is not known here; use one of {', '.join(PRESETS)}, or update this pack")
    known = {name: value for name, value in values.items() if name in SETTINGS and value is not None}
    asked = {name: _engine_value(name, value) for name, value in known.items()}
    try:
        return tome_core.MergeConfig(**{SETTINGS[name]: value for name, value in asked.items()})
    except (TypeError, ValueError) as error:
        raise type(error)(_in_the_nodes_words(str(error), known, asked)) from None


def _in_the_nodes_words(text: str, known: dict[str, Any], asked: dict[str, Any]) -> str:
    """The engine's message, with the inputs' names and choices in the place of its own."""
    for name, value in known.items():
        text = text.replace(f"{SETTINGS[name]}={asked[name]!r}", f"{name}={value!r}", 1)
    head, remedy, choices = text.rpartition("; use one of ")
    if remedy:
        for label, side in CHOICES["merge_what"].items():
            choices = choices.replace(repr(side), repr(label))
    return head + remedy + choices


def _engine_value(name: str, value: Any) -> Any:
    choices = CHOICES.get(name)
    if choices is None:
        return value
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} is not possible; use one of {', '.join(choices)}")
    return choices[value]


def _widget(name: str, setting: dict[str, Any]) -> tuple:
    facts = {"default": setting["default"], "display_name": setting["label"], "tooltip": setting["help"]}
    if setting.get("advanced"):
        facts["advanced"] = True
    if name in CHOICES:
        return list(CHOICES[name]), facts | {"default": next(iter(CHOICES[name]))}
    if "choices" in setting:
        return list(setting["choices"]), facts
    if isinstance(setting["default"], bool):
        return "BOOLEAN", facts
    facts |= {"min": setting["minimum"], "max": setting["maximum"], "step": setting["step"]}
    if isinstance(setting["step"], int):
        return "INT", facts
    return "FLOAT", facts | {"round": min(0.01, setting["step"])}
