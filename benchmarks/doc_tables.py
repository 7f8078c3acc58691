"""The tables of the pages, made from committed results and the settings: ``python -m benchmarks.doc_tables --write``.

The command replaces the text between ``<!-- table NAME: python -m benchmarks.doc_tables --write -->`` and ``<!-- end
of table -->`` on each page. Without ``--write`` it prints the tables. To show a newer result, write its name below, and
correct the prose that links to the older one.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from functools import lru_cache, partial
from statistics import fmean
from typing import Any

from benchmarks import blocks as blocks_of_sdxl
from benchmarks import gpu_report, own_error_report, pooled, results, subjects, transformers, work
from benchmarks import host_calls as calls
from benchmarks.models import BLOCK, SD15
from benchmarks.models import SDXL as SDXL_UNET
from benchmarks.quality_report import Section, at_equal_time, sections
from benchmarks.report import ABSENT, markdown, number
from benchmarks.results import Record
from tome_core import describe_settings, preset
from tome_core.settings import form
from tome_core.settings.presets import MARKS

PAGES = (results.ROOT / "README.md", *sorted((results.ROOT / "docs").glob("*.md")))
QUALITY = "quality-cpu-2026-11-25"
BLOCKS = "blocks-show-8-cpu-2026-11-29"
BLOCKS_FRONT = ("blocks-choose-8-cpu-2026-11-29", BLOCKS)
POOLED = ("pooled-cpu-2026-11-29", *(f"pooled-deep-{steps}-cpu-2026-11-29" for steps in (4, 8, 20)))
OWN_ERROR = ("own-error-cpu-2026-11-28", "own-error-sdxl-cpu-2026-11-28")
BY_STEPS = {"4 steps": "steps-4-cpu-2026-11-25", "8 steps": "steps-8-cpu-2026-11-25", "10 steps": QUALITY,
            "20 steps": "steps-20-cpu-2026-11-25", "10 steps, guidance 7.5": "guidance-cpu-2026-11-25"}  # fmt: skip
AT_EQUAL_TIME = {"10 steps": QUALITY, "8 steps": "steps-8-cpu-2026-11-25", "4 steps": "steps-4-cpu-2026-11-25",
                 "10 steps, guidance 7.5": "guidance-cpu-2026-11-25"}  # fmt: skip
HOST_CALLS = ("host-calls-sdxl-cpu-2026-11-29", "host-calls-cpu-2026-11-27")
CARD, BLOCK_ON_CPU = "card-h200-2026-11-26", "gpu-cpu-2026-11-27"
METHODS = {
    **{f"preset-{name}": f"**`{name}`, strength {value:g}**" for name, value in MARKS.items()},
    "sized-0.5": "q+k+v merged, proportional attention, ratio .5",
    "tomesd-0.5": "tomesd, ratio .5", "tomesd-early-and-late-0.75-then-0.35": "tomesd, ratio .75 early, .35 late",
    "downsample-2x2": "token down-sampling 2x2", "tomesd-0.75": "tomesd, ratio .75",
    "tiles-2x2": "attention in 2x2 tiles (as HyperTile)",
    "zero-attention": "attention set to zero (control)",
    "bfloat16": "bfloat16 (yardstick)", "twice-the-solver-steps": "twice the solver steps (yardstick)"}  # fmt: skip
RIVALS = ("tomesd-early-and-late-0.75-then-0.35", "downsample-2x2", "tiles-2x2")
_BETWEEN = re.compile(r"(<!-- table (\w+): [^>]*-->\n)(.*?)(<!-- end of table -->)", re.S)


@lru_cache
def load_result(name: str) -> Record:
    """Load ``results/NAME.json``, once a process. OSError, or ResultError if no result, or of pictures to choose by."""
    loaded = results.load(results.FOLDER / f"{name}.json")
    subjects.check_purpose(loaded, subjects.SHOW, name)
    return loaded


def gains() -> str:
    """Make the Markdown table of our speed-ups in `HOST_CALLS`: a row an attention, a column a UNet and size."""
    factors = _host_gains()
    columns = sorted({(unet, pixels) for unet, _, pixels in factors}, key=lambda one: (one[0] == SD15, int(one[1])))
    heads = (f"{work.LABELS[unet]}, {pixels} px" for unet, pixels in columns)
    return markdown(("attention function of the host", *heads),
                    ((label, *(factors.get((unet, name, pixels), ABSENT) for unet, pixels in columns))
                     for name, (_, _, label) in calls.ATTENTIONS.items()))  # fmt: skip


def _host_rows() -> list[dict[str, str]]:
    """Return the rows of `HOST_CALLS`, by `host_calls.HEAD`."""
    return calls.table_rows([load_result(name) for name in HOST_CALLS])


def _host_gains() -> dict[tuple[str, str, str], str]:
    """Return our speed-ups in `HOST_CALLS` by UNet, attention and size."""
    return {(row["UNet"], row["attention"], row["pixels"]): row[calls.GAIN] for row in _host_rows()}


def counted() -> str:
    """Make the Markdown table of `balanced`: times as fast by counted work, beside times as fast that were timed."""
    rows, strength = [], "balanced"
    by_host = _host_gains()
    for name, pixels in (*((SD15, pixels) for pixels in calls.PIXELS), (SDXL_UNET, 1024)):
        timed = (by_host[name, attention, str(pixels)] for attention in ("comfyui-pytorch", "webui-sdp"))
        rows.append(("a CPU thread, PyTorch's attention in ComfyUI, A1111", f"{work.LABELS[name]}, {pixels} px",
                     work.gain(work.share(name, strength, pixels, "cpu")), ", ".join(timed)))  # fmt: skip
    card = load_result(CARD)["rows"]
    by_clock = gpu_report.factors(card)
    for case, (of, _) in gpu_report.cases(card).items():
        name, pixels, _ = case.split()
        alone = " (attention alone)" if name == SDXL_UNET else ""
        share = work.share(name, strength, int(pixels), blocks=False)
        early = calls.share_from(preset(strength, calls.CURVES[name]).early_until)  # of its attention
        rows.append(("an H200's own time (by the clock)", f"{work.LABELS[name]}, {pixels} px{alone}", work.gain(share),
                     f"{_of_card(of, early):.2f} ({by_clock[case]:.2f})"))  # fmt: skip
    return markdown(("timed on", "of", "counted", "timed"), rows)


def _of_card(of: dict[str, Any], early: float) -> float:
    """Return how many times as fast a card's own work is in 20 steps, half of which keep a match; `early`: a share."""
    means = [fmean(of[when]["card_ms"] for when in pair) for pair in (("renewed", "kept"), ("late new", "late kept"))]
    return of["unmerged"]["card_ms"] / (early * means[0] + (1 - early) * means[1])


