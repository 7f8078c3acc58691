"""How the benchmarks' commands end: with a result, with a sentence on what was refused, or stopped to go on later."""

from __future__ import annotations

import sys
from collections.abc import Callable


def exit_status(name: str, work: Callable[[], int]) -> int:
    """The exit status of a command's work: its own, 2 where it is refused, 130 where somebody stops it."""
    try:
        return work()
    except (ValueError, OSError) as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nbenchmarks.{name}: stopped; the same command goes on from here.", file=sys.stderr)
        return 130
