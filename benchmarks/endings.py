"""How the benchmarks' commands end: with a result, with a sentence on what was refused, or stopped to go on later."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path


def add_output(parser: argparse.ArgumentParser) -> None:
    """The option for the file of the result, which `results.Run.start` takes."""
    parser.add_argument("--output", type=Path, metavar="JSON", help="the result (default: a new file below "
        "benchmarks/results/, or the unfinished one of this command)")  # fmt: skip


def run(
    name: str, parser: argparse.ArgumentParser, arguments: list[str] | None,
    work: Callable[[argparse.Namespace, str], int],
) -> int:  # fmt: skip
    """The exit status of a command: that of its work, 2 where it is refused, 130 where somebody stops it.

    arguments: None for the process's own. work: is given the options, and the command line as a result keeps it.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    try:
        return work(options, shlex.join(["python", "-m", f"benchmarks.{name}", *arguments]))
    except (ValueError, OSError) as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nbenchmarks.{name}: stopped; the same command goes on from here.", file=sys.stderr)
        return 130
