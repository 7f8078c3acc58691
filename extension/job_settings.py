"""The settings of a job, read from the panel, the API's arguments, an X/Y/Z plot and the settings tab.

A strength decides every setting. Expert settings replace single settings of the strength, by the names of the engine's
form. A job has a first pass, and perhaps a hires pass (Hires. fix). This module does not need a webui.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..tome_core.hosting import SD, SDXL, SEED_LIMIT, MergeConfig, form, strength

TITLE = "Token Merging (ToMe)"
EVERYWHERE, FIRST, HIRES = WHERE = ("everywhere", "first pass", "hires pass")
PASSES = {False: FIRST, True: HIRES}  # by whether it is the hires pass
DIAL = ("enabled", "strength", "where")
EXPERT_SWITCH = "own"  # the switch that turns expert settings on
FILLED_FOR = "filled_for"  # hidden: the strength by which the expert settings were last filled in
ARGUMENTS = (*DIAL, EXPERT_SWITCH, FILLED_FOR, *form.NAMES)
DEFAULTS = {"enabled": False, "strength": 0.5, "where": EVERYWHERE}


@dataclass(frozen=True)
class JobSettings:
    """The checked settings of one job.

    Args:
        enabled: merging is on.
        strength: 0 to 1.
        where: one of `WHERE`.
        changes: expert settings that differ from those of the strength, by name.
        left_out: an error text for each setting that is not possible.
    """

    enabled: bool = False
    strength: float = 0.5
    where: str = EVERYWHERE
    changes: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def config(self, hires: bool, seed: int = 0, layout: str = SD) -> MergeConfig | None:
        """Return the engine's settings for a pass; None if the pass does not merge.

        Args:
            hires: True for the hires pass, False for the first.
            seed: the picture's seed, used if the settings have seed 0.
            layout: the model's layout, see `tome_core.strength`.
        """
        if not self.enabled or not self.strength or self.where == PASSES[not hires]:
            return None
        config = form.keep_possible(form.values_of(strength(self.strength, layout)) | dict(self.changes))[0]
        if config.is_off:
            return None
        return config if config.value("seed") else replace(config, seed=int(seed) & SEED_LIMIT)


def base_of(value: float, layout: str = SD) -> dict[str, Any]:
    """Return the values that the panel shows for a strength, by the form's names, rounded to three digits.

    Raises:
        ValueError: the strength is not possible.
    """
    exact = form.values_of(strength(value, layout))
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in exact.items()}


def find_filled(own: Mapping[str, Any], value: float, layout: str) -> dict[str, Any]:
    """Return the values that the panel filled in for a strength, before the user changed some of them.

    Another model may have been loaded then. So of `layout`, "sd" and "sdxl", that is used whose values differ in the
    fewest fields.

    Args:
        own: the current values, by name.
        value: the strength.
        layout: the loaded model's layout.

    Raises:
        ValueError: the strength is not possible.
    """
    bases = [base_of(value, each) for each in dict.fromkeys((layout, SD, SDXL))]
    return min(bases, key=lambda base: sum(base[name] != current for name, current in own.items()))


def read(
    values: Sequence[Any], setting: Callable[[str], Any], plot: Mapping[str, Any] | None = None, layout: str = SD
) -> JobSettings:
    """Read and check the values of a job.

    Args:
        values: in the order of `ARGUMENTS`, or a dict of names as the first value. An expert setting that is None or
            missing follows the strength.
        setting: returns the settings tab's "enabled", "strength" or "where"; used if that value is None or missing.
        plot: values of an X/Y/Z plot by name, which override all others.
        layout: the model's layout.

    Returns:
        The settings; the default ones, which do not merge, if "enabled" is False. No other value is then checked.

    Raises:
        ValueError: the strength or "where" is not possible, or the values are too many or have an unknown name. An
            impossible expert setting is listed in `JobSettings.left_out`.
        TypeError: a value has the wrong type.
    """
    given, plot = _by_name(values), plot or {}
    dial = {name: setting(name) if given.get(name) is None else given[name] for name in DIAL}
    dial |= {name: value for name, value in plot.items() if name in DIAL}
    if dial["enabled"] is False:  # unused values are not checked
        return JobSettings()
    if not isinstance(dial["enabled"], bool):
        raise TypeError(f"enabled={dial['enabled']!r} is {type(dial['enabled']).__name__}; use true or false")
    own = {name: given[name] for name in form.NAMES if given.get(name) is not None}
    deviating = _deviating(own, given, layout) | {name: value for name, value in plot.items() if name in form.NAMES}
    return settings_of(dial["strength"], dial["where"], deviating, layout)


def settings_of(value: float, where: str, changes: Mapping[str, Any], layout: str = SD) -> JobSettings:
    """Return settings with merging on: the strength, and those changes that are possible and have an effect.

    A change to the rounded value that the panel shows for the strength has no effect. An impossible change is listed in
    `JobSettings.left_out`.

    Args:
        value: the strength.
        where: one of `WHERE`.
        changes: expert settings by name.
        layout: the model's layout.

    Raises:
        ValueError: see `read`.
        TypeError: see `read`.
    """
    base, shown = form.values_of(strength(value, layout)), base_of(value, layout)
    changes = {name: change for name, change in changes.items() if change != shown[name]}
    if where not in WHERE:
        raise ValueError(f"where={where!r} is not possible; use one of {', '.join(WHERE)}")
    config, left_out = form.keep_possible(base | dict(changes))
    settled = form.values_of(config)
    possible = {name: change for name, change in changes.items() if settled[name] == change}
    if len(possible) < len(changes):  # an impossible change must not affect the others
        settled = form.values_of(form.keep_possible(base | possible)[0])
    reasons = tuple(sentence for sentence in left_out if sentence.partition("=")[0] in changes)
    deviations = {name: final for name, final in settled.items() if final != base[name]}
    return JobSettings(True, float(value), where, deviations, reasons)


def _by_name(values: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of `read` by name. To a dict of names, the switch of the expert settings is added as on.

    Raises:
        ValueError: there are too many values, or a name is not known.
    """
    if not values or not isinstance(values[0], Mapping):
        if len(values) > len(ARGUMENTS):
            raise ValueError(f"{len(values)} values were given; there are {len(ARGUMENTS)}: {', '.join(ARGUMENTS)}")
        return dict(zip(ARGUMENTS, values, strict=False))
    named = dict(values[0])
    unknown = [str(name) for name in named if name not in (*DIAL, *form.NAMES)]
    if unknown:
        raise ValueError(f"there is no {', '.join(unknown)} to set; there are: {', '.join((*DIAL, *form.NAMES))}")
    return {**named, EXPERT_SWITCH: True}


def _deviating(own: Mapping[str, Any], given: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """Return the expert settings that differ from those that a strength had filled in; {} if the switch is off.

    All of them if `given` has no possible strength that filled them in, as with a dict of names.

    Args:
        own: the expert settings, by name.
        given: all arguments, by name.
        layout: the model's layout.
    """
    if given.get(EXPERT_SWITCH) is not True:
        return {}
    try:
        base = find_filled(own, given.get(FILLED_FOR), layout)
    except ValueError:  # no strength had filled them in
        return dict(own)
    return {name: value for name, value in own.items() if value != base[name]}
