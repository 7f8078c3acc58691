"""``python -m tests.random_stackings --count 10000``: that many random cases; one that fails says how to repeat it."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch

from tests.random_stackings.cases import COMMAND, run


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog=COMMAND, description="Random models, settings, calls and stackings.")
    made.add_argument("--count", type=int, default=10_000, help="how many (default 10000)")
    made.add_argument("--seed", type=int, default=0, help="what all is drawn from (default 0)")
    made.add_argument("--first", type=int, default=0, help="the first one's number (default 0)")
    made.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th case from the I-th on (default 0/1)")
    made.add_argument("--output", type=Path, metavar="JSON", help="where to note what was seen; the same command goes "
                      "on from there")  # fmt: skip
    return made


class Record:
    """What was seen so far; in a file, if there is one."""

    def __init__(self, path: Path | None, arguments: list[str]) -> None:
        self.path = path
        self.seen: Counter = Counter()
        self.done, self.faults = -1, []
        self._command = " ".join([COMMAND, *arguments])
        if path is not None and path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["command"] != self._command:
                raise SystemExit(f"{path} is of another command: {kept['command']}")
            self.seen.update(kept["seen"])
            self.done, self.faults = kept["done"], kept["faults"]

    def save(self) -> None:
        if self.path is not None:
            kept = {"command": self._command, "done": self.done, "seen": dict(sorted(self.seen.items())),
                    "faults": self.faults}  # fmt: skip
            part = self.path.with_name(f"{self.path.name}.part")
            part.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            part.replace(self.path)


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 where every case holds, 1 where one does not."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    shard, shards = (int(part) for part in options.shard.split("/"))
    record, since = Record(options.output, arguments), time.monotonic()
    numbers = [one for one in range(options.first + shard, options.first + options.count, shards) if one > record.done]
    for place, number in enumerate(numbers, 1):
        try:
            record.seen.update(run(options.seed, number))
        except AssertionError as fault:
            again = f"{COMMAND} --seed {options.seed} --first {number} --count 1"
            print(f"\nFAILED: {fault}\nrepeat: {again}", file=sys.stderr)
            if options.count == 1:
                traceback.print_exception(fault)
            record.faults.append({"number": number, "fault": str(fault).splitlines()[0], "repeat": again})
        record.done = number
        if place % 25 == 0 or place == len(numbers):
            record.save()
            print(f"\r{place}/{len(numbers)}, {len(record.faults)} failed, {time.monotonic() - since:.0f} s",
                  end="", file=sys.stderr, flush=True)  # fmt: skip
    print(f"\n{len(record.faults)} failed; " + ", ".join(f"{count} {what}" for what, count in
                                                          sorted(record.seen.items())))  # fmt: skip
    return int(bool(record.faults))


if __name__ == "__main__":
    sys.exit(main())
