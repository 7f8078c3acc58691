"""The options of ``python -m benchmarks.quality``, and what is refused before anything is measured."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import replace
from pathlib import Path

from benchmarks import picture_metrics, report, subjects
from benchmarks.quality_rows import Amounts
from benchmarks.variant_list import ALWAYS, GROUPS, VARIANTS
from demo import checkpoint

AMOUNTS = {
    "smallest": Amounts(noised=2, pictures=1, steps=2, times=(200, 800)),
    "standard": Amounts(noised=8, pictures=4, steps=10, clock=True),  # a quarter of an hour of one core a checkpoint
    "choose": Amounts(noised=16, pictures=4, steps=10),
    "all": Amounts(noised=24, pictures=8, steps=10, clock=True),
}
OWN_PICTURES, OWN_STEPS = 8, 20  # a user's models want more steps than the scene models


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.quality", description="What merging does to a trained "
                                   "model's predictions and pictures.")  # fmt: skip
    add, which = made.add_argument, made.add_mutually_exclusive_group()
    for name, text in (
        ("smallest", "a few variants, in well under a minute: for tests"),
        ("standard", "the variants that matter (default)"),
        ("all", "every variant"),
    ):
        which.add_argument(f"--{name}", dest="group", action="store_const", const=name, help=text)
    which.add_argument("--variants", nargs="+", metavar="NAME", help="these, beside the controls and yardsticks")
    add("--for", dest="purpose", choices=tuple(subjects.PURPOSES), default=subjects.SHOW, help="which pictures: those "
        "that tables show (default), or others, by which presets are chosen")  # fmt: skip
    add("--list", action="store_true", help="print the names of all variants and stop")
    add("--model", nargs="+", type=Path, metavar="PATH", help="scene models of this repository (default: those in "
        "demo/), or your own checkpoints: diffusers folders or .safetensors files")  # fmt: skip
    add("--prompts", type=Path, metavar="FILE", help="one prompt a line, for your own checkpoint; the usual choice "
        "is PartiPrompts (P2), which you get from its authors")  # fmt: skip
    add("--config", type=Path, metavar="DIR", help="with a single-file checkpoint: a local diffusers folder with its "
        "configuration and tokenizer")  # fmt: skip
    add("--pictures", type=int, metavar="N", help="whole pictures of every variant")
    add("--noised", type=int, metavar="N", help="noised held-out pictures of every variant; an even number")
    add("--steps", type=int, metavar="N", help="solver steps of a picture")
    add("--schedule", choices=subjects.SCHEDULES, help="of the whole pictures of a scene model (default uniform); "
        "late-half starts as img2img does, from a picture at half of the times")  # fmt: skip
    add("--guidance", type=float, metavar="X", help="of the whole pictures of a scene model (default "
        f"{subjects.GUIDANCE})")  # fmt: skip
    add("--clock", action=argparse.BooleanOptionalAction, default=None, help="take the time of whole pictures on a "
        "CPU, on one thread (default, but for --smallest and --for choose)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of whatever a method draws (default 0)")
    add("--frechet", action="store_true", help="Frechet distances as well; from 1,024 pictures up")
    add("--save", type=Path, metavar="DIR", help="keep the pictures as DIR/checkpoint/variant/number.png")
    add("--device", metavar="NAME", help="cpu, cuda, ... (default: a GPU if torch sees one, else cpu)")
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of your own checkpoint; "
        "float32 (default) keeps rounding out of the comparison")  # fmt: skip
    report.add_output(made)
    return made


def complete(options: argparse.Namespace) -> tuple[Amounts, list[str]]:
    """Fill in the defaults and check everything together; gives the amounts and the prompts.

    Raises ValueError or OSError with the sentence the user is to read.
    """
    unknown = [name for name in options.variants or () if name not in VARIANTS]
    if unknown:
        raise ValueError(f"no variant is called {' or '.join(unknown)}; --list prints the names")
    options.group = options.group or ("choose" if options.purpose == subjects.CHOOSE else "standard")
    options.model = options.model or list(subjects.SCENE_MODELS[: 1 if options.group == "smallest" else None])
    own = [path for path in options.model if not subjects.is_scene_model(path)]
    for path in own:
        checkpoint.inspect(path)
    _check_variants(options)
    if own and (options.schedule or options.guidance is not None):
        raise ValueError(f"--schedule and --guidance are of the scene models; {own[0]} is drawn as its pipeline does")
    if len({path.stem for path in options.model}) < len(options.model):
        raise ValueError("two of the models have the same name, by which a result tells them apart; rename one")
    return _amounts(options, bool(own)), _prompts(options.prompts, own)


def _check_variants(options: argparse.Namespace) -> None:
    kinds = {subjects.kind_of(path): path for path in options.model}
    for name in options.variants or ():
        can = VARIANTS[name].kinds
        if not kinds.keys() & set(can):
            raise ValueError(f"{name} needs a {' or a '.join(can)}, and {next(iter(kinds.values()))} is none; "
                             "leave the variant out, or give another --model")
    chosen = {name for many in names(options).values() for name in many if kinds.keys() & set(VARIANTS[name].kinds)}
    if any(VARIANTS[name].role == "tomesd" for name in chosen) and importlib.util.find_spec("tomesd") is None:
        raise ValueError("tomesd, which the others are compared with, is not installed: pip install tomesd==0.1.3")


def _amounts(options: argparse.Namespace, own: bool) -> Amounts:
    amounts = AMOUNTS[options.group]
    if own and options.group != "smallest":
        amounts = replace(amounts, pictures=OWN_PICTURES, steps=OWN_STEPS)
    given = {name: getattr(options, name) for name in ("noised", "pictures", "steps", "seed", "frechet", "clock")}
    amounts = replace(amounts, **{name: value for name, value in given.items() if value is not None})
    if amounts.noised < 2 or amounts.noised % 2:
        raise ValueError(f"--noised {amounts.noised}: give an even number, because tomesd draws no random "
                         "destinations for an odd batch")
    if amounts.pictures < 1 or amounts.steps < 1:
        raise ValueError(f"--pictures {amounts.pictures}, --steps {amounts.steps}: give numbers from 1 up")
    if amounts.frechet and amounts.pictures < picture_metrics.ENOUGH_FOR_FRECHET:
        raise ValueError(f"--frechet with --pictures {amounts.pictures}: a Frechet distance of so few separates "
                         f"nothing; give --pictures {picture_metrics.ENOUGH_FOR_FRECHET} or more, or leave it out")
    return amounts


def _prompts(path: Path | None, own: list[Path]) -> list[str]:
    if not own:
        return []
    if path is None:
        raise ValueError(f"{own[0]} needs --prompts FILE, one prompt a line; PartiPrompts (P2) is the usual choice")
    found = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not found:
        raise ValueError(f"--prompts {path} is empty; give one prompt a line")
    return found


def manner(options: argparse.Namespace) -> subjects.Manner:
    """How the whole pictures of scene models are made."""
    guidance = subjects.GUIDANCE if options.guidance is None else options.guidance
    return subjects.Manner(options.schedule or subjects.UNIFORM, guidance)


def names(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """The variants of each measure, the unmerged one first."""
    if not options.variants:
        return GROUPS[options.group]
    chosen = (*ALWAYS, *(name for name in dict.fromkeys(options.variants) if name not in ALWAYS))
    return {"noised": chosen, "pictures": chosen}
