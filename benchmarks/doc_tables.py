"""The pages' tables, made from committed results and the settings: ``python -m benchmarks.doc_tables --write``.

A page holds ``<!-- table NAME: python -m benchmarks.doc_tables --write -->`` and ``<!-- end of table -->``; what stands
between is made anew. Without ``--write`` the tables are printed. A newer result takes an older one's place by its name
below; prose that links to the older one has to follow.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from statistics import median

from benchmarks import gpu_report, results, subjects
from benchmarks.models import BLOCK
from benchmarks.quality_figures import Section, at_equal_time, sections
from benchmarks.report import markdown, write
from benchmarks.results import Record
from benchmarks.settings_table import settings
from benchmarks.variant_list import APART, SKIPPED, TOMA_RATIOS
from tome_core.settings.presets import MARKS

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
QUALITY = "quality-cpu-2026-11-25"
TO_CHOOSE_BY, CORRECTION = "front-cpu-2026-11-25", "correction-cpu-2026-11-25"
TRANSFORMER, SDXL = "transformer-cpu-2026-11-25", "sdxl-cpu-2026-11-25"
AT_EQUAL_TIME = {
    "10 steps": QUALITY,
    "10 steps, late half": "late-half-cpu-2026-11-25",
    "8 steps": "steps-8-cpu-2026-11-25",
    "4 steps": "steps-4-cpu-2026-11-25",
    "10 steps, guidance 7.5": "guidance-cpu-2026-11-25",
}
HOST_CALLS = "host-calls-cpu-2026-11-27"
HOST_ATTENTIONS = {
    "comfyui": "ComfyUI, its own on a CPU",
    "comfyui-pytorch": "ComfyUI, PyTorch's",
    "comfyui-split": "ComfyUI, split",
    "webui-sub-quadratic": "AUTOMATIC1111, sub-quadratic",
    "webui-sdp": "AUTOMATIC1111, sdp (PyTorch's)",
    "webui-doggettx": "AUTOMATIC1111, Doggettx",
}
STACKING = ("stacking-cpu-2026-11-25", "stacking-easycache-cpu-2026-11-26", "stacking-wan-cpu-2026-11-25")
CARDS = {"card": "card-h200-2026-11-26", "block": "gpu-cpu-2026-11-27"}
TOKENS = 4096  # of the finest level of the scene models
PEERS = {
    "tomesd-0.5": "tomesd, ratio .5",
    "tomesd-early-and-late-0.75-then-0.35": "tomesd, ratio .75 early, .35 late",
    "downsample-2x2": "token down-sampling 2x2",
}
TILES = {"tiles-2x2": "attention in 2x2 tiles (as HyperTile)"}
METHODS = {
    **{f"preset-{name}": f"**`{name}`, strength {value:g}**" for name, value in MARKS.items()},
    "sized-0.5": "q+k+v merged, proportional attention, ratio .5",
    "downsample-early-and-late-8x8-then-2x2": "token down-sampling 8x8 early, 2x2 late",
    **PEERS,
    "tomesd-0.75": "tomesd, ratio .75",
    **TILES,
    "random-partner-0.75": "random partners (control)",
    "zero-attention": "attention set to zero (control)",
    "bfloat16": "bfloat16 (yardstick)",
    "twice-the-solver-steps": "twice the solver steps (yardstick)",
}
OF_TRANSFORMERS = {
    **{f"preset-{name}": METHODS[f"preset-{name}"] for name in MARKS},
    "downsample-2x2": METHODS["downsample-2x2"],
    **{f"ToMA-{ratio}": f"ToMA by its abstract, ratio {ratio}" for ratio in TOMA_RATIOS},
    **{f"first-block-cache-{most}": f"FirstBlockCache, threshold {most}" for most in SKIPPED},
    **{name: METHODS[name] for name in ("random-partner-0.75", "zero-attention", "bfloat16",
                                        "twice-the-solver-steps")},
}
BESIDE = {name: label for name, label in {**PEERS, **TILES}.items() if name != "tomesd-0.5"}  # the better one is there
PARTS_OF_MERGING = {
    "unsized": "means alone",
    "uncorrected": "and proportional attention",
    "unfitted": "and the closed form",
    "": "and the fit: the engine's",
}
_BETWEEN = re.compile(r"(<!-- table (\w+): [^>]*-->\n)(.*?)(<!-- end of table -->)", re.S)
_ABSENT = "n/a"


@lru_cache
def record(name: str) -> Record:
    """A committed result. Raises ResultError if its pictures were there to choose by."""
    found = results.load(results.FOLDER / f"{name}.json")
    if name != TO_CHOOSE_BY and found["kind"] == "quality":
        subjects.check_purpose(found, subjects.SHOW, name)
    return found


def gains() -> str:
    """How many times as fast calls of a whole UNet are in real hosts, by picture size."""
    _, _, *lines = _of_report((0, 1, 9), HOST_CALLS).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    factors = {(attention, pixels): factor for attention, pixels, factor in rows}
    sizes = sorted({pixels for _, pixels in factors}, key=int)
    return markdown(("attention function of the host", *(f"{pixels} px" for pixels in sizes)), (
        (label, *(factors.get((name, pixels), "") for pixels in sizes)) for name, label in HOST_ATTENTIONS.items()
    ))  # fmt: skip


def strength() -> str:
    """What each named strength takes and changes, and tomesd beside it."""
    models = sections(record(QUALITY))
    marks = {f"preset-{name}": (f"{value:g}", f"`{name}`") for name, value in MARKS.items()}
    rows = {**marks, "tomesd-0.5": ("", PEERS["tomesd-0.5"])}
    return markdown(("strength", "", "time", "error, %"), (
        (*first, _times(models, name), _deviations(models, name)) for name, first in rows.items()
    ))  # fmt: skip


def _methods(name: str, methods: dict[str, str]) -> str:
    """Every method's work, error and time, as far as it was measured there."""
    models = sections(record(name))
    there = {row["variant"] for row in record(name)["rows"]}
    return markdown(("attention work left", "method", "dev %", "PSNR dB", "detail", "time"), (
        (_work(models, name), label, _deviations(models, name), *_psnrs_and_details(models, name), _times(models, name))
        for name, label in methods.items() if name in there
    ))  # fmt: skip