def blocks() -> str:
    """Make the Markdown table of `BLOCKS`: a line a strength, with whole blocks and without, and a line a rival."""
    (model,) = sections(load_result(BLOCKS))

    def cells(variant: str) -> tuple[str, ...]:
        figures = model.pictures[variant]
        return f"{figures.psnr.value:.1f}", f"{figures.time:.2f}"

    rows = [(METHODS[f"preset-{name}"], *(cell for kind, with_blocks in (("preset", True), ("attention-alone", False))
                                          for cell in (f"{work.share(SDXL_UNET, name, 1024, blocks=with_blocks):.0%}",
                                                       *cells(f"{kind}-{name}"))))
            for name in MARKS]  # fmt: skip
    rows += [(METHODS[name], ABSENT, *cells(name), *[ABSENT] * 3) for name in METHODS
             if name in model.pictures and not name.startswith("preset-")]  # fmt: skip
    heads = ("less work", "PSNR dB", "time")
    return markdown(("", *heads, *(f"{head}, attention alone" for head in heads)), rows)


def steps() -> str:
    """Make the Markdown table of `balanced` in `BY_STEPS`: PSNR and time, each of all models."""
    rows, name = [], "preset-balanced"
    for label, result in BY_STEPS.items():
        models = sections(load_result(result))
        psnr = ", ".join(f"{model.pictures[name].psnr.value:.1f}" for model in models)
        rows.append((label, psnr, _times(models, name)))
    return markdown(("pictures", "PSNR dB", "time"), rows)


def own_error() -> str:
    """Make the Markdown table of how well estimates tell the errors of pictures in `OWN_ERROR`."""
    return own_error_report.predictions(list(map(load_result, OWN_ERROR)))


def own_error_by_model() -> str:
    """Make the Markdown table of what the own error gains in each model of `OWN_ERROR`."""
    return own_error_report.by_model(list(map(load_result, OWN_ERROR)))


def host_calls() -> str:
    """Make the Markdown table of `HOST_CALLS`, a row an attention and size: `host_calls.HEAD` but its last column."""
    heads = [head for head in calls.HEAD if head != calls.PEAK]
    return markdown(heads, ([row[head] for head in heads] for row in _host_rows()))


def strength() -> str:
    """Make a Markdown table of named strengths and tomesd 0.5 in `QUALITY`; a cell joins all models' times or devs."""
    models = sections(load_result(QUALITY))
    marks = {f"preset-{name}": (f"{value:g}", f"`{name}`") for name, value in MARKS.items()}
    return markdown(("strength", "", "time", "error, %"),
                    ((*first, _times(models, name), _deviations(models, name))
                     for name, first in {**marks, "tomesd-0.5": ("", METHODS["tomesd-0.5"])}.items()))  # fmt: skip


