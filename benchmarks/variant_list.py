"""Every variant of the quality benchmark, and the groups that the command line offers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from benchmarks import variants
from benchmarks.networks import TRANSFORMER, UNET
from benchmarks.reference import HALF_TIME, Recipe
from benchmarks.variants import Variant
from tome_core.settings.presets import MARKS, refine_of

PLAIN = "unmerged"
# ratio and cell of keys and values, of the line that strength is chosen from
FRONT = (
    (0.25, 4), (0.5, 4), (0.625, 4), (0.75, 4), (0.8125, 4), (0.875, 4), (0.9375, 4),
    (0.9375, 8), (0.96875, 8), (0.984375, 8),
)  # fmt: skip
APART = ((0.75, 4), (0.9375, 4), (0.984375, 8))  # of these: if sizes and correction are told apart
BETWEEN = (0.1, 0.375, 0.625, 0.875)  # strengths without a name
KEYS_BELOW = ((0.9375, 4), (0.984375, 8))  # of the levels below the finest, merged as hard as any preset does
SKIPPED = (0.05, 0.1, 0.2)  # thresholds of FirstBlockCache, the first is diffusers' default
TOMA_RATIOS = (0.5, 0.75)


def _yardsticks_and_controls() -> Iterator[Variant]:
    yield Variant(PLAIN, "", variants.nothing, "plain", "torch")
    yield Variant("bfloat16", "", variants.in_bfloat16, "yardstick", "torch")
    yield Variant("twice the solver steps", "", variants.nothing, "yardstick", "torch", 2, ("pictures",))
    for name, recipe in (
        ("zero attention", Recipe(zero=True)),
        ("random partner 0.75", Recipe(ratio=0.75, together=True)),
        ("random partner kv 0.9375", Recipe(ratio=0.9375, cell=4)),
    ):
        yield Variant(name, "", variants.reference(recipe), "control")


def _engine(line: str, setting: str, rule: dict[str, Any]) -> Variant:
    return Variant(line, setting, variants.engine(rule), code="engine")


def _kv_rule(ratio: float, cell: int = 2, **more: Any) -> dict[str, Any]:
    """Keys and values in the engine; proportional attention unless `proportional` says otherwise."""
    return {"ratio": ratio, "sx": cell, "sy": cell, "side": "kv", "use_rand": False, **more}


def _setting(ratio: float, cell: int) -> str:
    return str(ratio) if cell == 2 else f"{ratio} cells {cell}"


def _engines_own() -> Iterator[Variant]:
    """Without proportional attention, as tomesd merges, and with it; of queries, keys and values, and of keys alone."""
    for ratio in (0.5, 0.75):
        yield _engine("bipartite drawn", str(ratio), {"proportional": False, "ratio": ratio})
        yield _engine("sized", str(ratio), {"ratio": ratio, "use_rand": False})
    for ratio, cell in ((0.75, 2), (0.9375, 4)):
        yield _engine("sized kv", _setting(ratio, cell), _kv_rule(ratio, cell))


def _merged_keys() -> Iterator[Variant]:
    """What the presets are chosen from: keys and values compared by distance, refined if they are few."""
    for ratio, cell in FRONT:
        more = {"metric": "keys+values", "refine": refine_of(cell)}
        yield _engine("merged keys", _setting(ratio, cell), _kv_rule(ratio, cell, **more))
    for name, value in MARKS.items():
        yield Variant("preset", name, variants.strength(value), code="engine")
        finest = variants.strength(value, max_downsample=None)
        yield Variant("preset at the finest", name, finest, code="engine", kinds=(UNET,))
    for value in BETWEEN:
        yield Variant("strength", str(value), variants.strength(value), code="engine")


def _apart() -> Iterator[Variant]:
    """What sizes, correction and its fit add to the groups of "merged keys": without one after the other."""
    for ratio, cell in APART:
        rule, setting = _kv_rule(ratio, cell, metric="keys+values", refine=refine_of(cell)), _setting(ratio, cell)
        yield Variant("merged keys unfitted", setting, variants.closed_form_alone(rule), code="engine")
        rule = {**rule, "correction": False}
        yield _engine("merged keys uncorrected", setting, rule)
        if not rule["refine"]:  # which may leave groups empty, and they would weigh as much as any
            yield _engine("merged keys unsized", setting, {**rule, "proportional": False})


def _below() -> Iterator[Variant]:
    """What merging costs if the latent is halved and quartered."""
    for ratio, cell in KEYS_BELOW:
        all_levels = _kv_rule(ratio, cell, metric="keys+values", refine=1, max_downsample=8)
        yield Variant("keys below", _setting(ratio, cell), variants.engine({"ratio": 0.0}, all_levels), code="engine")


def _others() -> Iterator[Variant]:
    """What a user may do instead: down-sampling; on UNets tomesd and attention inside tiles; on transformers ToMA, and
    steps that are skipped."""
    unets, transformers = {"kinds": (UNET,)}, {"kinds": (TRANSFORMER,)}
    early_and_late = variants.tomesd(0.35, 0.75, HALF_TIME)
    yield Variant("tomesd early and late", "0.75 then 0.35", early_and_late, code="tomesd", **unets)
    yield Variant("downsample", "2x2", variants.reference(Recipe(coarse=2)))
    coarse = variants.reference(Recipe(coarse=2, coarse_early=8))
    yield Variant("downsample early and late", "8x8 then 2x2", coarse)
    for tiles in (2, 4):
        yield Variant("tiles", f"{tiles}x{tiles}", variants.reference(Recipe(tiles=tiles)), **unets)
    for ratio in TOMA_RATIOS:
        yield Variant("ToMA", str(ratio), variants.toma(ratio), **transformers)
    for threshold in SKIPPED:
        yield Variant("first block cache", str(threshold), variants.first_block_cache(threshold), code="diffusers",
                      measures=("pictures",), **transformers)  # fmt: skip


def _tomesd() -> Iterator[Variant]:
    for ratio in (0.25, 0.5, 0.75):
        yield Variant("tomesd", str(ratio), variants.tomesd(ratio), "tomesd", "tomesd")


def _of_unets(some: Iterable[Variant]) -> Iterator[Variant]:
    return (replace(variant, kinds=(UNET,)) for variant in some)


VARIANTS = {variant.name: variant for variant in chain(
    _yardsticks_and_controls(), _of_unets(_tomesd()), _others(), _engines_own(), _merged_keys(), _of_unets(_apart()),
    _of_unets(_below()),
)}  # fmt: skip


def _of(*methods: str) -> tuple[str, ...]:
    return tuple(name for name, variant in VARIANTS.items() if variant.method in methods)


# in every table, whatever else is asked for
ALWAYS = tuple(name for name, variant in VARIANTS.items() if variant.role in ("plain", "control", "yardstick"))
_SMALLEST = ("tomesd-0.75", "bipartite-drawn-0.75", "sized-kv-0.75")
_FRONT, _OTHERS = _of("merged keys"), tuple(variant.name for variant in _others())
_STANDARD = (*_of("tomesd"), "bipartite-drawn-0.5", *_of("sized", "sized kv"), *_OTHERS, *_of("preset", "strength"))
# a whole picture takes as long as twenty noised ones
_PICTURED = ("tomesd-0.5", "tomesd-0.75", "sized-0.5", *_OTHERS, *_of("preset", "strength"))
# the variants of each measure
GROUPS = {
    "smallest": {"noised": (*ALWAYS, *_SMALLEST), "pictures": (*ALWAYS, *_SMALLEST)},
    "standard": {"noised": (*ALWAYS, *_STANDARD), "pictures": (*ALWAYS, *_PICTURED)},
    # what tome_core's presets are picked from
    "choose": {"noised": (*ALWAYS, *_FRONT, *_of("keys below")), "pictures": (*ALWAYS, *_FRONT[1::3])},
}
