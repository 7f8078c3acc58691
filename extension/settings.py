"""What a user can set, from the engine's own description, and what a list of such values asks for.

Scripts and API callers know the values by their position in `FIELDS`: new ones are only ever appended. Every default
but the preset's is the engine's, because that is what a short list or an older infotext means where it is silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..tome_core import PRESETS, MergeConfig, describe_settings, preset
from ..tome_core.presets import DEFAULT as START

NO_PRESET, CUSTOM = "off", "custom"
PRESET_CHOICES = (NO_PRESET, *PRESETS, CUSTOM)
SAME, OFF, OWN, ONLY = HIRES = ("same", "off", "own ratio", "only hires")
UNSET = -1.0  # a number's way to say None, which neither a slider nor an infotext can
# what people read -> what the engine takes
CHOICES = {
    "level": {"automatic": None, **{f"up to /{d}": d for d in (1, 2, 4, 8)}},
    "merge_what": {"automatic": None, "q+k+v": "qkv", "k+v": "kv"},
}
IMAGE_SEED = -1
_SEED_MASK = 2**31 - 1  # the engine's range; the webui's seeds have one bit more
MOST = 2**53 - 1  # of what has no limit; beyond it floats cannot count


class Field(NamedTuple):
    """One value of the panel. engine: the setting of the engine it stands for, "" for the panel's own.

    maximum: the control's; limit: the most that is taken, where it comes from elsewhere.
    """

    name: str
    label: str
    help: str
    default: Any
    engine: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    step: float | None = None
    limit: float = MOST


def _from_engine(name: str, source: str = "", /, **changes: Any) -> Field:
    setting = next(one for one in describe_settings() if one["name"] == (source or name))
    if setting["default"] is None and "minimum" in setting:
        text = f"{setting['help']} {UNSET:g} is {setting['unset']}."
        setting |= {"default": UNSET, "minimum": UNSET, "help": text}
    choices = tuple(CHOICES.get(name, setting.get("choices", ())))
    default = choices[0] if name in CHOICES else setting["default"]
    field = Field(
        name, setting["label"], setting["help"], default, setting["name"], choices,
        *(setting.get(key) for key in ("minimum", "maximum", "step")),
        MOST if "open_ended" in setting else setting.get("limit", setting.get("maximum", MOST)),
    )  # fmt: skip
    return field._replace(**changes)


_LEVEL_HELP = (
    "Which resolutions of the UNet merge. Automatic is the finest that has attention: 64x64 tokens on SD1.5 at "
    "512 px, 32x32 on SDXL. Up to /2 is every block down-sampled at most twofold from the latent, and so on; up to "
    "/1 reaches nothing on SDXL."
)
_HIRES_HELP = (
    "What happens in the hires pass. Same: as in the first pass. Off: only the first pass merges. Own ratio: the "
    "hires ratio. Only hires: the first pass is left alone, which changes the composition least."
)
_SIDE_HELP = (
    "What of self-attention is merged: q+k+v (queries, keys and values) or k+v (every query is kept). Automatic is "
    "the method's own: k+v for downsample, else q+k+v."
)
_PRESET_HELP = (
    "Quality changes the picture least, max saves the most time; balanced and fast lie between. Choosing one fills in "
    "the settings below, and changing one of them makes it custom. They merge at every level with tokens enough to "
    "gain by it. Off is the same as the switch above."
)
FIELDS = (
    Field("enabled", "Token Merging (ToMe)", "Merge tokens in the UNet's blocks: less time.", False),
    Field("preset", "Preset", _PRESET_HELP, START, choices=PRESET_CHOICES),
    _from_engine("ratio"),
    Field("hires", "Hires pass", _HIRES_HELP, SAME, choices=HIRES),
    _from_engine("hires_ratio", "ratio", label="Hires ratio", engine="",
                 help="Ratio of the hires pass, where it is set to 'own ratio'."),
    _from_engine("level", "max_downsample", label="Level", help=_LEVEL_HELP),
    _from_engine("start_percent"),
    _from_engine("end_percent"),
    _from_engine("min_pixels", maximum=4194304),
    _from_engine("method"),
    _from_engine("merge_what", "side", help=_SIDE_HELP),
    _from_engine("merge_crossattn"),
    _from_engine("merge_mlp"),
    _from_engine("sx"),
    _from_engine("sy"),
    _from_engine("use_rand"),
    _from_engine("seed", label="Destination seed", default=IMAGE_SEED, minimum=IMAGE_SEED, limit=2 * _SEED_MASK + 1,
                 help="What the random destinations are drawn from. -1 is the image's own seed."),
    _from_engine("early_ratio"),
    _from_engine("early_until"),
    _from_engine("proportional"),
    _from_engine("metric"),
    _from_engine("refine"),
    _from_engine("query_ratio"),
    _from_engine("keep"),
    _from_engine("only_if_it_pays"),
    _from_engine("deep_mlp"),
)  # fmt: skip
NAMES = tuple(field.name for field in FIELDS)
# the page's last argument, behind the fields: the preset with which it last filled its controls
FILLED_WITH = "filled_with"
ARGUMENTS = (*NAMES, FILLED_WITH)
DEFAULTS = {field.name: field.default for field in FIELDS}
# what a preset fills in: the engine's settings, but not which pictures merge, nor by which seed
FILLED = tuple(field.name for field in FIELDS if field.engine and field.name not in ("min_pixels", "seed"))


def field(name: str) -> Field:
    """The field of this name."""
    return FIELDS[NAMES.index(name)]


def values_of(config: MergeConfig) -> dict[str, Any]:
    """What the panel shows where it stands for this config; of `FILLED`, in order."""
    return {name: _shown(name, config.value(field(name).engine)) for name in FILLED}


def preset_values(name: str) -> dict[str, Any]:
    """What a preset fills in; nothing for off and custom."""
    return values_of(preset(name)) if name in PRESETS else {}


def _shown(name: str, value: Any) -> Any:
    """What people read for a value of the engine."""
    if name in CHOICES:
        return next(label for label, one in CHOICES[name].items() if one == value)
    return UNSET if value is None else value


@dataclass(frozen=True)
class Wish:
    """Checked values of one job, by name, a preset's filled in. ratios: of the first and of the hires pass, 0 where it
    is left alone."""

    values: Mapping[str, Any]
    ratios: tuple[float, float]

    def config(self, hires: bool, seed: int = 0) -> MergeConfig | None:
        """The engine's settings for a pass; None where it is left alone. seed: the image's."""
        ratio = self.ratios[hires]
        return _config(self.values, ratio, seed) if ratio and self.values["enabled"] else None

    def merges(self, has_hires: bool) -> bool:
        """Does it merge in any pass that will run?"""
        return self.config(False) is not None or (has_hires and self.config(True) is not None)


def read(values: Sequence[Any], changes: Mapping[str, Any] | None = None) -> Wish:
    """What the values ask for, in the order of `FIELDS`; missing ones are the defaults.

    A preset outweighs the values that it fills in, unless the page says that it had filled them in: then another value
    was set since. Without one, where it is None, they count as with custom.
    changes: by name, from an X/Y/Z plot, which outweigh both. Raises ValueError or TypeError, naming the value, the
    range and the remedy, for what is not possible; the webui itself checks nothing that comes through its API.
    """
    if len(values) > len(ARGUMENTS):
        raise ValueError(f"{len(values)} values were given; there are {len(ARGUMENTS)}: {', '.join(ARGUMENTS)}")
    changes = changes or {}
    given = {**DEFAULTS, **dict(zip(ARGUMENTS, values, strict=False)), **changes}
    if given["enabled"] is False or given["preset"] == NO_PRESET:  # what is not used need not be right
        return Wish(DEFAULTS, (0.0, 0.0))
    given = _resolved(given, changes)
    if "hires_ratio" in changes and given["hires"] in (SAME, OFF):
        given["hires"] = OWN
    checked = {one.name: _checked(one, given[one.name]) for one in FIELDS}
    for name in ("ratio", "hires_ratio"):
        _config(checked, checked[name], 0, name)
    return Wish(checked, _ratios(checked))


def _resolved(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the preset's filled in, and custom where something else was set."""
    if given["preset"] is None:
        return {**given, "preset": CUSTOM}
    filled = preset_values(given["preset"]) if given["preset"] in PRESETS else {}
    touched = {name: value for name, value in changes.items() if name in filled}
    if given.get(FILLED_WITH) == given["preset"] and "preset" not in changes:
        # in the instant before Generate, when the page had not yet made the preset custom
        touched = {name: given[name] for name in filled if given[name] != filled[name]} | touched
    return {**given, **filled, **touched, "preset": CUSTOM if touched else given["preset"]}


