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
from tome_core import PRESETS
from tome_core.settings.presets import MARKS, refine_of

PLAIN = "unmerged"
RATIOS = (0.25, 0.5, 0.75)
# ratio and cell of keys and values
KEY_SETTINGS = ((0.5, 2), (0.75, 2), (0.9, 4), (0.9375, 4), (0.984, 8))
# of the line that strength is chosen from
FRONT = (
    (0.25, 4), (0.5, 4), (0.625, 4), (0.75, 4), (0.8125, 4), (0.875, 4), (0.9375, 4),
    (0.9375, 8), (0.96875, 8), (0.984375, 8),
)  # fmt: skip
APART = ((0.75, 4), (0.9375, 4), (0.984375, 8))  # of these: where sizes and correction are told apart
BETWEEN = (0.1, 0.375, 0.625, 0.875)  # strengths without a name
# of the levels below the finest: keys and values merged as hard as any preset does
BELOW = (1, 2)
KEYS_BELOW = ((0.9375, 4), (0.984375, 8))
SKIPPED = (0.05, 0.1, 0.2)  # thresholds of FirstBlockCache, the first is diffusers' default
TOMA_RATIOS = (0.5, 0.75)
NOISY = 600  # the timestep from which on merging costs nearly nothing


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


def _engine(line: str, setting: str, *rules: dict[str, Any]) -> Variant:
    return Variant(line, setting, variants.engine(*rules), code="engine")


def _kv_rule(ratio: float, cell: int = 2, **more: Any) -> dict[str, Any]:
    """Keys and values in the engine; proportional attention where `proportional` does not say otherwise."""
    return {"ratio": ratio, "sx": cell, "sy": cell, "side": "kv", "use_rand": False, **more}


def _merged_keys() -> Iterator[Variant]:
    """What the presets are chosen from: keys and values compared by distance, refined where they are few."""
    for ratio, cell in FRONT:
        more = {"metric": "keys+values", "refine": refine_of(cell)}
        yield _engine("merged keys", _setting(ratio, cell), _kv_rule(ratio, cell, **more))
    for name in PRESETS:
        yield Variant("preset", name, variants.strength(MARKS[name]), code="engine")
        finest = variants.strength(MARKS[name], max_downsample=None)
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
    """What merging costs where the latent is halved and quartered, and what setting that to zero does."""
    for ratio, cell in KEYS_BELOW:
        finest, all_levels = {"ratio": 0.0}, {"metric": "keys+values", "refine": 1, "max_downsample": 8}
        yield _engine("keys below", _setting(ratio, cell), finest, _kv_rule(ratio, cell, **all_levels))
    yield Variant("zero below", "attention", variants.zero("attn1", BELOW), code="torch")
    yield Variant("zero below", "MLP", variants.zero("ff", BELOW), code="torch")
    yield _engine("MLP at the finest", "0.5", {"ratio": 0.5, "merge_attn": False, "merge_mlp": True, "use_rand": False})


def _setting(ratio: float, cell: int) -> str:
    return str(ratio) if cell == 2 else f"{ratio} cells {cell}"


def _plain() -> Iterator[Variant]:
    """Every method of the engine, as tomesd merges: without proportional attention."""

    def one(line: str, setting: str, **settings: Any) -> Variant:
        return _engine(line, setting, {"proportional": False, **settings})

    for ratio in RATIOS:
        yield one("bipartite drawn", str(ratio), ratio=ratio)
        yield one("bipartite", str(ratio), ratio=ratio, use_rand=False)
        yield one("bipartite kv", str(ratio), **_kv_rule(ratio))
        yield one("cluster", str(ratio), method="cluster", ratio=ratio)
        yield one("cluster kv", str(ratio), method="cluster", ratio=ratio, side="kv")
        yield one("cluster by mean", str(ratio), method="cluster-similarity", ratio=ratio)
    yield one("bipartite kv", "0.9 cells 4", **_kv_rule(0.9, 4))
    for cell in (2, 4):
        yield Variant("downsample", f"{cell}x{cell}", variants.reference(Recipe(coarse=cell)))


def _proportional() -> Iterator[Variant]:
    """Proportional attention."""
    for ratio in RATIOS:
        yield _engine("sized", str(ratio), {"ratio": ratio, "use_rand": False})
    for ratio, cell in KEY_SETTINGS:
        yield _engine("sized kv", _setting(ratio, cell), _kv_rule(ratio, cell))
    yield _engine("cluster kv sized", "0.75", {"method": "cluster", "ratio": 0.75, "side": "kv"})
    for ratio, cell in ((0.75, 2), (0.9375, 4)):
        for steps in (1, 3):
            yield _engine(f"sized kv k-means {steps}", _setting(ratio, cell), _kv_rule(ratio, cell, refine=steps))


