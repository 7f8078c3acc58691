"""``python -m benchmarks.blocks RESULT.json...``: SDXL's strength, chosen from whole pictures of its deep judge.

The results are those of ``python -m benchmarks.quality --variants blocks``, at one or several numbers of steps. For
each named strength the command lists the pairs of attention and whole blocks that leave out as much work as the
strength does now, at 1024 px, by their error; the best is first. Work and errors of attention and blocks are added.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks import report, results, work
from benchmarks.models import SDXL
from benchmarks.variants import BLOCKS_FRONT, blocks_rule
from tome_core import MergeConfig
from tome_core.measuring.expected import expected_share
from tome_core.settings.presets import MARKS

PIXELS = 1024
RIVAL = "tomesd-0.5"
ATTENTION = {"none": "", **{name: f"attention-alone-{name}" for name in MARKS}}
ROUNDED = 0.004  # of the work: what a strength may leave out less


class Choice(NamedTuple):
    """Attention as at a named strength, and blocks on a share of the tokens below a timestep.

    error: the mean squared error of pictures, as a share of the rival's, a geometric mean over results. saved: the
    shares of SDXL's work that are left out at each result's number of steps.
    """

    attention: str
    share: float
    below: float
    error: float
    saved: tuple[float, ...]


def errors(record: results.Record) -> dict[str, float]:
    """Map a result's variants to the mean squared error of their whole pictures. ResultError: without the rival."""
    found: dict[str, list[float]] = {}
    for row in (row for row in record["rows"] if row["measure"] == "pictures"):
        found.setdefault(row["variant"], []).extend(row["squared_error"])
    if RIVAL not in found:
        raise results.ResultError(f"a result has no pictures of {RIVAL}; run python -m benchmarks.quality --variants "
                                  f"blocks {RIVAL}")
    return {name: fmean(values) for name, values in found.items()}


@cache
def saved(config: MergeConfig, steps: int) -> float:
    """Return the share of SDXL's work, 0 to 1, that a config leaves out in a picture of so many steps."""
    return expected_share(work.unet_of(SDXL), config, PIXELS, PIXELS, steps)


def choices(records: list[results.Record], wanted: str) -> list[Choice]:
    """Return, the best first, what leaves out as much work as a named strength does now, in the mean over results."""
    steps = [record["settings"]["steps"] for record in records]
    told = [errors(record) for record in records]
    least = fmean(saved(work.config_of(SDXL, wanted), count) for count in steps) - ROUNDED
    found = []
    for attention, variant in ATTENTION.items():
        alone = [saved(work.config_of(SDXL, attention, blocks=False), count) if variant else 0.0 for count in steps]
        for share, below in BLOCKS_FRONT:
            both = tuple(base + saved(MergeConfig(rules=(blocks_rule(share, below),)), count)
                         for base, count in zip(alone, steps, strict=True))  # fmt: skip
            name = f"whole-blocks-{share}-below-{below}"
            of_rival = [(one[name] + (one[variant] if variant else 0.0)) / one[RIVAL] for one in told]
            found.append(Choice(attention, share, below, exp(fmean(map(log, of_rival))), both))
    return sorted((one for one in found if fmean(one.saved) >= least), key=lambda one: one.error)


def lines(records: list[results.Record], most: int) -> Iterator[tuple[Any, ...]]:
    """Yield a table's lines: for each named strength the `most` best choices, after what it is now."""
    told = [errors(record) for record in records]
    for name in MARKS:
        if all(f"preset-{name}" in one for one in told):
            now = exp(fmean(log(one[f"preset-{name}"] / one[RIVAL]) for one in told))
            shares = (f"{saved(work.config_of(SDXL, name), record['settings']['steps']):.0%}" for record in records)
            yield name, "as it is", "", "", f"{now:.2f}", ", ".join(shares)
        for one in choices(records, name)[:most]:
            shares = (f"{share:.0%}" for share in one.saved)
            yield name, one.attention, f"{one.share:g}", f"{one.below:g}", f"{one.error:.2f}", ", ".join(shares)


def front(records: list[results.Record]) -> str:
    """Make the Markdown table of what was measured: a row a way, with work left out and an error for each result.

    The error is a share of the rival's on the same pictures. The work is that of the first result's number of steps.
    """
    told, steps = [errors(record) for record in records], records[0]["settings"]["steps"]
    ways = {f"whole-blocks-{share}-below-{below}": (f"1/{1 / share:g} of the tokens, below {below}",
                                                    MergeConfig(rules=(blocks_rule(share, below),)))
            for share, below in BLOCKS_FRONT}  # fmt: skip
    ways |= {f"attention-alone-{name}": (f"attention as at {value:g}", work.config_of(SDXL, name, blocks=False))
             for name, value in MARKS.items()}  # fmt: skip
    return report.markdown(("", "less work", "error"),
                           ((label, f"{saved(config, steps):.0%}",
                             ", ".join(f"{one[name] / one[RIVAL]:.3f}" for one in told))
                            for name, (label, config) in ways.items() if all(name in one for one in told)))  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 0, 2 after an expected error, 130 if stopped. arguments: None means ``sys.argv[1:]``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocks", description=__doc__.partition("\n\n")[2])
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--most", type=int, default=4, metavar="N", help="choices of each strength (default 4)")

    def execute(options: argparse.Namespace, command: str) -> None:
        records = [results.load(path) for path in options.results]
        heads = ("strength", "attention as at", "share of tokens", "below", f"error / {RIVAL}'s", "less work")
        print(report.markdown(heads, lines(records, options.most)))

    return report.run("blocks", parser, arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
