"""The options of ``python -m benchmarks.speed``, and what they are where they are not given."""

from __future__ import annotations

import argparse
import importlib.util

import torch

from benchmarks import report
from benchmarks.speed_models import SHAPES
from benchmarks.speed_plan import SUITES, UNetCase, cases
from benchmarks.speed_variants import CONTROL, VARIANTS, choose

SIZES = (512, 768, 1024, 1536, 2048)
STEPS, GPU_MINUTES = 20, 9.5


def parser(description: str) -> argparse.ArgumentParser:
    """The command line. What is not given depends on the device."""
    variants = "\n".join(f"  {name:<20} {variant.meaning}" for name, variant in VARIANTS.items())
    suites = "\n".join(f"  {name:<20} {meaning}" for name, meaning in SUITES.items())
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"suites:\n{suites}\n\nvariants:\n{variants}\n\nThe table and a plot of finished runs: "
        "python -m benchmarks.report FILE...",
    )  # fmt: skip
    add = made.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda if torch sees one, else cpu")
    add("--dtype", choices=("float32", "float16", "bfloat16"), help="default: float16 on cuda, float32 on cpu")
    add("--suites", nargs="+", choices=SUITES, metavar="SUITE", help="default: all on cuda, calls on cpu")
    add("--models", nargs="+", choices=SHAPES, metavar="MODEL",
        help="sd15, sdxl; default: both on cuda, sd15 on cpu (SDXL in float32 takes 10 GB)")
    add("--sizes", nargs="+", type=_size, metavar="PX",
        help=f"sides of square pictures for the suites calls and pictures; default: {' '.join(map(str, SIZES))} on "
             "cuda, 512 on cpu")
    add("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT",
        help=f"default: all; {CONTROL} is always there, and ours stands for all of ours")
    add("--rounds", type=_count, metavar="N", help="timed turns of every variant; default: 8 on cuda, 5 on cpu")
    add("--steps", type=_count, default=STEPS, metavar="N", help="solver steps of a picture; default: %(default)s")
    add("--compile", action="store_true", help="measure every fused case compiled as well (a minute or more for each "
                                               "variant and size)")
    add("--minutes", type=float, metavar="M", help="begin no row that would end later, and say which are missing; "
                                                   f"default: {GPU_MINUTES} on cuda, no limit on cpu")
    report.add_output(made)
    add("--dry-run", action="store_true", help="the plan of a GPU, with tiny models on the CPU: shows that the command "
                                               "works, and measures nothing worth keeping")
    add("--smoke", action="store_true", help="the smallest run: tiny models, one round, calls and pictures at 512 px")
    return made


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; use a whole number from 1 up")
    return int(text)


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 64 or int(text) % 64:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; use a multiple of 64, such as 512")
    return int(text)


def complete(options: argparse.Namespace) -> argparse.Namespace:
    """The options with everything filled in that was not given; `rehearsal`: nothing of it is worth keeping.

    Raises ValueError where they cannot be met.
    """
    options.rehearsal = options.dry_run or options.smoke
    options.device = options.device or ("cuda" if torch.cuda.is_available() and not options.rehearsal else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu, or --dry-run for a rehearsal")
    like_gpu = options.device == "cuda" or options.dry_run
    options.dtype = options.dtype or ("float16" if options.device == "cuda" else "float32")
    options.suites = options.suites or (list(SUITES) if like_gpu else ["calls", "pictures"][: 1 + options.smoke])
    options.models = options.models or (list(SHAPES) if like_gpu else ["sd15"])
    options.sizes = options.sizes or (list(SIZES) if like_gpu else [512])
    options.rounds = options.rounds or (1 if options.rehearsal else 8 if like_gpu else 5)
    options.steps = min(options.steps, 2) if options.rehearsal else options.steps
    options.variants = choose(options.variants or list(VARIANTS))
    if options.minutes is None and options.device == "cuda":
        options.minutes = GPU_MINUTES
    if "tomesd" in options.variants and importlib.util.find_spec("tomesd") is None:
        raise ValueError("tomesd is not installed, and is one of the variants: pip install tomesd==0.1.3, or name the "
                         "others with --variants")
    if not plan_cases(options):
        raise ValueError(f"there is nothing to measure in the suites {', '.join(options.suites)} for "
                         f"{', '.join(options.models)}; the hires fix is measured on sd15")
    return options


def plan_cases(options: argparse.Namespace) -> list[UNetCase]:
    """The cases that the completed options ask for."""
    return cases(options.suites, options.models, options.sizes, options.steps, options.compile)


def settings(options: argparse.Namespace) -> dict:
    """What has to be equal for a run to go on."""
    names = ("dtype", "suites", "models", "sizes", "rounds", "steps", "compile")
    variants = {name: VARIANTS[name].meaning for name in options.variants}
    return {**{name: getattr(options, name) for name in names}, "tiny_models": options.rehearsal, "variants": variants}
