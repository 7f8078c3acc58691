"""``python -m benchmarks.unfused``: memory and time of attention without fused kernels, merged and not, on a CPU.

As DirectML, ZLUDA, MPS and old cards compute it: by torch's math backend, and by the very functions of ComfyUI and
A1111, for which COMFYUI_DIR and WEBUI_DIR name a checkout, COMFYUI_PYTHON and WEBUI_PYTHON its Python, which for A1111
needs the package tomesd; ComfyUI's tomesd is the node that it has. One block of Stable Diffusion 1.5's finest level,
one picture, float32, one thread. The same command goes on where a killed run was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from benchmarks import report, results
from benchmarks.unfused_hosts import ANSWER, HEADS, ROOT, SOURCES
from tome_core import preset

PIXELS = (512, 1024, 2048)
WHATS = ("unmerged", "tomesd", "early", "late")
_FEW_HEADS = (1, 2)  # from which all are told: every score belongs to one head
_NEEDED = 8  # bytes for a score: it and its softmax, float32


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.unfused", description=__doc__.partition("\n\n")[2])
    add = made.add_argument
    add("--sources", nargs="+", choices=tuple(SOURCES), metavar="NAME", help=f"of {', '.join(SOURCES)} (default: those "
        "whose checkout is named)")  # fmt: skip
    add("--pixels", nargs="+", type=int, default=list(PIXELS), metavar="N", help="sides of a picture (default 512 1024 "
        "2048)")  # fmt: skip
    add("--what", nargs="+", choices=WHATS, default=list(WHATS), metavar="NAME", help=f"of {', '.join(WHATS)} "
        "(default: all)")  # fmt: skip
    add("--preset", default="balanced", metavar="NAME", help="of merging (default balanced)")
    add("--free", type=float, default=4, metavar="GIB", help="what the hosts' functions are told is free, by which "
        "they cut their work (default 4)")  # fmt: skip
    add("--most", type=float, default=5, metavar="GIB", help="what a call may take here; one that takes more is told "
        "from one and two of its heads (default 5)")  # fmt: skip
    report.add_output(made)
    return made


def scores(what: str, pixels: int, config: Any) -> float:
    """Products of queries and keys in one head: pairs of tokens. config: of the preset."""
    tokens = (pixels // 8) ** 2
    late = config.rules[0].ratio
    left = {"unmerged": 1.0, "tomesd": 0.25, "late": 1 - late}.get(what, 1 - (config.early_ratio or late))
    return tokens * tokens * left


def choose_heads(source: str, what: str, pixels: int, config: Any, most: float) -> tuple[int, ...]:
    """With how many heads a case is measured: all where that fits into so many bytes, else few, or none.

    Functions that cut what does not fit are measured with few heads to save the time.
    """
    needed, at_once = scores(what, pixels, config) * _NEEDED, SOURCES[source].at_once
    if needed * (at_once or HEADS) <= most:
        return (HEADS,)
    return _FEW_HEADS if at_once is None or (at_once == HEADS and needed * max(_FEW_HEADS) <= most) else ()


def plan_cases(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Row's key -> case, those of a source together, the small pictures first."""
    config, cases = preset(options.preset), {}
    named = options.sources or [name for name, one in SOURCES.items() if one.checkout]
    for source in named:
        for pixels in sorted(options.pixels):
            for what in options.what:
                for heads in choose_heads(source, what, pixels, config, options.most * 2**30):
                    cases[f"{source}, {pixels} px, {what}, {heads} heads"] = {
                        "source": source, "what": what, "pixels": pixels, "heads": heads, "preset": options.preset,
                        "free": round(options.free * 2**30),
                    }  # fmt: skip
    return cases


def measure(cases: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Figures of each case, all of one source, or why it failed, from a process in the source's own Python and folder.

    Where that process ends too early, the case it was at has failed, and the rest gets a new one.
    """
    source = SOURCES[cases[0]["source"]]
    command = [source.python, "-m", "benchmarks.unfused_hosts", json.dumps(cases), *source.flags]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    answers = 0
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, cwd=source.checkout, env=surroundings, stdout=subprocess.PIPE, stderr=errors,
                         text=True) as process,
    ):  # fmt: skip
        for line in process.stdout:
            if line.startswith(ANSWER):
                answers += 1
                yield json.loads(line.removeprefix(ANSWER))
        process.wait()
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if answers < len(cases):
        yield {"failed": (said or [f"ended with {process.returncode}"])[-1][:300]}
    if answers + 1 < len(cases):
        yield from measure(cases[answers + 1 :])


def execute(options: argparse.Namespace, command: str) -> int:
    """Measure what is missing, and print the table; gives 1 where a case failed."""
    nowhere = [name for name in options.sources or () if not SOURCES[name].checkout]
    if nowhere:
        raise ValueError(f"{nowhere[0]} needs {SOURCES[nowhere[0]].host}_DIR in the environment, the folder of a "
                         "checkout")
    plan = plan_cases(options)
    settings = {name: getattr(options, name) for name in ("preset", "free", "most")}
    described = results.describe("cpu")
    described["device"]["threads"] = 1  # of the processes that measure
    run = results.Run.start(results.new_record("unfused", command, settings, described), list(plan), options.output)
    for _, group in groupby(run.missing, key=lambda key: plan[key]["source"]):
        keys = list(group)
        for key, answer in zip(keys, measure([plan[key] for key in keys]), strict=True):
            run.add(key, {**plan[key], **answer})
            print(f"[{len(run.record['rows'])}/{len(plan)}] {key}", file=sys.stderr, flush=True)
    print(report.write([run.path], run.path.with_suffix(".md"), None))
    return int(any("failed" in row for row in run.record["rows"]))


def main(arguments: list[str] | None = None) -> int:
    """Run; gives the exit code: 0 done, 1 where a case failed, 2 wrong options, 130 interrupted."""
    return report.run("unfused", parser(), arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
