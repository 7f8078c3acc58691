"""Strength: one number for how much of the picture may change for how much time, and names for four of them.

It resolves to a `MergeConfig`, as was measured for each layout of models: UNets that attend at their finest level,
UNets that do not, as SDXL's, and transformers.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from .config import MergeConfig

MARKS = {"quality": 0.25, "balanced": 0.5, "fast": 0.75, "max": 1.0}
PRESETS = tuple(MARKS)
DEFAULT = "balanced"
# kept for 60 timesteps a match serves two steps of 20, and one of 10. Whole pictures show what a prediction alone does
# not: kept for 100, quality lost 1 to 3 dB of PSNR and max a tenth of the texture
_ALL: dict[str, Any] = {"side": "kv", "metric": "keys+values", "use_rand": False, "keep": 60.0,
                        "only_if_it_pays": True, "max_downsample": 8}  # fmt: skip
SD, SDXL, TRANSFORMER = LAYOUTS = ("sd", "sdxl", "transformer")
PARTS = 64  # of the tokens: shares of keys are whole numbers of them, which are numbers that kernels like
EARLY_SHARE = 1 / PARTS  # of the keys, which early steps keep on every curve
MOST_MERGED = 3 / 4  # share of the keys above which a step is not merged: it would take longer than it saves
# share of the keys from which on cells of 4x4 serve, which take no k-means step; below it those of 8x8 with three err
# by two fifths less (benchmarks/results/front-cpu-2026-11-25.md)
_FINE_CELLS = 5 / PARTS
# Of equally distant strengths from 0 to 1: the keys that late steps keep, in `PARTS`, and the timestep from which on
# steps are early and keep `EARLY_SHARE`. Chosen by ``python -m benchmarks.strength`` from what was measured.
_FROM_65 = ((6, 328), (5, 324), (5, 250), (4, 247), (4, 172), (3, 160), (2, 149), (1, 0))
CURVES = {
    "sd": ((64, 1000), (64, 787), (64, 609), (41, 578), (35, 498), (26, 472), (21, 457), (17, 440), (14, 413),
           (11, 405), (9, 375), (8, 355), (7, 339), *_FROM_65),
    "sdxl": ((64, 1000), (41, 987), (32, 986), (25, 964), (19, 942), (14, 908), (12, 831), (10, 782), (8, 767),
             (7, 675), (6, 600), (6, 496), (6, 406), *_FROM_65),
    "transformer": ((64, 1000), (44, 918), (37, 849), (29, 826), (22, 807), (17, 738), (14, 703), (12, 640), (10, 597),
                    (8, 578), (7, 500), (6, 496), (6, 406), *_FROM_65),
}  # fmt: skip


def strength(value: float, layout: str = SD) -> MergeConfig:
    """The settings of a strength: 0 is off, 1 keeps a sixty-fourth of the keys in every step.

    What is left of the work falls with it and the error to be expected grows, whatever steps a picture has; what is
    measured need not (docs/methods.md, "Strength"). layout: of the model, one of `LAYOUTS`; `patch` asks the model
    itself. Raises ValueError for what is no number from 0 to 1, and for a layout that there is not.

    >>> strength(0).is_off
    True
    >>> strength(0.5) == preset("balanced")
    True
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
        raise ValueError(f"strength={value!r} is no number from 0 to 1; 0 is off, 0.5 balanced, 1 the most")
    if layout not in CURVES:
        raise ValueError(f"layout={layout!r} is not known; use one of {', '.join(map(repr, LAYOUTS))}")
    if value == 0:
        return MergeConfig(**_ALL, ratio=0.0)
    share, until = _between(float(value), CURVES[layout])
    cell = 4 if share >= _FINE_CELLS else 8
    early = {} if share <= EARLY_SHARE else {"early_ratio": 1 - EARLY_SHARE, "early_until": until}
    return MergeConfig(**_ALL, ratio=1 - share, sx=cell, sy=cell, refine=refine_of(cell), **early)


def refine_of(cell: int) -> int:
    """k-means steps after a match in cells of this side: the fewer keys, the cheaper and the better a step."""
    return 3 if cell == 8 else 0


def preset(name: str, layout: str = SD) -> MergeConfig:
    """The settings of a named strength, see `MARKS` and `strength`. Raises ValueError for a name that is none."""
    if name not in MARKS:
        raise ValueError(f"preset={name!r} is not known; use one of {', '.join(map(repr, PRESETS))}")
    return strength(MARKS[name], layout)


def _between(value: float, curve: tuple[tuple[int, int], ...]) -> tuple[float, int]:
    """The share of the keys and the timestep at a strength: a line between knots, of the share's logarithm."""
    place = value * (len(curve) - 1)
    low = min(int(place), len(curve) - 2)
    part = place - low
    (keys, until), (fewer, sooner) = curve[low], curve[low + 1]
    between = math.exp(math.log(keys / PARTS) * (1 - part) + math.log(fewer / PARTS) * part)
    late = math.ceil(between * PARTS - 1e-9) / PARTS
    if late > MOST_MERGED:  # of all keys and the most that are worth merging the nearer: no step of strength is large
        late = MOST_MERGED if between**2 < MOST_MERGED else 1.0
    return late, round(until * (1 - part) + sooner * part)


def config_of(wanted: str | float, layout: str = SD) -> MergeConfig:
    """The settings of a patch, by a preset's name or by a strength."""
    return preset(wanted, layout) if isinstance(wanted, str) else strength(wanted, layout)