def _methods(name: str) -> str:
    """Make the Markdown table of those `METHODS` that result `name` has, in the order of `METHODS`.

    Work is the first model's alone; dev, PSNR, detail and time have the values of all models, with commas.
    """
    models = sections(load_result(name))
    rows = []
    for method in METHODS:
        if method in models[0].pictures:
            pictures = [model.pictures[method] for model in models]
            rows.append((f"{models[0].work(method):.2g}", METHODS[method], _deviations(models, method),
                         ", ".join(f"{figures.psnr.value:.1f}" for figures in pictures),
                         ", ".join(f"{figures.detail.value:.2f}" for figures in pictures), _times(models, method)))
    return markdown(("attention work left", "method", "dev %", "PSNR dB", "detail", "time"), rows)


def equal_time() -> str:
    """Make the Markdown table of PSNR at equal time: a row for each of `RIVALS`, a column for each of `AT_EQUAL_TIME`.

    A cell has a pair for each model, with commas: the rival's PSNR in dB, a colon, and the strengths' PSNR at the
    rival's time, interpolated: n/a if no strength is as fast, the slowest strength's if all are faster.
    """
    columns = {head: [{rival.name: f"{rival.theirs:.1f} : {number(rival.ours, '.1f')}"
                       for rival in at_equal_time(model)} for model in sections(load_result(name))]
               for head, name in AT_EQUAL_TIME.items()}  # fmt: skip
    return markdown(("beside", *columns),
                    ((METHODS[name], *(", ".join(model[name] for model in models) for models in columns.values()))
                     for name in RIVALS))  # fmt: skip


def settings(of_hosts: bool = True) -> str:
    """Make the Markdown table of the settings that the hosts have, or of the others: name, default, range and help.

    The name in the hosts is added if it differs.
    """
    rows = []
    for setting in (one for one in describe_settings() if ("place" in one) is of_hosts):
        default = setting.get("unset", "automatic") if setting["default"] is None else f"`{setting['default']}`"
        known_as = f", in the hosts `{setting['known_as']}`" if "known_as" in setting else ""
        cells = (f"`{setting['name']}`{known_as}", default, _range(setting), setting["help"])
        rows.append([cell.replace("|", "\\|") for cell in cells])
    rows += [(f"`{field.name}`", f"`{field.default}`", f"from {field.minimum:g} to {field.limit:g}", field.help)
             for field in form.FIELDS if of_hosts and not field.setting]  # fmt: skip
    return markdown(("setting", "default", "range", "what it does"), rows)


def _range(setting: dict[str, Any]) -> str:
    """Format a `describe_settings` entry: choices (None by name), ``from 1 to 8``, ``from 1`` or "on, off"."""
    if "choices" in setting:
        unset = setting.get("unset", "automatic")
        return ", ".join(unset if choice is None else f"`{choice}`" for choice in setting["choices"])
    if "minimum" not in setting:
        return "on, off"
    end = "" if setting["limit"] is None else f" to {setting['limit']:.10g}"
    return f"from {setting['minimum']:.10g}{end}"


def _deviations(models: Iterable[Section], name: str) -> str:
    """Join with commas a variant's `Noised.dev`, a mean in %, of each model that measured the variant; n/a if none."""
    values = [model.noised[name].dev.value for model in models if name in model.noised]
    return ", ".join(f"{value:#.{2 if value < 1 else 3}g}" for value in values) or ABSENT


def _times(models: Iterable[Section], name: str) -> str:
    """Join a variant's times in the models, as shares of unmerged: ``0.71, 0.65``. Every model must have timed it."""
    return ", ".join(f"{model.pictures[name].time:.2f}" for model in models)


def pooled_tables() -> str:
    """Make the tables of transformers' whole blocks and their rivals."""
    return pooled.table([load_result(name) for name in POOLED])


def blocks_front() -> str:
    """Make the Markdown table of `BLOCKS_FRONT`, by which SDXL's strength was chosen."""
    return blocks_of_sdxl.front([results.load(results.FOLDER / f"{name}.json") for name in BLOCKS_FRONT])


TABLES = {
    **{make.__name__: make for make in (gains, counted, blocks, blocks_front, steps, own_error, own_error_by_model,
                                        host_calls, strength, equal_time, settings)},
    "work": work.shares_table, "layouts": work.layouts_table,
    "settings_of_python": partial(settings, of_hosts=False),
    "quality": partial(_methods, QUALITY),
    "transformers": transformers.shares_table, "pooled": pooled_tables,
    "card": lambda: gpu_report.calls_table(load_result(CARD)["rows"]),
    "block": lambda: gpu_report.calls_table([row for row in load_result(BLOCK_ON_CPU)["rows"] if BLOCK in row["key"]])}


def fill(text: str) -> str:
    """Return a page's text with each table between marks made again. Raises KeyError if `TABLES` lacks its name."""
    return _BETWEEN.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[4]}", text)


def main(arguments: list[str] | None = None) -> int:
    """Print all tables, or with ``--write`` put them into `PAGES`; return 0. arguments: None means ``sys.argv[1:]``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doc_tables", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the tables of README and docs")
    if not parser.parse_args(arguments).write:
        print("\n\n".join(f"{name}\n\n{make()}" for name, make in TABLES.items()))
        return 0
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
