"""What a result has to say about where it was made: versions, commit and device."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import tome_core

ROOT = Path(__file__).resolve().parent.parent


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
