"""``python -m benchmarks.report FILE...``: the table and the plot of results, from their JSON alone.

Each kind of result, of `results.KINDS`, has its own module, such as ``benchmarks/gpu_report.py``, with
``table(records) -> str`` (Markdown) and, where there is a plot, ``plot(records, path)`` (a PNG). How all commands end
is here too: with a result, with a sentence on what was refused, or stopped to go on later.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import results

ABSENT = "n/a"  # how every table writes a value that there is not


def write(paths: list[Path], table_path: Path | None = None, plot_path: Path | None = None) -> str:
    """The Markdown table of results of one kind, also written to `table_path`; the plot goes to `plot_path`.

    Raises ResultError for a file that is no result, and for results of several kinds.
    """
    records = [results.load(path) for path in paths]
    kinds = sorted({record["kind"] for record in records})
    if len(kinds) > 1:
        raise results.ResultError(f"results of several kinds ({', '.join(kinds)}); give those of one")
    module = importlib.import_module(f"benchmarks.{kinds[0].replace('-', '_')}_report")
    text = module.table(records)
    if table_path:
        table_path.write_text(f"{text}\n", encoding="utf-8")
    if plot_path:
        if not hasattr(module, "plot"):
            raise results.ResultError(f"{kinds[0]}: a table without a plot; give --no-plot")
        module.plot(records, plot_path)
    return text


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]], left: int | None = None) -> str:
    """A table. left: so many columns stand on the left, the others on the right."""
    heads = tuple(heads)
    first, *lines = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    rules = "---|" * len(heads) if left is None else "---|" * left + "---:|" * (len(heads) - left)
    return "\n".join([first, f"|{rules}", *lines])


def number(value: float | None, how: str) -> str:
    return ABSENT if value is None else format(value, how)


def new_figure(width: float, height: float):
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise results.ResultError("a plot needs matplotlib: pip install matplotlib, or give --no-plot") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def add_output(parser: argparse.ArgumentParser) -> None:
    """The option for the file of the result, which `results.Run.start` takes."""
    parser.add_argument("--output", type=Path, metavar="JSON", help="the result (default: a new file below "
        "benchmarks/results/, or the unfinished one of this command)")  # fmt: skip


def run(
    name: str, parser: argparse.ArgumentParser, arguments: list[str] | None,
    work: Callable[[argparse.Namespace, str], int],
) -> int:  # fmt: skip
    """The exit status of a command: that of its work, 2 where it is refused, 130 where somebody stops it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    try:
        return work(options, shlex.join(["python", "-m", f"benchmarks.{name}", *arguments]))
    except (ValueError, OSError, ImportError) as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nbenchmarks.{name}: stopped; the same command goes on from here.", file=sys.stderr)
        return 130


def _work(options: argparse.Namespace, command: str) -> int:
    first = options.files[0]
    print(write(options.files, first.with_suffix(".md"), None if options.no_plot else first.with_suffix(".png")))
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="A Markdown table and a plot of "
                                     "results, made from their JSON alone.")  # fmt: skip
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results of one kind")
    parser.add_argument("--no-plot", action="store_true", help="only the table, which needs no matplotlib")
    return run("report", parser, arguments, _work)


if __name__ == "__main__":
    sys.exit(main())
