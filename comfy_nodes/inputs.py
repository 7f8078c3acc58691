"""The inputs of ApplyToMe and of ToMeSettings, made from the engine's form.

ComfyUI checks what is typed or comes in a prompt by the ranges and choices here, and marks the one input that is wrong.
Nothing here refuses a prompt: what no range can tell ends in a sentence. Saved workflows know widgets by their
position: new ones are only ever appended. Every default is the engine's.
"""

from __future__ import annotations

from typing import Any

from .host import hosting

form = hosting.form
SETTINGS_TYPE = "TOME_SETTINGS"  # of the link from ToMeSettings to ApplyToMe: a MergeConfig
STRENGTH = hosting.MARKS[hosting.DEFAULT]
ROUND = 0.000001  # of a typed number: a strength's rule has 0.984375
TIMES = ("start", "end")  # of ApplyToMe; all other fields are ToMeSettings'
_NOT_HERE = ("merge_crossattn", "merge_mlp")  # nothing in the slot can merge these parts
SETTINGS = tuple(name for name in form.NAMES if name not in (*TIMES, *_NOT_HERE))
STRENGTH_HELP = "Higher is faster and changes the picture more. 0 is off."
SETTINGS_HELP = "From ToMe Settings: every setting by itself, in place of the strength."


def strength_types() -> dict[str, tuple]:
    """ApplyToMe's inputs beside the model."""
    facts = {"default": STRENGTH, "min": 0.0, "max": 1.0, "step": 0.05, "round": ROUND}
    strength = ("FLOAT", {**facts, "display_name": "strength", "tooltip": STRENGTH_HELP})
    settings = (SETTINGS_TYPE, {"display_name": "settings", "tooltip": SETTINGS_HELP})
    times = {name: _widget(form.field(name)) for name in TIMES}
    return {"strength": strength, **times, "settings": settings}


def settings_types() -> dict[str, tuple]:
    """ToMeSettings' inputs."""
    return {name: _widget(form.field(name)) for name in SETTINGS}


def config_of(strength: Any, start: Any, end: Any, settings: Any = None, layout: str = "sd") -> Any:
    """The MergeConfig of ApplyToMe's values, None where it merges nothing. settings: take the strength's place.

    layout: of the model. Raises ValueError or TypeError, with value, range and remedy, for what the engine refuses.
    """
    if settings is None:
        config = hosting.strength(strength, layout=layout)
    elif isinstance(settings, hosting.MergeConfig):
        config = settings
    else:
        raise TypeError(f"settings is {type(settings).__name__}; connect a ToMe Settings node, or leave it open")
    config = form.change(config, {"start": start, "end": end})
    return None if config.is_off else config


def _widget(field: Any) -> tuple:
    facts = {"default": field.default, "display_name": field.label.lower(), "tooltip": field.help}
    if field.advanced:
        facts["advanced"] = True
    if field.choices:
        return list(field.choices), facts
    if isinstance(field.default, bool):
        return "BOOLEAN", facts
    facts |= {"min": field.minimum, "max": field.maximum, "step": field.step}
    if isinstance(field.step, int):
        return "INT", facts
    return "FLOAT", facts | {"round": ROUND}
