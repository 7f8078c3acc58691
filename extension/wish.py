"""What a job wants, from the panel's values, the API's arguments, an X/Y/Z plot's and the settings.

A strength says everything; what an expert sets besides are deviations from it, by the form's names. Needs no webui.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..tome_core.hosting import SD, SDXL, SEED_LIMIT, MergeConfig, form, strength

TITLE = "Token Merging (ToMe)"
EVERYWHERE, FIRST, HIRES = WHERE = ("everywhere", "first pass", "hires pass")
PASSES = {False: FIRST, True: HIRES}  # by: is it the hires pass
DIAL = ("enabled", "strength", "where")
OWN = "own"  # the switch below which an expert's values count
FILLED_FOR = "filled_for"  # the strength that the expert's values were last filled in for, out of sight
ARGUMENTS = (*DIAL, OWN, FILLED_FOR, *form.NAMES)
DEFAULTS = {"enabled": False, "strength": 0.5, "where": EVERYWHERE}


@dataclass(frozen=True)
class Wish:
    """Checked values of one job. changes: from what the strength stands for; left_out: a sentence for each refused."""

    enabled: bool = False
    strength: float = 0.5
    where: str = EVERYWHERE
    changes: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def config(self, hires: bool, seed: int = 0, layout: str = SD) -> MergeConfig | None:
        """The engine's settings for a pass; None where it is left alone. seed: the image's; layout: the model's."""
        if not self.enabled or not self.strength or self.where == PASSES[not hires]:
            return None
        config = form.settle(form.values_of(strength(self.strength, layout)) | dict(self.changes))[0]
        if config.is_off:
            return None
        return config if config.value("seed") else replace(config, seed=int(seed) & SEED_LIMIT)


def base_of(value: float, layout: str = SD) -> dict[str, Any]:
    """What the form shows for a strength, by name, 0.859 for 0.859375. layout: of the model, see `strength`."""
    exact = form.values_of(strength(value, layout))
    return {name: round(one, 3) if isinstance(one, float) else one for name, one in exact.items()}


def find_filled(own: Mapping[str, Any], value: float, layout: str) -> dict[str, Any]:
    """What the fields were filled in with for a strength, before an expert set these of them otherwise.

    Another model may have been loaded then, or none: so it is the layout from which the fewest fields differ.
    """
    bases = [base_of(value, one) for one in dict.fromkeys((layout, SD, SDXL))]
    return min(bases, key=lambda base: sum(base[name] != one for name, one in own.items()))


def read(
    values: Sequence[Any], setting: Callable[[str], Any], plot: Mapping[str, Any] | None = None, layout: str = SD
) -> Wish:
    """What the values ask for, in the order of `ARGUMENTS`, or by their names in a dict in the first place.

    setting: what the settings say of a name of `DIAL`, where a value is None or missing. plot: by name, outweighs all.
    layout: of the model. Raises ValueError or TypeError, naming the value, the range and the remedy.
    """
    given, plot = _by_name(values), plot or {}
    dial = {name: setting(name) if given.get(name) is None else given[name] for name in DIAL}
    dial |= {name: value for name, value in plot.items() if name in DIAL}
    if dial["enabled"] is False:  # what is not used need not be right
        return Wish()
    if not isinstance(dial["enabled"], bool):
        raise TypeError(f"enabled={dial['enabled']!r} is {type(dial['enabled']).__name__}; use true or false")
    own = {name: given[name] for name in form.NAMES if given.get(name) is not None}
    deviating = _deviating(own, given, layout) | {name: value for name, value in plot.items() if name in form.NAMES}
    return wish_of(dial["strength"], dial["where"], deviating, layout)


def wish_of(value: float, where: str, changes: Mapping[str, Any], layout: str = SD) -> Wish:
    """A wish of a strength, and of those changes that are possible and change something. Raises as `read` does.

    What the form shows rounded for the strength is no change.
    """
    base, shown = form.values_of(strength(value, layout)), base_of(value, layout)
    changes = {name: one for name, one in changes.items() if one != shown[name]}
    if where not in WHERE:
        raise ValueError(f"where={where!r} is not possible; use one of {', '.join(WHERE)}")
    config, left_out = form.settle(base | dict(changes))
    found = form.values_of(config)
    possible = {name: value for name, value in changes.items() if found[name] == value}
    if len(possible) < len(changes):  # what is refused is as if it had not been said
        found = form.values_of(form.settle(base | possible)[0])
    told = tuple(sentence for sentence in left_out if sentence.partition("=")[0] in changes)
    deviations = {name: value for name, value in found.items() if value != base[name]}
    return Wish(True, float(value), where, deviations, told)


def _by_name(values: Sequence[Any]) -> dict[str, Any]:
    """The arguments by name. Those of a caller who names settings count as an expert's own."""
    if not values or not isinstance(values[0], Mapping):
        if len(values) > len(ARGUMENTS):
            raise ValueError(f"{len(values)} values were given; there are {len(ARGUMENTS)}: {', '.join(ARGUMENTS)}")
        return dict(zip(ARGUMENTS, values, strict=False))
    named = dict(values[0])
    unknown = [str(name) for name in named if name not in (*DIAL, *form.NAMES)]
    if unknown:
        raise ValueError(f"there is no {', '.join(unknown)} to set; there are: {', '.join((*DIAL, *form.NAMES))}")
    return {**named, OWN: True}


def _deviating(own: Mapping[str, Any], given: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """What an expert set: on the page all that differs from what it had filled in, which may be the last strength's."""
    if given.get(OWN) is not True:
        return {}
    try:
        base = find_filled(own, given.get(FILLED_FOR), layout)
    except ValueError:  # nobody filled anything in
        return dict(own)
    return {name: value for name, value in own.items() if value != base[name]}
