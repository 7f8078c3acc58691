"""Settings drawn at random from what describes them: for the engine, and for ComfyUI's nodes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from comfy_nodes.inputs import SETTINGS
from tome_core import MergeConfig, describe_settings, form

DESCRIBED = {setting["name"]: setting for setting in describe_settings()}
WRONG = (-1, 2**70, float("nan"), float("inf"), "x", "", None, [], {}, (1,), 1e300, True, b"", object())


def any_value(dice: random.Random, setting: dict[str, Any]) -> Any:
    """Any value in the setting's range; whether it goes with other settings is not asked."""
    if "choices" in setting:
        return dice.choice(setting["choices"])
    if isinstance(setting["default"], bool):
        return dice.random() < 0.5
    if setting["default"] is None and dice.random() < 0.5:
        return None
    low, high = setting["minimum"], setting["maximum"]
    return dice.randint(low, high) if isinstance(setting["step"], int) else dice.uniform(low, high)


def any_config(dice: random.Random, rules: int = 1) -> MergeConfig:
    """Half of the settings at random, the rest as they are by default; drawn again where they do not go together."""
    while True:
        names = [name for name in DESCRIBED if dice.random() < 0.5]
        try:
            config = MergeConfig(**{name: any_value(dice, DESCRIBED[name]) for name in names})
            if rules > 1:
                config = replace(config, rules=(*config.rules, *any_config(dice, rules - 1).rules))
            return config
        except ValueError:
            continue


def node_values(dice: random.Random) -> dict[str, Any]:
    """Widgets of ToMeSettings; not all of them go together, which the node then says."""
    fields = [form.field(name) for name in SETTINGS if dice.random() < 0.5]
    return {one.name: dice.choice(one.choices) if one.choices else any_value(dice, DESCRIBED[one.setting])
            for one in fields}  # fmt: skip
