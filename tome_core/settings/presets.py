"""Strength: one number that trades fidelity for speed, and named presets for four values of it.

The settings were measured for three kinds of models: UNets with attention at the finest level (SD1.5), UNets without
(SDXL), and transformers. Each kind of UNet has a curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from .config import MergeConfig, MergeRule

Point = tuple[int, int]
MARKS = {"quality": 0.25, "balanced": 0.5, "fast": 0.75, "max": 1.0}
PRESETS = tuple(MARKS)
DEFAULT = "balanced"
# Kept for 60 timesteps, a match serves two steps of 20, and one of 10. Kept for 100, whole pictures were worse, though
# single predictions were not: `quality` lost 1 to 3 dB of PSNR, `max` a tenth of the texture.
_ALL: dict[str, Any] = {"side": "kv", "metric": "keys+values", "use_rand": False, "keep": 60.0,
                        "only_if_it_pays": True, "max_downsample": 8}  # fmt: skip
SD, SDXL, TRANSFORMER = CURVE_NAMES = ("sd", "sdxl", "transformer")
PARTS = 64  # the share of keys is a multiple of 1/64, so that kernels get round numbers
EARLY_SHARE = 1 / PARTS  # the share of keys that early steps keep, on every curve
MOST_MERGED = 3 / 4  # a step that keeps a larger share of keys is not merged: merging would cost more than it saves
# From this share of keys on, cells are 4x4 tokens without a k-means step. Below it, cells of 8x8 with three k-means
# steps have two fifths less error (benchmarks/results/front-cpu-2026-11-25.md).
_FINE_CELLS = 5 / PARTS
# At strengths 0, .05, .1 and so on: the share of keys that late steps keep, in 1/64, and the timestep from which on
# steps are early and keep `EARLY_SHARE`. Chosen from measurements by ``python -m benchmarks.strength``. SDXL's ends at
# .4: attention is a twentieth of its work at 1024 px, and more of it would save nothing there (at 2048 px 3%). From .25
# to .5 it errs as much more as whole blocks that save a tenth (docs/methods.md, "Whole blocks").
CURVES = {
    "sd": ((64, 1000), (64, 787), (64, 609), (41, 578), (35, 498), (26, 472), (21, 457), (17, 440), (14, 413),
           (11, 405), (9, 375), (8, 355), (7, 339), (6, 328), (5, 324), (5, 250), (4, 247), (4, 172), (3, 160),
           (2, 149), (1, 0)),
    "sdxl": ((64, 1000), (41, 987), (32, 986), (25, 964), (19, 942), (14, 908), (12, 831), (10, 782), (8, 767)),
}  # fmt: skip
# Half of SDXL's time goes into the blocks of its coarsest level. At strengths 0, .25, .5, .75 and 1 one of so many of
# their tokens stays below the first of these timesteps; from 0.75 to 1 the limit rises to the second. Merging in the
# first steps costs most (docs/methods.md, "Whole blocks").
_ONE_OF = (1.0, 2.0, 6.0, 10.0, 16.0)
_BLOCKS_BELOW, _BLOCKS_BELOW_AT_MOST = 760.0, 900.0
# A strength's `max_error`: that of 0.5; each half more allows ten times as much. Small UNets keep the curve's keys then
# unless more of them gain (``python -m benchmarks.own_error``).
_MOST_ERROR = 1.5e-4
_MOST_ERROR_OF_BLOCKS = 0.05  # about four times what SDXL's small model has at any strength
# A transformer is the other way round than SDXL: its tokens carry the detail, so noisy steps may merge and late ones
# must not. At evenly spaced strengths from 0 to 1, the timestep, 1000 times sigma, from which on cells of 2x2 tokens
# merge, and that from which on pairs do (docs/methods.md, "Transformers").
_FOURS_AND_PAIRS = ((1010, 1000), (1010, 900), (1010, 750), (930, 700), (750, 650))
# The most steps that merge, up to strength 0.5 and at 1. Of 4 steps of a distilled model half are noisy ones, of 20 up
# to ten: there each costs as much and gains less.
_MOST_STEPS, _MOST_STEPS_AT_MOST = 4, 8


def strength(value: float, curve: str = SD) -> MergeConfig:
    """Return the settings of a strength, one number that trades fidelity for speed.

    With a higher strength, less work is left and the expected error is larger, at any number of steps. A measured error
    may differ (docs/methods.md, "Strength"). The rules' `max_error` bounds the error that the engine estimates.

    Args:
        value: from 0, which is off, to 1, which keeps a sixty-fourth of the keys in every step of SD1.5.
        curve: the kind of model: "sd" (UNets like SD1.5's), "sdxl" or "transformer". `patch` finds it.

    Raises:
        ValueError: `value` is no number from 0 to 1, or `curve` is not known.

    >>> strength(0).is_off
    True
    >>> strength(0.5) == preset("balanced")
    True
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
        raise ValueError(f"strength={value!r} is no number from 0 to 1; 0 is off, 0.5 balanced, 1 the most")
    if curve not in CURVE_NAMES:
        raise ValueError(f"curve={curve!r} is not known; use one of {', '.join(map(repr, CURVE_NAMES))}")
    if value == 0:
        return MergeConfig(**_ALL, ratio=0.0)
    if curve == TRANSFORMER:
        return MergeConfig(rules=_rules_of_transformer(float(value)))
    points = CURVES[curve]
    share, until = _between(min(float(value) * (len(CURVES[SD]) - 1) / (len(points) - 1), 1.0), points)
    cell = _cell_of(share)
    early = {} if share <= EARLY_SHARE else {"early_ratio": 1 - EARLY_SHARE, "early_until": until}
    most = _MOST_ERROR * 10 ** (2 * float(value) - 1)
    rule = MergeRule(**_ALL, ratio=1 - share, sx=cell, sy=cell, refine=refine_of(cell), max_error=most)
    return MergeConfig(rules=(rule, *(rules_of_blocks(float(value)) if curve == SDXL else ())), **early)


def rules_of_blocks(value: float) -> list[MergeRule]:
    """Return [rule] for whole blocks of SDXL's coarsest level at a strength, 0 to 1; [] below about 0.1.

    Raises ValueError for another value.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
        raise ValueError(f"whole_blocks={value!r} is no number from 0 to 1; 0 is off, 0.5 balanced, 1 the most")
    fewer, more, part = _around(float(value), _ONE_OF)
    share = math.exp(-math.log(fewer) * (1 - part) - math.log(more) * part)
    if share > MOST_MERGED:
        return []
    below = _BLOCKS_BELOW + max(0.0, 4 * value - 3) * (_BLOCKS_BELOW_AT_MOST - _BLOCKS_BELOW)
    changes = {"metric": "input", "max_error": _MOST_ERROR_OF_BLOCKS, "max_downsample": None, "min_downsample": 4,
               "max_timestep": below}  # fmt: skip
    return [MergeRule(**_ALL | changes, ratio=1 - share, sx=4, sy=4, merge_attn=False, merge_blocks=True)]


def strength_of_blocks(config: MergeConfig) -> float:
    """Return the strength by which `rules_of_blocks` made a rule of this config, 0 without any."""
    share = next((1 - rule.ratio for rule in config.rules if _is_of_blocks(rule)), 1.0)
    place = sum(1 / share > one_of for one_of in _ONE_OF[1:-1])
    low, high = map(math.log, _ONE_OF[place : place + 2])
    return round((place + (-math.log(share) - low) / (high - low)) / (len(_ONE_OF) - 1), 9)


def change_rules(config: MergeConfig, blocks: float | None, **changes: Any) -> MergeConfig:
    """Return a copy of a config with changed settings, which rules of whole blocks do not follow.

    blocks: the strength of whole blocks, 0 to 1, by which `rules_of_blocks` makes their rules; 0: none; None: as they
    are. Raises what `MergeConfig` and `rules_of_blocks` raise.
    """
    of_blocks = [rule for rule in config.rules if _is_of_blocks(rule)] if blocks is None else rules_of_blocks(blocks)
    others = tuple(rule for rule in config.rules if not _is_of_blocks(rule))
    if not others and blocks is None:  # no rule follows a setting of rules
        own = {name: value for name, value in changes.items() if not hasattr(config.rules[0], name)}
        return replace(config, **own)
    changed = replace(config, **changes, rules=others)
    return replace(changed, rules=(*changed.rules, *of_blocks))


def _is_of_blocks(rule: MergeRule) -> bool:
    return rule.merge_blocks and rule.min_downsample is not None


def _rules_of_transformer(value: float) -> tuple[MergeRule, MergeRule]:
    """Return the rules for whole blocks of a transformer at a strength above 0: of the noisiest steps, of others."""
    weaker, stronger, part = _around(value, _FOURS_AND_PAIRS)
    fours, pairs = (round(weak + (strong - weak) * part, 1) for weak, strong in zip(weaker, stronger, strict=True))
    most = _MOST_STEPS + round(max(0.0, 2 * value - 1) * (_MOST_STEPS_AT_MOST - _MOST_STEPS))
    every = MergeRule(**_ALL | {"keep": 0.0, "metric": "input", "side": "qkv", "max_downsample": None}, ratio=3 / 4,
                      merge_attn=False, merge_blocks=True, correction=False, min_timestep=fours,
                      most_steps=most)  # fmt: skip
    return every, replace(every, ratio=1 / 2, sy=1, min_timestep=pairs)


def _cell_of(share: float) -> int:
    """Return the side of a cell in tokens for a share of keys."""
    return 4 if share >= _FINE_CELLS else 8


def refine_of(cell: int) -> int:
    """Return the number of k-means steps of a strength with cells of this side in tokens: 3 for 8, else 0."""
    return 3 if cell == 8 else 0


def with_share(rule: MergeRule, share: float) -> MergeRule:
    """Return a strength's rule that keeps another share of the keys."""
    cell = _cell_of(share)
    return replace(rule, ratio=1 - share, sx=cell, sy=cell, refine=refine_of(cell))


def preset(name: str, curve: str = SD) -> MergeConfig:
    """Return the settings of a named strength, one of `PRESETS`; a ValueError says that it or `curve` is not known."""
    if name not in MARKS:
        raise ValueError(f"preset={name!r} is not known; use one of {', '.join(map(repr, PRESETS))}")
    return strength(MARKS[name], curve)


def _between(value: float, points: Sequence[Point]) -> tuple[float, int]:
    """Return (share of keys in late steps, timestep from which steps are early) at a strength on one of `CURVES`."""
    (keys, until), (fewer, sooner), part = _around(value, points)
    # linear in the keys' logarithm, and rounded up to a multiple of 1 / PARTS
    between = math.exp(math.log(keys / PARTS) * (1 - part) + math.log(fewer / PARTS) * part)
    late = math.ceil(between * PARTS - 1e-9) / PARTS
    if late > MOST_MERGED:  # the nearer of all keys and MOST_MERGED, so that the curve has no large jump
        late = MOST_MERGED if between**2 < MOST_MERGED else 1.0
    return late, round(until * (1 - part) + sooner * part)


def _around(value: float, points: Sequence[Any]) -> tuple[Any, Any, float]:
    """Return the two of evenly spaced points between which a strength lies, and how far from the first, 0 to 1."""
    place = value * (len(points) - 1)
    low = min(int(place), len(points) - 2)
    return points[low], points[low + 1], place - low


def config_of(wanted: str | float, curve: str = SD) -> MergeConfig:
    """Return the settings of `preset` if `wanted` is a text, "0.5" too, else of `strength`; raise what these raise."""
    return preset(wanted, curve) if isinstance(wanted, str) else strength(wanted, curve)
