"""``python -m benchmarks.report FILE...``: the table and the plot of results, from their JSON alone.

Each kind of result has its own module, which `results.KINDS` names, with ``table(records) -> str`` (Markdown) and, if
the kind has a plot, ``plot(records, path)`` (a PNG). The commands share here how they end: with a result, with a
sentence about what was refused, or stopped, to go on later.
"""

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import results

ABSENT = "n/a"  # a missing value in a table


def write(paths: list[Path]) -> str:
    """Write the table of results as .md beside the first file, with its name, and a plot, if the kind has one, as .png.

    Returns the table. Raises ResultError for a file that is no result, or several kinds. No matplotlib means no plot.
    """
    records = [results.load(path) for path in paths]
    kinds = sorted({record["kind"] for record in records})
    if len(kinds) > 1:
        raise results.ResultError(f"results of several kinds ({', '.join(kinds)}); give those of one")
    module = importlib.import_module(f"benchmarks.{results.KINDS[kinds[0]]}")
    text = module.table(records)
    paths[0].with_suffix(".md").write_text(f"{text}\n", encoding="utf-8")
    if hasattr(module, "plot"):
        try:
            module.plot(records, paths[0].with_suffix(".png"))
        except ImportError as error:
            print(f"no plot ({error}): pip install matplotlib", file=sys.stderr)
    return text


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]], left: int | None = None) -> str:
    """Make a Markdown table. left: how many columns, before right-aligned ones, stay unaligned (``---``); None: all."""
    heads = tuple(heads)
    first, *lines = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    rules = "---|" * len(heads) if left is None else "---|" * left + "---:|" * (len(heads) - left)
    return "\n".join([first, f"|{rules}", *lines])


def number(value: float | None, how: str) -> str:
    """Format a value by `how`, a format specification such as ``.2f``; None becomes n/a."""
    return ABSENT if value is None else format(value, how)


def new_figure(width: float, height: float):
    """Make an empty figure of matplotlib, in inches. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add ``--output`` to a parser: the result's Path, by default None; `results.Run.start` takes the value."""
    parser.add_argument("--output", type=Path, metavar="JSON", help="the result (default: a new file below "
        "benchmarks/results/, or the unfinished one of this command)")  # fmt: skip


def run(name: str, parser: argparse.ArgumentParser, arguments: list[str] | None,
        work: Callable[[argparse.Namespace, str], int | None]) -> int:  # fmt: skip
    """Run a command and return its exit status: that of `work`, 2 if it raises an expected error, 130 if interrupted.

    name: of the command's module in benchmarks. arguments: None stands for ``sys.argv[1:]``. work: gets the options and
    the text of the command line; its ValueError, OSError and ImportError are expected, and its None is 0.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    try:
        return work(options, shlex.join(["python", "-m", f"benchmarks.{name}", *arguments])) or 0
    except (ValueError, OSError, ImportError) as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nbenchmarks.{name}: stopped; the same command goes on from here.", file=sys.stderr)
        return 130


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 2 after an expected error, 130 if stopped. arguments: None means ``sys.argv[1:]``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="A Markdown table and a plot of "
                                     "results, made from their JSON alone.")  # fmt: skip
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results of one kind")
    return run("report", parser, arguments, lambda options, command: print(write(options.files)))


if __name__ == "__main__":
    sys.exit(main())
