"""``python -m benchmarks.host_calls``: calls of whole UNets in real hosts, merged and not, by size and attention.

It needs the folder of a ComfyUI, of an A1111, or of both, and the Python of each: that of its venv, or the one that
COMFYUI_PYTHON or WEBUI_PYTHON in the environment names. UNets have the shape of Stable Diffusion 1.5 or SDXL, and
random weights. A call is one of both halves of guidance, in float32 on one thread of a CPU. The host's own merging is
measured too. If you stop the command, the same command goes on.
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
from benchmarks.models import SD15, SDXL
from benchmarks.report import ABSENT, markdown, number
from benchmarks.results import Record
from benchmarks.timing import OUT_OF_MEMORY
from tome_core import preset
from tome_core.settings.presets import MARKS, SD
from tome_core.settings.presets import SDXL as SDXL_CURVE

PIXELS = (512, 768, 1024)
CURVES = {SD15: SD, SDXL: SDXL_CURVE}  # the UNets, and the curve of the strength of each
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
BUILT_IN_GAIN, GAIN = "built-in, times as fast", "ours, times as fast"
PEAK = "peak MiB: unmerged, built-in, ours"
HEAD = ("UNet", "attention", "pixels", "rounds", "unmerged, s", "built-in, s", "renewed, s", "kept, s",
        "mean of 20, 8 steps, s", BUILT_IN_GAIN, GAIN, PEAK)  # fmt: skip
_STEPS = (20, 8)
_EXPLAINED = """\
Calls of a whole UNet of Stable Diffusion 1.5's or SDXL's shape with random weights, both halves of guidance at once,
float32, processor seconds on one CPU thread, medians over rounds. Built-in is the host's own merging: ComfyUI's
TomePatchModel at {ComfyUI}, its default, and A1111's token merging (tomesd) at {A1111}. Renewed and kept are ours by
the preset {preset}: an early and a late step that make a match, and an early and a late step that keep it. The means
are over a picture's 20 uniform steps, of which half keep a match, and 8, which make one each. Of 20 steps {early:.0%}
are early in SD1.5, {early_sdxl:.0%} in SDXL, where early means that no whole blocks merge; "ours, times as fast" is by
the mean of 20. A hires pass or an image to image of half the schedule has late steps alone. Peak is the most memory of
the calls, beyond the model. The hosts see {free:g} GiB of free memory, by which some functions cut their work."""


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line: the hosts' folders, attentions, sizes, rounds, smoke and output."""
    command = argparse.ArgumentParser(prog="python -m benchmarks.host_calls", description=__doc__.partition("\n\n")[2])
    add = command.add_argument
    for host, (name, _) in _HOSTS.items():
        add(f"--{name.lower()}", type=Path, metavar="DIR", dest=host, help=f"a folder of {host}")
    add("--attention", nargs="+", choices=tuple(ATTENTIONS), metavar="NAME", help=f"of {', '.join(ATTENTIONS)} "
        "(default: all of the hosts that are there)")  # fmt: skip
    add("--unet", nargs="+", choices=tuple(CURVES), default=[SD15], metavar="NAME", help=f"of {', '.join(CURVES)} "
        f"(default {SD15}); {SDXL} takes 10 GB, and minutes a call")  # fmt: skip
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
    """Map keys of attention, UNet, size, round and arm, as ``webui-sdp, sd15, 512 px, 0, ours``, to cases, in order.

    A case is the dict that `host_inside.measure` gets. `hosts` count only if no attentions are named.
    """
    names = options.attention or [name for name, (host, *_) in ATTENTIONS.items() if host in hosts]
    return {f"{name}, {unet}, {pixels} px, {number}, {arm}": {
                "attention": name, "host": ATTENTIONS[name][0], "flag": ATTENTIONS[name][1], "unet": unet,
                "pixels": pixels, "round": number, "arm": arm, "free": FREE * 2**30, "tiny": options.smoke,
                "strength": MARKS[PRESET]}
            for number in range(options.rounds) for unet in options.unet for name in names
            for pixels in sorted(options.sizes) for arm in ARMS}  # fmt: skip


