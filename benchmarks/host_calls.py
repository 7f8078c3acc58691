"""``python -m benchmarks.host_calls``: calls of whole UNets in real hosts, merged and not, by size and attention.

It needs the folder of a ComfyUI, of an A1111, or of both, each with its Python beside it (venv, or COMFYUI_PYTHON and
WEBUI_PYTHON). UNets have Stable Diffusion 1.5's shape and random weights; a call is one of both halves of guidance, in
float32 on one thread of a CPU. Beside ours stands the merging that the host brings along. The same command goes on
where a killed run was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess  # noqa: TID251 - a host's UNet is measured in the host's own Python
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import report, results
from benchmarks.host_inside import ANSWER, COMFYUI, ROOT, WEBUI
from tome_core.settings.presets import MARKS

PIXELS = (512, 768, 1024)
_NAMED = {COMFYUI: "COMFYUI", WEBUI: "WEBUI"}  # how names in the environment begin, as in tests/hosts
_LOOKED_FOR = {COMFYUI: "comfy/samplers.py", WEBUI: "modules/sd_hijack_optimizations.py"}
_PYTHONS = [f"{folder}/{python}" for folder in ("venv", ".venv") for python in ("bin/python", "Scripts/python.exe")]


# name -> host, flag of its command line, none for what it takes on a CPU by itself, and how a table calls it
ATTENTIONS = {
    "comfyui": (COMFYUI, "", "ComfyUI, its own on a CPU"),
    "comfyui-pytorch": (COMFYUI, "--use-pytorch-cross-attention", "ComfyUI, PyTorch's"),
    "comfyui-split": (COMFYUI, "--use-split-cross-attention", "ComfyUI, split"),
    "webui-sub-quadratic": (WEBUI, "--opt-sub-quad-attention", "AUTOMATIC1111, sub-quadratic"),
    "webui-sdp": (WEBUI, "--opt-sdp-attention", "AUTOMATIC1111, sdp (PyTorch's)"),
    "webui-doggettx": (WEBUI, "--opt-split-attention", "AUTOMATIC1111, Doggettx"),
}
_ON_A_CPU = {COMFYUI: "--cpu", WEBUI: "--use-cpu all --no-half --precision full --skip-torch-cuda-test"}
PRESET = "balanced"
FREE = 8  # GiB that the hosts are told are free, by which they cut their work


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.host_calls", description=__doc__.partition("\n\n")[2])
    add = made.add_argument
    for host, option in ((COMFYUI, "--comfyui"), (WEBUI, "--webui")):
        add(option, type=Path, metavar="DIR", default=os.environ.get(f"{_NAMED[host]}_DIR"), help=f"a folder of {host} "
            f"(default: {_NAMED[host]}_DIR in the environment)")  # fmt: skip
    add("--attention", nargs="+", choices=tuple(ATTENTIONS), metavar="NAME", help=f"of {', '.join(ATTENTIONS)} "
        "(default: all of the hosts that are there)")  # fmt: skip
    add("--sizes", nargs="+", type=int, default=list(PIXELS), metavar="N", help="sides of a picture in pixels (default "
        "512 768 1024; a call at 1024 may take two minutes)")  # fmt: skip
    add("--rounds", type=int, default=2, metavar="N", help="of which medians are told (default 2)")
    add("--smoke", action="store_true", help="a tiny UNet: for tests")
    report.add_output(made)
    return made


def find_folders(options: argparse.Namespace) -> dict[str, Path]:
    """Host -> its folder, of those that are there; says on stderr which is left out, and refuses what is asked for."""
    named = {COMFYUI: options.comfyui, WEBUI: options.webui}
    found = {host: Path(folder).resolve() for host, folder in named.items() if folder}
    for host, folder in found.items():
        if not (folder / _LOOKED_FOR[host]).is_file():
            raise ValueError(f"{folder} is no folder of {host}: it has no {_LOOKED_FOR[host]}")
    how = {COMFYUI: "--comfyui DIR or COMFYUI_DIR=DIR", WEBUI: "--webui DIR or WEBUI_DIR=DIR"}
    lacking = {host: f"no folder of {host} is named ({how[host]})" for host in how if host not in found}
    asked = [ATTENTIONS[name][0] for name in options.attention or ()]
    needed = [text for host, text in lacking.items() if host in asked or not found]
    if needed:
        raise ValueError("; ".join(needed))
    for text in () if asked else lacking.values():
        print(f"benchmarks.host_calls: {text}; its rows are left out", file=sys.stderr)
    return found


def python_of(host: str, folder: Path) -> str:
    """The host's own Python: the one that the environment names, that of its venv, or this one."""
    named = os.environ.get(f"{_NAMED[host]}_PYTHON")
    return named or next((str(folder / one) for one in _PYTHONS if (folder / one).exists()), sys.executable)


def plan_cases(options: argparse.Namespace, hosts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Row's key -> case, round by round, those of an attention together, the small pictures first."""
    named = options.attention or [name for name, (host, *_) in ATTENTIONS.items() if host in hosts]
    return {
        f"{name}, {pixels} px, {number}": {
            "attention": name, "host": ATTENTIONS[name][0], "flag": ATTENTIONS[name][1], "pixels": pixels,
            "round": number, "free": FREE * 2**30, "tiny": options.smoke, "strength": MARKS[PRESET],
        }
        for number in range(options.rounds) for name in named for pixels in sorted(options.sizes)
    }  # fmt: skip


def measure(cases: Sequence[dict[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    """Figures of each case, all of one attention, or why it failed, from a process in the host's Python and folder.

    If that process ends too early, the case it was at has failed, and the rest gets a new one.
    """
    host, flag = cases[0]["host"], cases[0]["flag"]
    command = [python_of(host, folder), "-m", "benchmarks.host_inside", json.dumps(cases), *_ON_A_CPU[host].split(),
               *flag.split()]  # fmt: skip
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    answers = 0
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, cwd=folder, env=surroundings, stdout=subprocess.PIPE, stderr=errors,
                         text=True) as process,
    ):  # fmt: skip
        try:
            for line in process.stdout:
                if line.startswith(ANSWER):
                    answers += 1
                    yield json.loads(line.removeprefix(ANSWER))
        finally:  # also if nobody asks for more
            if process.poll() is None and answers < len(cases):
                process.terminate()
        process.wait()
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if answers < len(cases):
        yield {"failed": (said or [f"ended with {process.returncode}"])[-1][:300]}
    if answers + 1 < len(cases):
        yield from measure(cases[answers + 1 :], folder)


def execute(options: argparse.Namespace, command: str) -> int:
    """Measure what is missing, and print the table; gives 1 if a case failed."""
    folders = find_folders(options)
    plan = plan_cases(options, list(folders))
    settings = {"preset": PRESET, "free": FREE, "smoke": options.smoke}
    described = results.describe("cpu")
    described["device"]["threads"] = 1  # of the processes that measure
    run = results.Run.start(results.new_record("host-calls", command, settings, described), list(plan), options.output)
    for _, group in groupby(run.missing, key=lambda key: plan[key]["attention"]):
        keys = list(group)
        found = measure([plan[key] for key in keys], folders[plan[keys[0]]["host"]])
        for key in keys:
            print(f"[{len(plan) - len(run.missing) + 1}/{len(plan)}] {key}", file=sys.stderr, flush=True)
            run.add(key, {**plan[key], **next(found)})
    print(report.write([run.path], run.path.with_suffix(".md")))
    return int(any("failed" in row for row in run.record["rows"]))


def main(arguments: list[str] | None = None) -> int:
    return report.run("host_calls", parser(), arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
