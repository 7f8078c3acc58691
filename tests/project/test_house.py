"""The shape of the house: imports follow the map in CONTRIBUTING.md, and importing the engine does nothing."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {f"clone.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}": path
           for path in (ROOT / "tome_core").rglob("*.py") if path.name != "__init__.py"}  # fmt: skip
MAP = re.search(r"## The map\n\n```\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)[1]
# the rooms of each row of the map; what follows three spaces is a comment
ROWS = [re.findall(r"(\w+)(?:\.py)?", line.split("   ")[0]) for line in MAP.splitlines()]
# which hosts a host may import beside itself: benchmarks measure the demo's models
HOSTS = {"extension": set(), "comfy_nodes": set(), "demo": set(), "benchmarks": {"demo"}}


def imports(path: Path) -> set[str]:
    """Full names of all that a file imports; relative ones begin with "clone."."""
    package, names = ".".join(("clone", *path.relative_to(ROOT).parent.parts)), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def module_of(name: str) -> str:
    """The module of the engine that a name is in; an empty string for a name of a package or of others."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def test_the_engine_imports_torch_and_the_standard_library_only():
    for path in (ROOT / "tome_core").rglob("*.py"):
        allowed = {"clone", "torch", *sys.stdlib_module_names}
        if path.stem.startswith("triton_kernels"):
            allowed.add("triton")
        assert {name.split(".")[0] for name in imports(path)} <= allowed, path


def test_a_room_imports_from_the_rows_below_it_in_the_map():
    row_of = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
    files = (path.relative_to(ROOT / "tome_core") for path in (ROOT / "tome_core").rglob("*.py"))
    assert set(row_of) == {file.parts[0].removesuffix(".py") for file in files}
    for path in (ROOT / "tome_core").rglob("*.py"):
        room = path.relative_to(ROOT / "tome_core").parts[0].removesuffix(".py")
        others = {name.split(".")[2] for name in imports(path) if name.startswith("clone.")} - {room}
        assert not [other for other in others if row_of[other] <= row_of[room]], path


def test_modules_go_round_in_no_circle():
    """Also not inside a room. What a function imports when it is called counts as well."""
    arrows = {name: {module_of(other) for other in imports(path)} - {""} for name, path in MODULES.items()}
    list(graphlib.TopologicalSorter(arrows).static_order())  # raises CycleError, which names the circle


def test_a_host_uses_one_module_of_the_engine_and_no_other_host():
    for host, friends in HOSTS.items():
        for path in (ROOT / host).rglob("*.py"):
            names = {name.removeprefix("clone.") for name in imports(path)}
            assert not {name.split(".")[0] for name in names} & (set(HOSTS) - {host} - friends), path
            if host in ("extension", "comfy_nodes"):
                engine = {name for name in names if name.startswith("tome_core")}
                assert all(name.startswith("tome_core.hosting") for name in engine), path


def test_importing_the_engine_does_nothing_but_define_and_imports_nothing_optional():
    code = """if True:
        import logging, sys, torch
        before, state, known = len(logging.root.handlers), torch.get_rng_state(), set(sys.modules)
        import tome_core
        assert torch.equal(torch.get_rng_state(), state) and len(logging.root.handlers) == before
        assert not [name for name in set(sys.modules) - known if name.split(".")[-1].startswith("triton")]
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