def measure(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Measure a case's arm, a key of `ARMS`, in a process of its own: unmerged, the host's own merging, or ours.

    Returns ``function``, ``version`` and ``torch`` of the host; ``seconds``, a dict by call (the values of `ARMS`); and
    ``peak_mib``, a dict with the arm. If it failed, ``failed_arms`` has the reason by arm, and the dicts are of None.
    """
    answer, arm = _ask(case, folder), case["arm"]
    if "failed" in answer:
        return {"seconds": dict.fromkeys(ARMS[arm]), "peak_mib": {arm: None}, "failed_arms": {arm: answer["failed"]}}
    return {**answer, "peak_mib": {arm: answer["peak_mib"]}, "failed_arms": {}}


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
    """Measure and save missing rows, print the table of all rows; return 1 if every arm failed, else 0."""
    folders = find_folders(options)
    cases = plan_cases(options, list(folders))
    settings = {"preset": PRESET, "free": FREE, "smoke": options.smoke}
    for host in folders:  # where the hosts lie here tells nobody anything
        command = command.replace(str(getattr(options, host)), host)
    described = results.describe("cpu")
    described["device"]["threads"] = 1  # of the processes that measure
    run = results.Run.start(results.new_record("host-calls", command, settings, described), list(cases), options.output)
    for key in run.missing:
        case = cases[key]
        print(f"[{len(cases) - len(run.missing) + 1}/{len(cases)}] {key}", file=sys.stderr, flush=True)
        run.add(key, {**case, **measure(case, folders[case["host"]])})
    print(report.write([run.path]))
    return int(all(row["failed_arms"] for row in run.record["rows"]))


def table(records: Sequence[Record]) -> str:
    """Make Markdown of "host-calls": table, attention functions, failures; the first's settings, device, commit."""
    first, all_rows = records[0], [row for record in records for row in record["rows"]]
    functions = {row["attention"]: f"{row['host']} {row['version']}{row['flag'] and ' ' + row['flag']}, torch "
                 f"{row['torch']}: `{row['function']}`" for row in all_rows if "function" in row}  # fmt: skip
    failed = {f"{row['attention']}, {row['pixels']} px, {arm}": why
              for row in all_rows for arm, why in row.get("failed_arms", {}).items()}  # fmt: skip
    preset = first["settings"]["preset"]
    early = {name: share_of_early(preset, name) for name in CURVES}
    text = [_EXPLAINED.format(**first["settings"], **THEIRS, early=early[SD15], early_sdxl=early[SDXL]),
            markdown(HEAD, (row.values() for row in table_rows(records))),
            "\n".join(f"- *{name}*: {meaning}." for name, meaning in functions.items()),
            "\n".join(f"- failed: {name}: {why}" for name, why in failed.items()),
            f"{first['device']['name']}; {first['command']}; commit {first['commit']}."]  # fmt: skip
    return "\n\n".join(part for part in text if part)


def table_rows(records: Sequence[Record]) -> list[dict[str, str]]:
    """Make rows by `HEAD`, one a UNet, attention and size; what needs an arm that failed or is missing is n/a."""
    preset = records[0]["settings"]["preset"]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in (row for record in records for row in record["rows"]):
        groups.setdefault((row.get("unet", SD15), row["attention"], str(row["pixels"])), []).append(row)
    unets, attentions = [*CURVES], [*ATTENTIONS]
    places = sorted(groups, key=lambda name: (unets.index(name[0]), attentions.index(name[1]), int(name[2])))
    return [dict(zip(HEAD, [*name, *figures(groups[name], preset, name[0])], strict=True)) for name in places]


def share_of_early(preset_name: str, unet: str, steps: int = 20) -> float:
    """Return the share, 0 to 1, of uniform steps that are early: by the early ratio, or if no whole blocks merge."""
    config = preset(preset_name, CURVES[unet])
    limits = [rule.max_timestep for rule in config.rules if rule.merge_blocks]
    limit = limits[0] if limits else 1001.0 if config.early_ratio is None else config.early_until
    return share_from(limit, steps)


def share_from(timestep: float, steps: int = 20) -> float:
    """Return the share, 0 to 1, of a picture's uniform steps that are at a timestep or above."""
    return fmean(1001 - 1000 * (step + 1) / steps >= timestep for step in range(steps))


def figures(rows: Sequence[dict[str, Any]], preset_name: str, unet: str) -> list[str]:
    """Make the cells of `HEAD` after "pixels"; a figure is n/a if an arm that it needs failed in any round.

    rows: of one UNet, attention and size, of all rounds and arms; figures are medians over rounds.
    """
    spent = {name: _median([row["seconds"][name] for row in rows if name in row["seconds"]])
             for name in (UNMERGED, BUILT_IN, *OURS)}  # fmt: skip
    plain, theirs, (early_new, early_kept, late_new, late_kept) = spent[UNMERGED], spent[BUILT_IN], map(spent.get, OURS)
    means: list[float | None] = [None, None]
    if None not in map(spent.get, OURS):
        pairs = (fmean((early_new, early_kept)), fmean((late_new, late_kept))), (early_new, late_new)
        shares = [share_of_early(preset_name, unet, steps) for steps in _STEPS]
        means = [share * first + (1 - share) * last for share, (first, last) in zip(shares, pairs, strict=True)]
    factors = (None if None in (plain, merged) else plain / merged for merged in (theirs, means[0]))
    peaks = (_median([row["peak_mib"][arm] for row in rows if arm in row["peak_mib"]]) for arm in ARMS)
    seconds = ((plain,), (theirs,), (early_new, late_new), (early_kept, late_kept), means)
    return [str(1 + max(row["round"] for row in rows)),
            *(ABSENT if None in several else ", ".join(f"{value:.3g}" for value in several) for several in seconds),
            *(number(factor, ".2f") for factor in factors),
            ", ".join(number(None if peak is None else max(0, peak), ",.0f") for peak in peaks)]  # fmt: skip


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median; None if there is no value, or one is None."""
    return median(values) if values and None not in values else None


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 1 if no arm of a case worked, 2 on error, 130 if stopped. None: ``sys.argv[1:]``."""
    return report.run("host_calls", parser(), arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
