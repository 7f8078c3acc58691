"""Results as data: one JSON a run, written row by row, so that a killed run goes on where it was.

A record is ``{"kind", "created", "command", "commit", "versions", "device", "settings", "rows", "missing"}``. A row
is a dict whose ``key`` names its subject; ``missing`` are the keys that are planned and not there yet. A file is a
whole record at every moment, a line a row, and says where it was made: versions, commit and device.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess  # noqa: TID251 - asks git for the commit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tome_core

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"
KINDS = ("gpu", "quality", "host-calls")
OLDER_KINDS = ("stacking", "cases")  # the code that measured them went after commit 8e51c51
# what has to be equal for rows of two processes to stand in one table
IDENTITY = ("kind", "settings", "versions", "device")
_FIELDS = {"kind": str, "created": str, "command": str, "versions": dict, "device": dict, "settings": dict,
           "rows": list, "missing": list}  # fmt: skip

Record = dict[str, Any]


class ResultError(ValueError):
    """A file that is no result, or a result of another run; the message says what to do."""


def new_record(kind: str, command: str, settings: dict[str, Any], environment: dict[str, Any]) -> Record:
    """A record without rows. environment: what `describe` gives."""
    created = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    record = {"kind": kind, "created": created, "command": command, **environment, "settings": settings}
    return _as_json({**record, "rows": [], "missing": []})


def save(record: Record, path: Path) -> None:
    """Write it in one move: a kill while writing leaves the file as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    fields = {name: _dump(value) for name, value in record.items()}
    if "rows" in record:
        fields["rows"] = "[\n{}\n]".format(",\n".join(map(_dump, record["rows"])))
    lines = ",\n".join(f"{_dump(name)}: {text}" for name, text in fields.items())
    unfinished.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    os.replace(unfinished, path)


def _dump(value: Any) -> str:
    """A NaN or infinity is no JSON, and no result either."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def load(path: Path) -> Record:
    """Read what `save` wrote. Raises ResultError, naming the file, if it is no result."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        wrong = f"cannot be read ({error.strerror})"
    except ValueError as error:
        wrong = f"is no JSON ({error})"
    else:
        wrong = _fault_of(record)
    if wrong:
        raise ResultError(f"{path} {wrong}; give a result of one of the benchmarks, such as those in {FOLDER}")
    return record


def _fault_of(record: Any) -> str | None:
    if not isinstance(record, dict):
        return f"holds a {type(record).__name__}"
    for field, kind in _FIELDS.items():
        if not isinstance(record.get(field), kind):
            return f"is no result: its {field!r} is missing or not a {kind.__name__}"
    if record["kind"] not in (*KINDS, *OLDER_KINDS):
        return f"is no result: its kind is {record['kind']!r}, not one of {', '.join(KINDS)}"
    if not all(isinstance(row, dict) and isinstance(row.get("key"), str) for row in record["rows"]):
        return "is no result: one of its rows has no key"
    return None


class Run:
    """A record and its file, filled row by row."""

    def __init__(self, record: Record, path: Path, keys: Sequence[str]) -> None:
        self.record, self.path, self._keys = record, path, list(keys)
        if len(set(self._keys)) != len(self._keys):
            raise ValueError("two planned rows have the same key")
        self._note_missing()

    @classmethod
    def start(cls, record: Record, keys: Sequence[str], output: Path | None = None, folder: Path = FOLDER) -> Run:
        """Begin a run, or go on with a killed one of the same settings, device and versions of others' packages.

        keys: of all planned rows, in their order. output: the file; None is a new one below `folder`, or the
        unfinished file that fits. Raises ResultError if `output` is another run's result, or complete.
        """
        if output is None:
            path = _find_unfinished(record, folder)
            return cls(_go_on(load(path), record), path, keys) if path else cls(record, _new_path(record, folder), keys)
        if not output.exists():
            return cls(record, output, keys)
        before = load(output)
        other = difference(before, record)
        if other:
            raise ResultError(f"{output} is a run with other {other}; give another file, or remove this one")
        if not set(keys) - {row["key"] for row in before["rows"]}:
            raise ResultError(f"{output} is complete; give another file to measure again, or remove this one")
        return cls(_go_on(before, record), output, keys)

    @property
    def missing(self) -> list[str]:
        """Keys of the rows that are planned and not there yet, in the plan's order."""
        return list(self.record["missing"])

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Add one row and save. Raises ValueError for a row that is not missing."""
        if key not in self.record["missing"]:
            raise ValueError(f"row {key!r} is not missing")
        self.record["rows"].append(_as_json({"key": key, **row}))
        self._note_missing()
        save(self.record, self.path)

    def _note_missing(self) -> None:
        there = {row["key"] for row in self.record["rows"]}
        self.record["missing"] = [key for key in self._keys if key not in there]


def _find_unfinished(record: Record, folder: Path) -> Path | None:
    for path in sorted(folder.glob(f"{record['kind']}-*.json"), reverse=True):
        before = load(path)
        if before["missing"] and not difference(before, record):
            return path
    return None


def difference(before: Record, record: Record) -> str | None:
    """The names of the fields that differ, as far as they forbid to go on with the same file."""
    return ", ".join(field for field in IDENTITY if _tell_apart(before, field) != _tell_apart(record, field)) or None


def _tell_apart(record: Record, field: str) -> Any:
    """Without our own release: a record names the commits that its rows are of, which tell more."""
    return {**record[field], "tome_core": None} if field == "versions" else record[field]


def _go_on(before: Record, record: Record) -> Record:
    """The earlier record; one that grew under several commits names them all."""
    commits = dict.fromkeys([*(before.get("commit") or "unknown").split(", "), record.get("commit") or "unknown"])
    return {**before, "commit": ", ".join(commits)}


def _new_path(record: Record, folder: Path) -> Path:
    stem = f"{record['kind']}-{record['device'].get('kind', 'device')}-{record['created'][:10]}"
    paths = (folder / f"{stem}{'' if number == 1 else f'-{number}'}.json" for number in range(1, 10**6))
    return next(path for path in paths if not path.exists())


def _as_json(value: Any) -> Any:
    """As it will be read back: tuples become lists, so that a comparison with a loaded record is one of equals."""
    return json.loads(json.dumps(value, allow_nan=False))


def describe(device: str) -> dict[str, Any]:
    """The fields ``commit``, ``versions`` and ``device`` of a result. device: what torch calls it, such as ``cpu``."""
    return {"commit": commit(), "versions": versions(), "device": describe_device(device)}


def versions() -> dict[str, str | None]:
    """Of Python and every package whose speed or result is measured; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "diffusers", "tomesd"):
        try:
            found[name] = torch.__version__ if name == "torch" else importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "tome_core": tome_core.__version__}


def commit(folder: Path = ROOT) -> str | None:
    """The repository's commit, with ``+changes`` where tracked files differ from it; None outside a repository.

    Results do not count as changes: a run that saves its own would otherwise spoil the next one's commit.
    """
    name = _git(folder, "rev-parse", "--short=12", "HEAD")
    if name is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return name + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def describe_device(device: str) -> dict[str, Any]:
    """Its kind and name; a CPU's cores and the threads in use, a GPU's memory in GiB."""
    kind = torch.device(device).type
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = round(properties.total_memory / 2**30, 1)
        return {"kind": kind, "name": properties.name, "memory_gib": memory, "cuda": torch.version.cuda}
    name = _processor() if kind == "cpu" else platform.machine()
    return {"kind": kind, "name": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def _processor() -> str:
    """The processor's name; Python itself knows only its architecture on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
