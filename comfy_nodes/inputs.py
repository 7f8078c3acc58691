"""The inputs of ApplyToMe and of ToMeSettings, made from the engine's own description of its settings.

ComfyUI checks what is typed or comes in a prompt by the ranges and choices here, and marks the one input that is wrong.
Nothing here refuses a prompt: what no range can tell ends in a sentence. Saved workflows know widgets by their
position: new ones are only ever appended. Every default is the engine's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .engine import tome_core

SETTINGS_TYPE = "TOME_SETTINGS"  # of the link from ToMeSettings to ApplyToMe: a MergeConfig
MARKS = tome_core.presets.MARKS
STRENGTH = MARKS[tome_core.presets.DEFAULT]
UNSET = -1.0  # a number's way to say None
ROUND = 0.000001  # of a typed number: a strength's rule has 0.984375
# input -> setting of the engine, in the order of the node: what others depend on stands before them
SETTINGS = {
    "ratio": "ratio",
    "level": "max_downsample",
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
TIMES = {"start": "start_percent", "end": "end_percent"}  # of ApplyToMe
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
STRENGTH_HELP = (
    f"How much of the picture may change for how much time. 0 is off, bit for bit; "
    f"{', '.join(f'{value:g} is {name}' for name, value in MARKS.items())}. Not used where settings are connected."
)
SETTINGS_HELP = (
    "From a ToMe Settings node: every setting by itself, in the strength's place. Start and end still count. Leave it "
    "open to go by strength."
)


def described() -> dict[str, dict[str, Any]]:
    """Each input of ToMeSettings, and both times, as the engine describes its setting."""
    settings = {setting["name"]: setting for setting in tome_core.describe_settings()}
    found = {name: dict(settings[setting]) for name, setting in (SETTINGS | TIMES).items()}
    found["level"] |= {"label": "Level", "help": LEVEL_HELP}
    found["ratio"]["help"] += RATIO_HELP
    for setting in found.values():
        if _can_be_unset(setting):
            text = f"{setting['help']} {UNSET:g} is {setting['unset']}."
            setting |= {"default": UNSET, "minimum": UNSET, "help": text}
    return found


def values_of(rule: Any) -> dict[str, Any]:
    """What the inputs of ToMeSettings are set to where they stand for this rule."""
    return {name: _input_value(name, getattr(rule, setting)) for name, setting in SETTINGS.items()}


def strength_types() -> dict[str, tuple]:
    """ApplyToMe's inputs beside the model."""
    facts = {"default": STRENGTH, "min": 0.0, "max": 1.0, "step": 0.05, "round": ROUND}
    strength = ("FLOAT", {**facts, "display_name": "Strength", "tooltip": STRENGTH_HELP})
    times = {name: _widget(name, described()[name]) for name in TIMES}
    settings = (SETTINGS_TYPE, {"display_name": "Settings", "tooltip": SETTINGS_HELP})
    return {"strength": strength, **times, "settings": settings}


def settings_types() -> dict[str, tuple]:
    """ToMeSettings' inputs."""
    settings = described()
    return {name: _widget(name, settings[name]) for name in SETTINGS}


def config_of(strength: Any, start: Any, end: Any, settings: Any = None) -> Any:
    """The MergeConfig of ApplyToMe's values, None where it merges nothing. settings: take the strength's place.

    Raises ValueError or TypeError, with value, range and remedy, for what the engine refuses.
    """
    if settings is None:
        rules = (tome_core.strength(strength),)
    elif isinstance(settings, tome_core.MergeConfig):
        rules = settings.rules
    else:
        raise TypeError(f"settings is {type(settings).__name__}; connect a ToMe Settings node, or leave it open")
    try:
        rules = tuple(replace(rule, start_percent=start, end_percent=end) for rule in rules)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("_percent=", "=")) from None
    return None if all(rule.is_off for rule in rules) else tome_core.MergeConfig(rules=rules)


def rule_of(values: dict[str, Any]) -> tuple[Any, list[str]]:
    """The rule of ToMeSettings' values; and a sentence for each that was left out, because the engine refuses it.

    What is missing, None or left out is the default. Of settings that do not go together the later one is left out, so
    that choosing another method is no mistake.
    """
    rule, left_out = tome_core.MergeRule(), []
    for name, setting in SETTINGS.items():
        value = values.get(name)
        if value is None:
            continue
        try:
            asked = _engine_value(name, value)
            try:
                rule = replace(rule, **{setting: asked})
            except (TypeError, ValueError) as error:
                raise ValueError(str(error).replace(f"{setting}={asked!r}", f"{name}={value!r}", 1)) from None
        except ValueError as error:
            left_out.append(_in_the_nodes_words(str(error)))
    return rule, left_out


def _in_the_nodes_words(text: str) -> str:
    """The engine's message, with the inputs' choices in the place of its own."""
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