def equal_time() -> str:
    """PSNR of others and of strength where both take the same time."""
    columns = {head: [_beside(model) for model in sections(record(name))] for head, name in AT_EQUAL_TIME.items()}
    return markdown(("beside", *columns), (
        (label, *(", ".join(model.get(name, _ABSENT) for model in models) for models in columns.values()))
        for name, label in BESIDE.items()
    ))  # fmt: skip


def _beside(model: Section) -> dict[str, str]:
    return {one.name: f"{one.theirs.psnr:.1f} : {one.ours.psnr:.1f}" if one.ours else f"{one.theirs.psnr:.1f} : -"
            for one in at_equal_time(model)}  # fmt: skip


def parts() -> str:
    """What sizes, the closed form and the fit add to merged keys."""
    models = sections(record(CORRECTION))
    return markdown(("", *(f"{_keys(ratio)} keys" for ratio, _ in APART)), (
        (label, *(_deviations(models, _merged_keys(*one, without)) for one in APART))
        for without, label in PARTS_OF_MERGING.items()
    ))  # fmt: skip


def _merged_keys(ratio: float, cell: int, without: str = "") -> str:
    return f"merged-keys{without and '-'}{without}-{ratio}-cells-{cell}"


def _keys(ratio: float) -> str:
    return f"{TOKENS * (1 - ratio):,.0f}"


def _card(name: str) -> str:
    """Times on one device, but for tiny UNets."""
    found = record(name)
    tiny = found["settings"]["tiny_models"]
    return gpu_report.calls_table([one for one in found["rows"] if not tiny or one["key"].startswith(BLOCK)])


def _of_report(columns: Iterable[int], name: str) -> str:
    """Some columns of the first table that `benchmarks.report` writes."""
    text = write([results.FOLDER / f"{name}.json"], None, None)
    head, _, *lines = re.search(r"(?:^\|.*\n)+", text, re.M)[0].splitlines()
    cells, *rows = ([line.strip("| ").split(" | ")[one] for one in columns] for line in (head, *lines))
    return markdown(cells, rows)


def stacking() -> str:
    """How many times as fast large models are beside other methods: medians over rounds."""
    groups: dict[tuple[str, str], list[dict[str, float]]] = {}
    for row in (row for name in STACKING for row in record(name)["rows"] if not row["model"].startswith("scenes")):
        factors = {arm: row["seconds"]["plain"] / spent for arm, spent in row["seconds"].items()}
        slower = min(factors["ours first"], factors["theirs first"])
        factors["of the product"] = slower / (factors["alone"] * factors["merged"])
        groups.setdefault((row["beside"], row["model"]), []).append(factors)
    heads = ("beside", "model", "of", "times as fast alone", "merging alone", "both, ours first", "both, theirs first",
             "of the product")  # fmt: skip
    columns = ("alone", "merged", "ours first", "theirs first", "of the product")
    return markdown(heads, (
        (*pair, str(len(rounds)), *(f"{median(one[column] for one in rounds):.2f}" for column in columns))
        for pair, rounds in groups.items()
    ))  # fmt: skip


def _several(values: Iterable[float]) -> str:
    """One value a model, with two digits below 1 and three above."""
    return ", ".join(f"{value:#.{2 if value < 1 else 3}g}" for value in values)


def _deviations(models: list[Section], name: str) -> str:
    there = [model.noised[name].dev.value for model in models if name in model.noised]
    return _several(there) or _ABSENT


def _psnrs_and_details(models: list[Section], name: str) -> tuple[str, str]:
    found = [model.pictures[name] for model in models]
    return ", ".join(f"{one.psnr.value:.1f}" for one in found), ", ".join(f"{one.detail.value:.2f}" for one in found)


def _times(models: list[Section], name: str) -> str:
    return ", ".join(f"{model.pictures[name].time:.2f}" for model in models)


def _work(models: list[Section], name: str) -> str:
    """Over the noise schedule, where that was measured: all models have the same."""
    one = models[0].noised.get(name) or models[0].pictures[name]
    return f"{one.work:.2g}"


TABLES = {
    "strength": strength,
    "quality": partial(_methods, QUALITY, METHODS),
    "sdxl": partial(_methods, SDXL, METHODS),
    "transformer": partial(_methods, TRANSFORMER, OF_TRANSFORMERS),
    **{one.__name__: one for one in (gains, equal_time, parts, settings, stacking)},
    **{name: partial(_card, one) for name, one in CARDS.items()},
    "host_calls": partial(_of_report, range(10), HOST_CALLS),
}


def fill(text: str) -> str:
    """A page with its tables made anew. Raises ValueError for a table that there is not."""
    def make(found: re.Match) -> str:
        head, name, _, end = found.groups()
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}")
        return f"{head}{TABLES[name]()}\n{end}"

    return _BETWEEN.sub(make, text)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, or write them into the pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doc_tables", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace those of README and docs")
    if not parser.parse_args(arguments).write:
        print("\n\n".join(f"{name}\n\n{one()}" for name, one in TABLES.items()))
        return 0
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
