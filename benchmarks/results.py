"""Results as data: one JSON a run, a whole record at every moment and a line a row, so that a killed run goes on later.
A row is a dict whose ``key`` names its subject; ``missing`` are the keys that are planned and not there yet."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess  # noqa: TID251 - asks git for the commit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tome_core

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"
KINDS = {"gpu": "gpu_report", "quality": "quality_report", "host-calls": "host_calls",
         "work": "work", "own-error": "own_error_report", "pooled": "pooled",
         "renewal": "renewal"}  # the modules of their tables
_FIELDS = {"created": str, "command": str, "versions": dict, "device": dict, "settings": dict, "rows": list,
           "missing": list}  # fmt: skip

Record = dict[str, Any]


class ResultError(ValueError):
    """The error for a file that is no result, or not of the kind, run or pictures wanted; the message has advice."""


def new_record(kind: str, command: str, settings: dict[str, Any], environment: dict[str, Any]) -> Record:
    """Make a record without rows. kind: of `KINDS`. settings: of all rows. environment: the fields of `describe`."""
    created = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    record = {"kind": kind, "created": created, "command": command, **environment, "settings": settings}
    return json.loads(_dump({**record, "rows": [], "missing": []}))  # as it will be read: tuples become lists


def rounded(value: float) -> float:
    """Round to four significant digits, so that a file is not full of noise."""
    return float(f"{value:.4g}")


def save(record: Record, path: Path) -> None:
    """Write a record in one move, so that a kill while writing leaves the file as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    fields = {name: _dump(value) for name, value in record.items()}
    fields["rows"] = "[\n{}\n]".format(",\n".join(map(_dump, record["rows"])))
    lines = ",\n".join(f"{_dump(name)}: {text}" for name, text in fields.items())
    unfinished.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    os.replace(unfinished, path)


def _dump(value: Any) -> str:
    """Return a value as a line of JSON. Raises ValueError for a NaN or infinity, which is no JSON and no result."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def load(path: Path) -> Record:
    """Read a record that `save` wrote. Raises ResultError if the file is no result, OSError if it cannot be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["kind"] in KINDS and all(isinstance(record[name], kind) for name, kind in _FIELDS.items()):
            return record
    except (ValueError, KeyError, TypeError):
        pass
    raise ResultError(f"{path} is no result; give one of the kinds {', '.join(KINDS)}, such as those in {FOLDER}")


class Run:
    """A record and its file: `start` makes it or goes on with a killed one, `add` fills in the rows that are `missing`.

    The argument `keys` has those of all planned rows, added or not.
    """

    def __init__(self, record: Record, path: Path, keys: Sequence[str]) -> None:
        measured = {row["key"] for row in record["rows"]}
        record["missing"] = [key for key in keys if key not in measured]
        self.record, self.path = record, path

    @classmethod
    def start(cls, record: Record, keys: Sequence[str], output: Path | None = None, folder: Path = FOLDER) -> Run:
        """Begin a run, or go on with a killed one of the same kind, settings, device and versions but tome_core's.

        record: without rows. keys: of all planned rows, in their order. output: the file, new or this run's, even
        finished; None: `folder`'s latest unfinished that fits, or a new one. Raises ResultError if it is another run's.
        """
        path = output or _find_path(record, folder)
        if not path.exists():
            return cls(record, path, keys)
        before = load(path)
        if other := difference(before, record):
            raise ResultError(f"{path} is a run with other {other}; give another file, or remove this one")
        # a file that grew under several commits names them all
        commits = dict.fromkeys([*(before.get("commit") or "unknown").split(", "), record.get("commit") or "unknown"])
        return cls({**before, "commit": ", ".join(commits)}, path, keys)

    @property
    def missing(self) -> list[str]:
        """A copy of the list of keys of the planned rows that are not there yet, in the order of the plan."""
        return list(self.record["missing"])

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Add one row, with this key, and save. Raises ValueError for a row that is not missing, or a NaN in it."""
        row = json.loads(_dump({"key": key, **row}))
        self.record["missing"].remove(key)
        self.record["rows"].append(row)
        save(self.record, self.path)


def _find_path(record: Record, folder: Path) -> Path:
    """Find the folder's latest unfinished file that this record may go on with, else a name that no file has."""
    kind, date = f"{record['kind']}-{record['device'].get('kind', 'device')}", record["created"][:10]
    for path in sorted(folder.glob(f"{kind}-*.json"), reverse=True):
        before = load(path)
        if before["missing"] and not difference(before, record):
            return path
    numbers = ("", *(f"-{number}" for number in range(2, 1000)))
    return next(path for number in numbers if not (path := folder / f"{kind}-{date}{number}.json").exists())


def difference(before: Record, record: Record) -> str | None:
    """Name, with commas, those of kind, settings, versions (not tome_core's) and device that differ; None if equal."""
    def of(record: Record, name: str) -> Any:
        return {**record[name], "tome_core": None} if name == "versions" else record[name]  # commits say more

    return ", ".join(name for name in ("kind", "settings", "versions", "device")
                     if of(before, name) != of(record, name)) or None  # fmt: skip


def describe(device: str) -> dict[str, Any]:
    """Make a result's ``commit``, maybe None, and dicts ``versions``, ``device``. device: torch's name, as ``cpu``."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("diffusers", "tomesd"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["tome_core"] = tome_core.__version__
    return {"commit": commit(), "versions": versions, "device": _describe_device(device)}


def commit(folder: Path = ROOT) -> str | None:
    """Name HEAD in 12 digits, ``+changes`` if tracked files outside results/ differ; None without git or repository."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout

    try:  # results are no changes: else a run that saves its own would spoil the next one's commit
        name = git("rev-parse", "--short=12", "HEAD").strip()
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):  # no git on this machine, or no repository
        return None
    return name + ("+changes" if changed else "")


def _describe_device(device: str) -> dict[str, Any]:
    """Describe a device by kind and name; CUDA also by memory in GiB and version, others by CPU cores and threads."""
    kind, cpuinfo = torch.device(device).type, Path("/proc/cpuinfo")
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = round(properties.total_memory / 2**30, 1)
        return {"kind": kind, "name": properties.name, "memory_gib": memory, "cuda": torch.version.cuda}
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""  # Python knows no CPU's name on Linux
    named = re.search(r"^model name\s*:\s*(.+)", text, re.M)
    name = named[1] if named and kind == "cpu" else platform.processor() or platform.machine()
    return {"kind": kind, "name": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
