"""The inputs of ApplyToMe, made from the engine's own description of its settings.

Saved workflows know widgets by their position: new ones are only ever appended to `SETTINGS`. Every default but the
preset's is the engine's, because that is what an older workflow means that does not mention an input.
"""

from __future__ import annotations

from typing import Any

from .engine import tome_core

OFF, CUSTOM = "off", "custom"
PRESETS = (OFF, *tome_core.PRESETS, CUSTOM)
START = tome_core.presets.DEFAULT
UNSET = -1.0  # a number's way to say None
ROUND = 0.000001  # of a typed number: a preset has 0.984375
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
    "early_ratio": "early_ratio",
    "early_until": "early_until",
    "proportional": "proportional",
    "metric": "metric",
    "refine": "refine",
    "query_ratio": "query_ratio",
    "keep": "keep",
    "only_if_it_pays": "only_if_it_pays",
    "deep_mlp": "deep_mlp",
}
OWN = ("merge_seed", "min_pixels")  # presets leave them alone
# what people read -> what the engine takes
CHOICES = {
    "level": {"automatic": None, **{f"up to /{d}": d for d in (1, 2, 4, 8)}},
    "merge_what": {"automatic": None, "q+k+v": "qkv", "k+v": "kv", "q": "q"},
}
RATIO_HELP = " The early ratio and both MLP ratios count beside 0 as well."
LEVEL_HELP = (
    "Which resolutions of the UNet merge. Automatic is the finest that has attention: 64x64 tokens on SD1.5 at "
    "512 px, 32x32 on SDXL. Up to /2 is every block down-sampled at most twofold from the latent, and so on; up to "
    "/1 reaches nothing on SDXL."
)
PRESET_HELP = (
    "Quality changes the picture least, max saves the most time; balanced and fast lie between. Choosing one fills in "
    "the settings below, and changing one of them makes it custom. They merge at every level with tokens enough to "
    "gain by it. Off merges nothing. In a prompt without user interface a preset outweighs the settings beside it; "
    "custom takes them as they are."
)


def described() -> dict[str, dict[str, Any]]:
    """Each input's setting as the engine describes it."""
    settings = {setting["name"]: setting for setting in tome_core.describe_settings()}
    found = {name: dict(settings[setting]) for name, setting in SETTINGS.items()}
    found["level"] |= {"label": "Level", "help": LEVEL_HELP}
    found["ratio"]["help"] += RATIO_HELP
    for setting in found.values():
        if _can_be_unset(setting):
            text = f"{setting['help']} {UNSET:g} is {setting['unset']}."
            setting |= {"default": UNSET, "minimum": UNSET, "help": text}
    return found


def values_of(rule: Any) -> dict[str, Any]:
    """What the inputs are set to where they stand for this rule; without those that presets leave alone."""
    return {name: _input_value(name, getattr(rule, setting)) for name, setting in SETTINGS.items() if name not in OWN}


def input_types() -> dict[str, dict[str, tuple]]:
    """ComfyUI's INPUT_TYPES without the model. All but preset and ratio may be missing from a prompt."""
    widgets = {name: _widget(name, setting) for name, setting in described().items()}
    # ComfyUI passes on what it does not know: `web/presets.js` fills the widgets from it
    table = {name: values_of(tome_core.preset(name)) for name in tome_core.PRESETS}
    preset = (list(PRESETS), {"default": START, "display_name": "Preset", "tooltip": PRESET_HELP, "presets": table})
    return {"required": {"preset": preset, "ratio": widgets.pop("ratio")}, "optional": widgets}


def config_of(values: dict[str, Any]) -> Any:
    """The MergeConfig of a node's values, None for off; what is missing or None is the default.

    A preset outweighs the values beside it. Without one they count, as if it were custom.
    Raises ValueError or TypeError, with value, range and remedy, for what the engine refuses.
    """
    preset = values.get("preset")
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset={preset!r} is not known here; use one of {', '.join(PRESETS)}, or update this pack")
    if preset == OFF:
        return None
    if preset not in (None, CUSTOM):
        values = {**{name: values.get(name) for name in OWN}, **values_of(tome_core.preset(preset))}
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
    for label, side in CHOICES["merge_what"].items():
        text = text.replace(f"side={side!r}", f"merge_what={label!r}")
    text = text.replace("leave it at None", f"leave it at {UNSET:g}")
    head, remedy, choices = text.rpartition("; use one of ")
    if remedy:
        for label, side in CHOICES["merge_what"].items():
            choices = choices.replace(repr(side), repr(label))
    return head + remedy + choices


def _can_be_unset(setting: dict[str, Any]) -> bool:
    return setting["default"] is None and "minimum" in setting


def _input_value(name: str, value: Any) -> Any:
    """What people read for a value of the engine."""
    if name in CHOICES:
        return next(label for label, one in CHOICES[name].items() if one == value)
    return UNSET if value is None else value


def _engine_value(name: str, value: Any) -> Any:
    choices = CHOICES.get(name)
    if choices is None:
        return None if name in _MAY_BE_UNSET and _is_unset(value) else value
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} is not possible; use one of {', '.join(choices)}")
    return choices[value]


def _is_unset(value: Any) -> bool:
    return type(value) in (int, float) and value == UNSET


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
    return "FLOAT", facts | {"round": ROUND}


_MAY_BE_UNSET = tuple(name for name, setting in described().items() if setting["default"] == UNSET)