def _schedules() -> Iterator[Variant]:
    """Noisy steps and the rest merged differently. The fourth is the other way round: the literature disagrees."""
    together = {"ratio": 0.75, "use_rand": False}
    for setting, early, late in (
        ("kv 0.984 then 0.75", _kv_rule(0.984, 8), _kv_rule(0.75)),
        ("kv 0.984 then 0.5", _kv_rule(0.984, 8), _kv_rule(0.5)),
        ("qkv 0.75 then kv 0.75", together, _kv_rule(0.75)),
        ("kv 0.75 then 0.984", _kv_rule(0.75), _kv_rule(0.984, 8)),
    ):
        yield _engine("schedule", setting, {**early, "min_timestep": NOISY}, late)


def _others() -> Iterator[Variant]:
    """What a user may do instead: down-sampling by schedule; on UNets tomesd by schedule and attention inside tiles; on
    transformers ToMA, and steps that are skipped."""
    unets, transformers = {"kinds": (UNET,)}, {"kinds": (TRANSFORMER,)}
    early_and_late = variants.tomesd(0.35, 0.75, HALF_TIME)
    yield Variant("tomesd early and late", "0.75 then 0.35", early_and_late, code="tomesd", **unets)
    coarse = variants.reference(Recipe(coarse=2, coarse_early=8))
    yield Variant("downsample early and late", "8x8 then 2x2", coarse)
    for tiles in (2, 4):
        yield Variant("tiles", f"{tiles}x{tiles}", variants.reference(Recipe(tiles=tiles)), **unets)
    for ratio in TOMA_RATIOS:
        yield Variant("ToMA", str(ratio), variants.toma(ratio), **transformers)
    for threshold in SKIPPED:
        yield Variant("first block cache", str(threshold), variants.first_block_cache(threshold), code="diffusers",
                      measures=("pictures",), **transformers)  # fmt: skip


def _of_unets(some: Iterable[Variant]) -> Iterator[Variant]:
    return (replace(variant, kinds=(UNET,)) for variant in some)


def _everything() -> dict[str, Variant]:
    tomesd = [Variant("tomesd", str(ratio), variants.tomesd(ratio), "tomesd", "tomesd") for ratio in RATIOS]
    parts = (_yardsticks_and_controls(), _of_unets(tomesd), _others(), _plain(), _proportional(), _merged_keys(),
             _of_unets(_apart()), _of_unets(_below()), _schedules())  # fmt: skip
    return {variant.name: variant for variant in chain(*parts)}


VARIANTS = _everything()
# in every table, whatever else is asked for
ALWAYS = tuple(name for name, variant in VARIANTS.items() if variant.role in ("plain", "control", "yardstick"))
_SMALLEST = ("tomesd-0.75", "bipartite-drawn-0.75", "sized-kv-0.75")
_FRONT = tuple(name for name, variant in VARIANTS.items() if variant.method == "merged keys")
_PRESETS = tuple(name for name, variant in VARIANTS.items() if variant.method in ("preset", "strength"))
_OTHERS = tuple(variant.name for variant in _others())
_BELOW = tuple(name for name, variant in VARIANTS.items() if variant.method == "keys below")
_STANDARD = (
    *(f"tomesd-{ratio}" for ratio in RATIOS), "bipartite-drawn-0.5", "sized-0.5", "sized-0.75", "downsample-2x2",
    "sized-kv-0.75", "sized-kv-0.9375-cells-4", *_OTHERS, *_PRESETS,
)  # fmt: skip
# a whole picture takes as long as twenty noised ones
_PICTURED = (
    "tomesd-0.5", "tomesd-0.75", "sized-0.5", "downsample-2x2", *_OTHERS, *_PRESETS,
)  # fmt: skip
_PICTURED_BY_ALL = {*ALWAYS, *_STANDARD, *_FRONT, *(name for name in VARIANTS if name.startswith("schedule"))}
# the variants of each measure
GROUPS = {
    "smallest": {"noised": (*ALWAYS, *_SMALLEST), "pictures": (*ALWAYS, *_SMALLEST)},
    "standard": {"noised": (*ALWAYS, *_STANDARD), "pictures": (*ALWAYS, *_PICTURED)},
    # what tome_core's presets are picked from
    "choose": {"noised": (*ALWAYS, *_FRONT, *_BELOW), "pictures": (*ALWAYS, *_FRONT[1::3])},
    "all": {"noised": tuple(VARIANTS), "pictures": tuple(name for name in VARIANTS if name in _PICTURED_BY_ALL)},
}
