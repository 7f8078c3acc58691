"""The inputs of ApplyToMe and ToMeSettings, generated from the engine's form. ComfyUI marks values that do not fit."""
# saved workflows identify widgets by position, so new inputs are appended; every default is the engine's

from typing import Any

from .host import hosting

form = hosting.form
SETTINGS_TYPE = "TOME_SETTINGS"  # the type of the link from ToMeSettings to ApplyToMe, a MergeConfig
STRENGTH = hosting.MARKS[hosting.DEFAULT]
ROUND = 0.000001  # rounding of typed numbers, which keeps a ratio such as 0.984375
TIMES = ("start", "end")  # fields of ApplyToMe; all others belong to ToMeSettings
_NOT_HERE = ("merge_crossattn", "merge_mlp")  # the attention slot cannot merge these parts
SETTINGS = tuple(name for name in form.NAMES if name not in (*TIMES, *_NOT_HERE))
STRENGTH_HELP = ("Higher takes less time and changes the picture more; fine texture goes first. Begin with 0.5. "
                 "Take 0.25 if details suffer, 0.75 or 1 if time matters more. 0 is off.")  # fmt: skip
SETTINGS_HELP = "From ToMe Settings: all settings. They replace the strength."


def strength_types() -> dict[str, tuple]:
    """Return the types of ApplyToMe's strength, start, end and settings, by name: (type, options of the input)."""
    facts = {"default": STRENGTH, "min": 0.0, "max": 1.0, "step": 0.05, "round": ROUND}
    strength = ("FLOAT", {**facts, "display_name": "strength", "tooltip": STRENGTH_HELP})
    settings = (SETTINGS_TYPE, {"display_name": "settings", "tooltip": SETTINGS_HELP})
    times = {name: _widget(form.field(name)) for name in TIMES}
    return {"strength": strength, **times, "settings": settings}


def settings_types() -> dict[str, tuple]:
    """Return the types of ToMeSettings' inputs, by name: (type or choices, options of the widget)."""
    return {name: _widget(form.field(name)) for name in SETTINGS}


def config_of(strength: Any, start: Any, end: Any, settings: Any = None, curve: str = "sd") -> Any:
    """Return the MergeConfig of ApplyToMe's values; None if it merges nothing. Raises ValueError or TypeError.

    `settings`, a MergeConfig or None, replace `strength` and `curve`, but not `start` and `end`.
    """
    if settings is None:
        config = hosting.strength(strength, curve=curve)
    elif isinstance(settings, hosting.MergeConfig):
        config = settings
    else:
        raise TypeError(f"settings is {type(settings).__name__}; connect a ToMe Settings node, or connect nothing")
    config = form.change(config, {"start": start, "end": end})
    return None if config.is_off else config


def _widget(field: Any) -> tuple:
    """Return the input type of a field of the engine's form: (type or choices, options of the widget)."""
    facts = {"default": field.default, "display_name": field.label.lower(), "tooltip": field.help}
    if field.advanced:
        facts["advanced"] = True
    if field.choices:
        return list(field.choices), facts
    if isinstance(field.default, bool):
        return "BOOLEAN", facts
    facts |= {"min": field.minimum, "max": field.maximum, "step": field.step}
    return ("INT", facts) if isinstance(field.step, int) else ("FLOAT", facts | {"round": ROUND})