def _ratios(values: Mapping[str, Any]) -> tuple[float, float]:
    ratio, own = values["ratio"], values["hires_ratio"]
    return {SAME: (ratio, ratio), OFF: (ratio, 0.0), OWN: (ratio, own), ONLY: (0.0, ratio)}[values["hires"]]


def _checked(one: Field, value: Any) -> Any:
    """The value in its field's type; the ranges of the engine's settings are the engine's to check."""
    if one.choices and value not in one.choices:
        raise ValueError(f"{one.name}={value!r} is not possible; use one of {', '.join(map(repr, one.choices))}")
    if one.name == "enabled" and not isinstance(value, bool):
        raise TypeError(f"enabled={value!r} is {type(value).__name__}; use true or false")
    # sliders and pasted infotexts give whole numbers as 2.0
    if isinstance(one.step, int) and isinstance(value, float) and value.is_integer() and abs(value) <= MOST:
        value = int(value)
    if one.default == UNSET and value is None:
        return UNSET
    if one.name == "seed" and type(value) is int and 0 <= value <= one.limit:
        return value & _SEED_MASK
    return value


def _config(values: Mapping[str, Any], ratio: float, seed: int, name: str = "ratio") -> MergeConfig:
    given = {one.engine: _asked(one, values[one.name]) for one in FIELDS if one.engine}
    if values["seed"] == IMAGE_SEED and type(values["seed"]) is int:
        given["seed"] = int(seed) & _SEED_MASK
    try:
        return MergeConfig(**{**given, "ratio": ratio})
    except (ValueError, TypeError) as error:
        text = str(error).replace("ratio=", f"{name}=", 1)
        raise type(error)(_in_the_panels_words(text, values, given)) from None


def _asked(one: Field, value: Any) -> Any:
    """What the engine takes for a value that people read."""
    if one.name in CHOICES:
        return CHOICES[one.name][value]
    return None if one.default == UNSET and type(value) in (int, float) and value == UNSET else value


def _in_the_panels_words(text: str, values: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The engine's message, with the panel's names and choices in the place of its own."""
    for name in CHOICES:
        engine = field(name).engine
        text = text.replace(f"{engine}={given[engine]!r}", f"{name}={values[name]!r}", 1)
    for label, side in CHOICES["merge_what"].items():
        text = text.replace(f"side={side!r}", f"merge_what={label!r}")
    text = text.replace("leave it at None", f"leave it at {UNSET:g}")
    head, remedy, choices = text.rpartition("; use one of ")
    if remedy:
        for label, side in CHOICES["merge_what"].items():
            choices = choices.replace(repr(side), repr(label))
    return head + remedy + choices
