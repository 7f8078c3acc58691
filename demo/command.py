"""The demo's command line. Everything that can be wrong is refused before the first picture is begun."""

import argparse
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from demo import checkpoint, prompt

OUTPUT = Path(__file__).resolve().parents[1] / "demo-output" / "comparison.png"
PICTURES = 1  # within a minute of a CPU
BALANCED = 0.5  # the mark of `tome_core.settings.presets.DEFAULT`, which would need torch


def number(name: str, low: int, high: int, remedy: str, kind: type = int):
    """Return an argparse ``type``, a `kind` of number from low to high; error: "... is no <name>; ..., <remedy>"."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if low <= kind(text) <= high:
                return kind(text)
        whole = "whole " * (kind is int)
        raise argparse.ArgumentTypeError(
            f"{text!r} is no {name}; allowed is a {whole}number from {low} to {high}, {remedy}")

    return parse


STRENGTH = number("strength", 0, 1, "such as 0.5; 0 is off", float)
STEPS = number("number of steps", 1, 1000, "such as 20")
SEED = number("seed", 0, 2**31, "such as 0")


def parser() -> argparse.ArgumentParser:
    """Make the parser of the options, which `install.py demo` passes on unchanged."""
    options = argparse.ArgumentParser(
        prog="demo", description="Pictures from the same seeds: without merging, and at one strength or several.")
    add = options.add_argument
    add("--strength", type=STRENGTH, action="append", metavar="S",
        help="how strongly to merge, from 0, which is off, to 1, which saves and changes the most; repeat it for "
             "several (default: 0.25, 0.5 and 1)")
    add("--pictures", type=number("number of pictures", 1, 64, "such as 4"), metavar="N",
        help=f"how many pictures each setting makes (default {PICTURES}, or one for each --prompt)")
    add("--steps", type=STEPS, default=20, metavar="N", help="solver steps a picture (default 20)")
    add("--seed", type=SEED, default=0, metavar="N",
        help="seed of the first picture; the next ones count up (default 0)")
    add("--prompt", action="append", metavar="TEXT",
        help=f"what to paint; repeat it for several. The embedded model knows {prompt.known_words()}")
    add_model(options)
    add("--report", action="store_true", help="also say what each strength merged where")
    add("--output", type=Path, default=OUTPUT, metavar="PNG", help="where the picture goes (default %(default)s)")
    return options


def add_model(to: argparse.ArgumentParser) -> None:
    """Add --model and --config, which name the user's model, and --device."""
    add = to.add_argument
    add("--model", type=Path, metavar="DIR_OR_FILE",
        help="your own model, a diffusers folder or a single .safetensors file (pickled checkpoints are refused), or "
             "one that demo.training.train wrote")
    add("--config", type=Path, metavar="DIR",
        help="with a single-file --model: a local diffusers folder with its configuration and tokenizer")
    add("--device", metavar="NAME", help="cpu, cuda, mps, ... (default: an accelerator if torch sees one, else cpu)")


def check(options: argparse.Namespace) -> checkpoint.Checkpoint | None:
    """Fill in `options.pictures`, check the options together, without torch, and return the result of `check_model`.

    Without --pictures, there is a picture for each --prompt, or PICTURES. Also tries to write beside the output, whose
    folder it makes. Raises ValueError or OSError for the user to read.
    """
    given = options.prompt or []
    if options.pictures and len(given) > options.pictures:
        raise ValueError(f"--pictures {options.pictures} is less than the {len(given)} prompts; "
                         "give at least as many, or leave --pictures out")
    options.pictures = options.pictures or len(given) or PICTURES
    user = check_model(options)
    if user is None or user.kind == "scenes":
        for text in given:
            prompt.parse(text)
    path, unfinished = options.output, options.output.with_name(f"{options.output.name}.part")
    if path.suffix.lower() != ".png" or path.is_dir():
        raise ValueError(f"--output {path} is no PNG file name; give one such as comparison.png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
        unfinished.unlink()
    except OSError as error:
        raise ValueError(f"--output {path} cannot be written ({error.strerror}); give another place") from error
    return user


def check_model(options: argparse.Namespace) -> checkpoint.Checkpoint | None:
    """Inspect --model, if any. Raises ValueError, OSError, also if --config is no diffusers folder or for no file."""
    if options.config and not (options.model and options.model.is_file()):
        raise ValueError(f"--config {options.config} belongs to a single-file --model FILE.safetensors; leave it out")
    if options.config and not (options.config / "model_index.json").is_file():
        raise ValueError(f"--config {options.config} has no model_index.json; give a diffusers folder")
    return checkpoint.inspect(options.model) if options.model else None


def wait_passively() -> None:
    """Set OMP_WAIT_POLICY, if the user did not, so that idle threads sleep. Call before torch is imported."""
    # on two shared cores spinning ones made a picture take 18-75 s instead of 4-6 s, and counted that as CPU time
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def device_of(name: str | None):
    """Return the torch device of this name; None: cuda, else mps, else cpu. Raises ValueError if it does not work."""
    import torch

    if name is None:
        mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    try:
        torch.empty(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name} does not work here ({str(error).splitlines()[0]}); "
                         "leave it out to take what torch finds") from error


def source_of(options: argparse.Namespace, user: checkpoint.Checkpoint | None):
    """Load a UserPipeline if `user` is no scene model; else Embedded, of `user` or, if None, of the demo's weights.

    Raises ValueError if the model cannot be loaded or merged, or if --device does not work.
    """
    wait_passively()
    print("Loading the model ...", file=sys.stderr)
    import tome_core
    from demo.model import WEIGHTS
    from demo.source import Embedded, UserPipeline

    device = device_of(options.device)
    if user and user.kind != "scenes":
        source = UserPipeline(user, options.config, device)
    else:
        source = Embedded(device, user.path if user else WEIGHTS)
    tome_core.patch(source.target, tome_core.MergeConfig()).remove()  # unsupported: say so now
    return source


def _run(options: argparse.Namespace, source) -> None:
    """Draw the pictures, write the sheet to ``options.output`` and print table, verdict and, if wanted, reports."""
    from tqdm import tqdm

    from demo import comparison, comparison_sheet

    texts = options.prompt or source.prompts
    wanted = [comparison.Order(texts[i % len(texts)], options.seed + i) for i in range(options.pictures)]
    strengths = (None, *dict.fromkeys(options.strength or comparison.STRENGTHS))
    with tqdm(total=options.steps * len(wanted) * len(strengths), unit="step") as bar:
        columns = comparison.compare(source, wanted, options.steps, strengths, bar.update, bar.set_description)
        bar.set_description("done")
    title = f"Token merging, {source.name}, {options.steps} steps on {source.device}"
    verdict = comparison.verdict(columns, on_cpu=source.device.type == "cpu")
    comparison_sheet.write(comparison_sheet.draw(columns, wanted, title, verdict), options.output)
    print(f"{title}, {len(wanted)} picture{'s' * (len(wanted) > 1)} each\n\n{comparison.table(columns)}\n")
    for column in columns[1:] if options.report else ():
        print(f"{column.name}: {column.report}\n")
    print(verdict)
    print(f"\nThe pictures side by side: {options.output.resolve()}")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return 0 if done, 2 if options do not work, 130 if interrupted. argparse exits by SystemExit."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    options = parser().parse_args(arguments)
    try:
        try:
            source = source_of(options, check(options))
        except (ValueError, OSError) as error:
            print(f"demo: {error}", file=sys.stderr)
            return 2
        _run(options, source)
    except KeyboardInterrupt:
        print("\ndemo: stopped; nothing was written.", file=sys.stderr)
        return 130
    return 0
