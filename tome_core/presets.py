"""Settings by name: how much of the picture may change for how much time.

What a name stands for was measured (`preset_table`). A preset resolves to one `MergeRule`, whose values can be shown,
changed and stored: an old picture reproduces after the table has changed.
"""

from __future__ import annotations

from .config import MergeConfig, MergeRule
from .preset_table import TABLE

PRESETS = tuple(TABLE)
DEFAULT = "balanced"


def preset(name: str) -> MergeRule:
    """The rule of a preset. Raises ValueError for a name that is none.

    >>> preset("balanced").effective_side
    'kv'
    """
    if name not in TABLE:
        raise ValueError(f"preset={name!r} is not known; use one of {', '.join(map(repr, PRESETS))}")
    return MergeRule(**TABLE[name])


def preset_config(name: str) -> MergeConfig:
    """The same as the settings of a patch."""
    return MergeConfig(rules=(preset(name),))
