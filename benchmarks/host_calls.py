"""``python -m benchmarks.host_calls``: calls of whole UNets in real hosts, merged and not, by size and attention.

It needs the folder of a ComfyUI, of an A1111, or of both, and the Python of each: that of its venv, or the one that
COMFYUI_PYTHON or WEBUI_PYTHON in the environment names. UNets have Stable Diffusion 1.5's shape and random weights. A
call is one of both halves of guidance, in float32 on one thread of a CPU. The host's own merging is measured too. If
you stop the command, the same command goes on.
"""

import argparse
import json
import os
import signal
import subprocess  # noqa: TID251 - a host's UNet is measured in the host's own Python
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import report, results
from benchmarks.host_inside import ANSWER, ARMS, BUILT_IN, COMFYUI, OURS, ROOT, THEIRS, UNMERGED, WEBUI
from benchmarks.report import ABSENT, markdown, number
from benchmarks.results import Record
from benchmarks.timing import OUT_OF_MEMORY
from tome_core import preset
from tome_core.settings.presets import MARKS, SD

PIXELS = (512, 768, 1024)
# host -> how its names in the environment begin, as in tests/hosts, and a file that its folder has
_HOSTS = {COMFYUI: ("COMFYUI", "comfy/samplers.py"), WEBUI: ("WEBUI", "modules/sd_hijack_optimizations.py")}
_PYTHONS = [f"{folder}/{python}" for folder in ("venv", ".venv") for python in ("bin/python", "Scripts/python.exe")]
# name -> host, flag of its command line, and the label in a table; without a flag a host takes its own for a CPU
ATTENTIONS = {"comfyui": (COMFYUI, "", "ComfyUI, its own on a CPU"),
              "comfyui-pytorch": (COMFYUI, "--use-pytorch-cross-attention", "ComfyUI, PyTorch's"),
              "comfyui-split": (COMFYUI, "--use-split-cross-attention", "ComfyUI, split"),
              "webui-sub-quadratic": (WEBUI, "--opt-sub-quad-attention", "AUTOMATIC1111, sub-quadratic"),
              "webui-sdp": (WEBUI, "--opt-sdp-attention", "AUTOMATIC1111, sdp (PyTorch's)"),
              "webui-doggettx": (WEBUI, "--opt-split-attention", "AUTOMATIC1111, Doggettx")}  # fmt: skip
_ON_A_CPU = {COMFYUI: "--cpu", WEBUI: "--use-cpu all --no-half --precision full --skip-torch-cuda-test"}
PRESET = "balanced"
FREE = 8  # GiB of free memory that the hosts see, by which they cut their work
HEAD = ("attention", "pixels", "rounds", "unmerged, s", "built-in, s", "renewed, s", "kept, s", "mean of 20 steps, s",
        "built-in, times as fast", "ours, times as fast", "peak MiB: unmerged, built-in, ours")  # fmt: skip
_EXPLAINED = """\
Calls of a whole UNet of Stable Diffusion 1.5's shape with random weights, both halves of guidance at once, float32,
processor seconds on one CPU thread, medians over rounds. Built-in is the host's own merging: ComfyUI's TomePatchModel
at {ComfyUI}, its default, and A1111's token merging (tomesd) at {A1111}. Renewed and kept are ours by the preset
{preset}: an early and a late step that make a match, and an early and a late step that keep it. The mean is over a
picture's 20 uniform steps, of which {early:.0%} are early and half keep a match; "ours, times as fast" is by this mean.
Peak is the most memory of the calls, beyond the model. The hosts see {free:g} GiB of free memory, by which some
functions cut their work."""


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line: the hosts' folders, attentions, sizes, rounds, smoke and output."""
    command = argparse.ArgumentParser(prog="python -m benchmarks.host_calls", description=__doc__.partition("\n\n")[2])
    add = command.add_argument
    for host, (name, _) in _HOSTS.items():
        add(f"--{name.lower()}", type=Path, metavar="DIR", dest=host, help=f"a folder of {host}")
    add("--attention", nargs="+", choices=tuple(ATTENTIONS), metavar="NAME", help=f"of {', '.join(ATTENTIONS)} "
        "(default: all of the hosts that are there)")  # fmt: skip
    add("--sizes", nargs="+", type=int, default=list(PIXELS), metavar="N", help="sides of a picture in pixels (default "
        "512 768 1024; a call at 1024 may take two minutes)")  # fmt: skip
    add("--rounds", type=int, default=2, metavar="N", help="how often each call is measured (default 2)")
    add("--smoke", action="store_true", help="a tiny UNet: for tests")
    report.add_output(command)
    return command


