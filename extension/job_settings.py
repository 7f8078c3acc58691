"""The settings of a job, read from the panel, the API's arguments, an X/Y/Z plot and the settings tab."""
# a strength decides every setting; expert settings, named as in the engine's form, replace single ones of them

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
    """The checked settings of one job."""

    enabled: bool = False
    strength: float = 0.5  # 0, off, to 1
    where: str = EVERYWHERE  # one of WHERE
    changes: Mapping[str, Any] = field(default_factory=dict)  # the form's values that differ from the strength's
    left_out: tuple[str, ...] = ()  # an error text for each setting that is not possible

    def config(self, hires: bool, seed: int = 0, curve: str = SD) -> MergeConfig | None:
        """Return the engine's settings for a pass; None if it is not to merge. `seed` is used in place of seed 0."""
        if not self.enabled or not self.strength or self.where == PASSES[not hires]:
            return None
        config = strength(self.strength, curve)
        if all(form.field(name).beside_strength for name in self.changes):
            config = form.change(config, self.changes)
        else:  # the form's settings: one rule, and that of whole blocks
            config = form.keep_possible(form.values_of(config) | dict(self.changes))[0]
        if config.is_off:
            return None
        return config if config.value("seed") else replace(config, seed=int(seed) & SEED_LIMIT)


class Unreadable(float):
    """The strength of an infotext that has none, with the reason. It is NaN, because the webui takes only a number."""

    reason = ""


def base_of(value: float, curve: str = SD) -> dict[str, Any]:
    """Return all expert settings for a strength, by name, rounded to three decimals; ValueError: it is not possible."""
    exact = form.values_of(strength(value, curve))
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in exact.items()}


def find_filled(own: Mapping[str, Any], value: float, curve: str) -> dict[str, Any]:
    """Return all values that the panel filled in for the strength `value`, before the user changed some to `own`."""
    # another model may have been loaded then, so the curve counts whose values differ in the fewest fields
    bases = [base_of(value, each) for each in dict.fromkeys((curve, SD, SDXL))]
    return min(bases, key=lambda base: sum(base[name] != current for name, current in own.items()))


def read(
    values: Sequence[Any], setting: Callable[[str], Any], plot: Mapping[str, Any] | None = None, curve: str = SD
) -> JobSettings:
    """Return the checked settings of a job. If "enabled" is False, they are ``JobSettings()``, and no value is checked.

    `values` are in the order of `ARGUMENTS`, or the first is a dict of names. In that order, expert settings count only
    if "own" is True; in a dict, which has no "own", they always do. An expert setting that is None, missing, or as the
    panel shows it for "filled_for" or "strength", in a model of this `curve`, follows the strength. `setting` returns
    the settings tab's value for a missing name of `DIAL`. Values of an X/Y/Z `plot`, by name, override all others. An
    impossible expert setting is listed in `JobSettings.left_out`. Any other wrong value raises ValueError, or TypeError
    for a wrong type. Too many values or an unknown name raise ValueError, even if "enabled" is False.
    """
    given, plot = _by_name(values), plot or {}
    dial = {name: setting(name) if given.get(name) is None else given[name] for name in DIAL}
    dial |= {name: value for name, value in plot.items() if name in DIAL}
    if dial["enabled"] is False:  # unused values are not checked
        return JobSettings()
    if not isinstance(dial["enabled"], bool):
        raise TypeError(f"enabled={dial['enabled']!r} is {type(dial['enabled']).__name__}; use true or false")
    if isinstance(dial["strength"], Unreadable):
        raise ValueError(dial["strength"].reason)
    own = {name: given[name] for name in form.NAMES if given.get(name) is not None}
    deviating = _deviating(own, given, curve) | {name: value for name, value in plot.items() if name in form.NAMES}
    return settings_of(dial["strength"], dial["where"], deviating, curve)


def settings_of(value: float, where: str, changes: Mapping[str, Any], curve: str = SD) -> JobSettings:
    """Return settings with merging on: the strength, and those changes that are possible and have an effect.

    `changes` has values that controls show, by the form's names. A change to the rounded value that the panel shows for
    the strength, in a model of this `curve`, has no effect. The tuple `JobSettings.left_out` has the error text of
    each impossible change. ValueError: the strength or `curve` is not possible, or `where` is not in `WHERE`.
    """
    base, shown = form.values_of(strength(value, curve)), base_of(value, curve)
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
    """Return `values` of `read` by name, those of a dict with "own": True; ValueError: too many, or unknown names."""
    if not values or not isinstance(values[0], Mapping):
        if len(values) > len(ARGUMENTS):
            raise ValueError(f"{len(values)} values were given; there are {len(ARGUMENTS)}: {', '.join(ARGUMENTS)}")
        return dict(zip(ARGUMENTS, values, strict=False))
    named = dict(values[0])
    unknown = [str(name) for name in named if name not in (*DIAL, *form.NAMES)]
    if unknown:
        raise ValueError(f"there is no {', '.join(unknown)} to set; there are: {', '.join((*DIAL, *form.NAMES))}")
    return {**named, EXPERT_SWITCH: True}


def _deviating(own: Mapping[str, Any], given: Mapping[str, Any], curve: str) -> dict[str, Any]:
    """Return the expert settings in `own` that differ from those filled in; {} if "own" is not True in `given`."""
    if given.get(EXPERT_SWITCH) is not True:
        return {}
    try:
        base = find_filled(own, given.get(FILLED_FOR), curve)
    except ValueError:  # no strength had filled them in, as with a dict of names
        return dict(own)
    return {name: value for name, value in own.items() if value != base[name]}
