"""Random models, settings, calls and patches over patches, and ComfyUI graphs: a picture, or a sentence.

``python -m tests.random_stackings --count 10000`` draws as many cases; one that fails says how to repeat it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import save
from tests.random_stackings.cases import COMMAND, run


def begun(path: Path | None, command: str) -> dict[str, Any]:
    """What was seen so far: what the file holds, if there is one."""
    record = {"command": command, "done": -1, "seen": {}, "faults": []}
    if path is not None and path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
    if record["command"] != command:
        raise SystemExit(f"{path} is of another command: {record['command']}")
    return record


def main(arguments: list[str] | None = None, run: Callable[[int, int], Counter] = run, command: str = COMMAND) -> int:
    """Run; 0 if every case holds, 1 if one does not. run: of a seed and a number."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog=command, description="Random models, settings, calls and stackings.")
    parser.add_argument("--count", type=int, default=10_000, help="how many (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="what all is drawn from (default 0)")
    parser.add_argument("--first", type=int, default=0, help="the first one's number (default 0)")
    parser.add_argument("--output", type=Path, metavar="JSON", help="for what was seen; the command goes on from there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record, since = begun(options.output, " ".join([command, *arguments])), time.monotonic()
    seen, faults = Counter(record["seen"]), record["faults"]
    last = options.first + options.count - 1
    for number in range(max(options.first, record["done"] + 1), last + 1):
        try:
            seen.update(run(options.seed, number))
        except AssertionError as fault:
            again = f"{command} --seed {options.seed} --first {number} --count 1"
            print(f"\nFAILED: {fault}\nrepeat: {again}", file=sys.stderr)
            if options.count == 1:
                traceback.print_exception(fault)
            faults.append({"number": number, "fault": str(fault).splitlines()[0], "repeat": again})
        if number % 25 == 0 or number == last:
            if options.output is not None:
                save({**record, "done": number, "seen": dict(sorted(seen.items()))}, options.output)
            print(f"\r{number}/{last}, {len(faults)} failed, {time.monotonic() - since:.0f} s",
                  end="", file=sys.stderr, flush=True)  # fmt: skip
    print(f"\n{len(faults)} failed; " + ", ".join(f"{count} {what}" for what, count in sorted(seen.items())))
    return int(bool(faults))


def in_silence() -> None:
    """For a process of its own: a long run says what failed and nothing else."""
    logging.disable()
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    in_silence()
    sys.exit(main())