def find_folders(options: argparse.Namespace) -> dict[str, Path]:
    """Map each host to its folder, for the hosts whose folders the options give.

    Raises ValueError if a folder is not the host's, if no folder is given, or none for an asked attention's host.
    """
    folders = {host: folder.resolve() for host in _HOSTS if (folder := getattr(options, host))}
    for host, folder in folders.items():
        if not (folder / _HOSTS[host][1]).is_file():
            raise ValueError(f"{folder} is no folder of {host}: it has no {_HOSTS[host][1]}")
    wanted = {ATTENTIONS[name][0] for name in options.attention or ()}
    lacking = [f"no folder of {host} is named (--{name.lower()} DIR)" for host, (name, _) in _HOSTS.items()
               if host not in folders and (host in wanted or not folders)]  # fmt: skip
    if lacking:
        raise ValueError("; ".join(lacking))
    return folders


def python_of(host: str, folder: Path) -> str:
    """Return a host's Python, a path: of COMFYUI_PYTHON or WEBUI_PYTHON if set, else its venv's, else this one."""
    named = os.environ.get(f"{_HOSTS[host][0]}_PYTHON")
    return named or next((str(folder / path) for path in _PYTHONS if (folder / path).exists()), sys.executable)


def plan_cases(options: argparse.Namespace, hosts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Map keys of attention, size and round, as ``webui-sdp, 512 px, 0``, to cases, in measuring order, by round.

    A case is the dict that `host_inside.measure` gets, without ``arm``. `hosts` count only if no attentions are named.
    """
    names = options.attention or [name for name, (host, *_) in ATTENTIONS.items() if host in hosts]
    return {f"{name}, {pixels} px, {number}": {"attention": name, "host": ATTENTIONS[name][0],
                                               "flag": ATTENTIONS[name][1], "pixels": pixels, "round": number,
                                               "free": FREE * 2**30, "tiny": options.smoke, "strength": MARKS[PRESET]}
            for number in range(options.rounds) for name in names for pixels in sorted(options.sizes)}  # fmt: skip


def measure(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Measure each arm of a case, a key of `ARMS`: unmerged, the host's own merging, and ours, each in its own process.

    Returns ``function``, ``version`` and ``torch`` of the host; ``seconds`` by call, of all arms (the values of
    `ARMS`) in one dict; ``peak_mib`` by arm; None in both if the arm failed; and ``failed_arms``, reasons by arm. If
    all arms failed, the result is ``failed`` alone, the reason of the unmerged arm.
    """
    answers = {arm: _ask({**case, "arm": arm}, folder) for arm in ARMS}
    failed = {arm: answer["failed"] for arm, answer in answers.items() if "failed" in answer}
    if len(failed) == len(ARMS):
        return {"failed": failed[UNMERGED]}
    done = next(answer for answer in answers.values() if "failed" not in answer)
    seconds: dict[str, float | None] = {}
    for arm, answer in answers.items():
        seconds |= answer.get("seconds", dict.fromkeys(ARMS[arm]))
    peaks = {arm: answer.get("peak_mib") for arm, answer in answers.items()}
    return {**done, "seconds": seconds, "peak_mib": peaks, "failed_arms": failed}


def _ask(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run `host_inside.measure` by the host's Python in its `folder`; return its answer, or ``failed``: why."""
    command = [python_of(case["host"], folder), "-m", "benchmarks.host_inside", json.dumps(case),
               *_ON_A_CPU[case["host"]].split(), *case["flag"].split()]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    if done.returncode == -getattr(signal, "SIGKILL", 0):  # the system ends what takes too much memory
        return {"failed": OUT_OF_MEMORY}
    return {"failed": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1][:300]}


def execute(options: argparse.Namespace, command: str) -> int:
    """Measure and save missing rows, print the table of all rows; return 1 if all arms of a case failed, else 0."""
    folders = find_folders(options)
    cases = plan_cases(options, list(folders))
    settings = {"preset": PRESET, "free": FREE, "smoke": options.smoke}
    described = results.describe("cpu")
    described["device"]["threads"] = 1  # of the processes that measure
    run = results.Run.start(results.new_record("host-calls", command, settings, described), list(cases), options.output)
    for key in run.missing:
        case = cases[key]
        print(f"[{len(cases) - len(run.missing) + 1}/{len(cases)}] {key}", file=sys.stderr, flush=True)
        run.add(key, {**case, **measure(case, folders[case["host"]])})
    print(report.write([run.path]))
    return int(any("failed" in row for row in run.record["rows"]))


def table(records: Sequence[Record]) -> str:
    """Make Markdown of "host-calls": table, attention functions, failures; the first's settings, device, commit."""
    first, all_rows = records[0], [row for record in records for row in record["rows"]]
    functions = {row["attention"]: f"{row['host']} {row['version']}{row['flag'] and ' ' + row['flag']}, torch "
                 f"{row['torch']}: `{row['function']}`" for row in all_rows if "failed" not in row}  # fmt: skip
    failed = {**{row["key"]: row["failed"] for row in all_rows if "failed" in row},
              **{f"{row['key']}, {arm}": why for row in all_rows for arm, why in row.get("failed_arms", {}).items()}}
    text = [_EXPLAINED.format(**first["settings"], **THEIRS, early=share_of_early(first["settings"]["preset"])),
            markdown(HEAD, table_rows(records)),
            "\n".join(f"- *{name}*: {meaning}." for name, meaning in functions.items()),
            "\n".join(f"- failed: {name}: {why}" for name, why in failed.items()),
            f"{first['device']['name']}; {first['command']}; commit {first['commit']}."]  # fmt: skip
    return "\n\n".join(part for part in text if part)


def table_rows(records: Sequence[Record]) -> list[list[str]]:
    """Make `HEAD`'s rows, one an attention and size, without rounds whose arms all failed; other failures give n/a."""
    early = share_of_early(records[0]["settings"]["preset"])
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in (row for record in records for row in record["rows"] if "failed" not in row):
        groups.setdefault((row["attention"], str(row["pixels"])), []).append(row)
    return [[*name, *figures(group, early)] for name, group in groups.items()]


def share_of_early(name: str, curve: str = SD) -> float:
    """Return the share, 0 to 1, of 20 steps (timesteps 951 to 1) a preset merges by its early ratio; 0 without it."""
    config = preset(name, curve)
    return 0.0 if config.early_ratio is None else fmean(step >= config.early_until for step in range(951, 0, -50))


def figures(rows: Sequence[dict[str, Any]], early: float) -> list[str]:
    """Make the cells of `HEAD` after "pixels"; a figure is n/a if an arm that it needs failed in any round.

    rows: the rounds of one attention and size; figures are medians. early: the share of early steps in the mean of 20.
    """
    spent = {name: _median([row["seconds"][name] for row in rows]) for name in rows[0]["seconds"]}
    plain, theirs, (early_new, early_kept, late_new, late_kept) = spent[UNMERGED], spent[BUILT_IN], map(spent.get, OURS)
    mean = None if None in map(spent.get, OURS) else (
        early * fmean((early_new, early_kept)) + (1 - early) * fmean((late_new, late_kept)))  # fmt: skip
    factors = (None if None in (plain, merged) else plain / merged for merged in (theirs, mean))
    peaks = (_median([row["peak_mib"][arm] for row in rows]) for arm in rows[0]["peak_mib"])
    seconds = ((plain,), (theirs,), (early_new, late_new), (early_kept, late_kept), (mean,))
    return [str(len(rows)),
            *(ABSENT if None in several else ", ".join(f"{value:.3g}" for value in several) for several in seconds),
            *(number(factor, ".2f") for factor in factors),
            ", ".join(number(None if peak is None else max(0, peak), ",.0f") for peak in peaks)]  # fmt: skip


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median; None if a value is None."""
    return None if None in values else median(values)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 1 if no arm of a case worked, 2 on error, 130 if stopped. None: ``sys.argv[1:]``."""
    return report.run("host_calls", parser(), arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
