"""The shape of the house: arrows in one direction, the engine on torch alone, nothing done at import."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "tome_core"
MODULES = sorted(ENGINE.rglob("*.py"))
# what each room of the engine imports from the others; read top to bottom, the arrows point up
IMPORTS = {
    "compiling": set(),
    "reporting": set(),
    "merging": set(),
    "attention": {"merging"},
    "settings": {"merging"},
    "engine": {"attention", "merging", "reporting", "settings"},
    "models": {"attention", "engine", "merging", "reporting", "settings"},
    "measuring": {"attention", "engine", "models", "reporting", "settings"},
    "patching": {"engine", "measuring", "models", "reporting", "settings"},
    "hosting": {"attention", "engine", "measuring", "merging", "models", "patching", "reporting", "settings"},
    "__init__": {"merging", "models", "patching", "reporting", "settings"},
}
# what a module may import besides torch and the standard library: its one importer does without it if it is missing
OPTIONAL = {f"merging/kernels/triton_kernels{which}": {"triton"} for which in ("", "_correction")}
# which hosts a host may import beside itself: benchmarks measure the demo's models
HOSTS = {"extension": set(), "comfy_nodes": set(), "demo": set(), "benchmarks": {"demo"}}
# what a file asks for by name in a host's own Python, as the host's extension does
IN_A_HOSTS_PYTHON = {"benchmarks/host_inside.py": {"comfy_nodes.nodes", "extension.attentions"}}


def module_name(path: Path) -> str:
    """The path of a module inside the engine, without `.py`."""
    return path.relative_to(ENGINE).with_suffix("").as_posix()


def room(path: Path) -> str:
    return module_name(path).split("/")[0]


def imports(path: Path) -> set[tuple[int, str]]:
    """Level and full name of all that a file imports, (1, "a.b") where it says ``from .a import b``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            above = f"{node.module}." if getattr(node, "module", None) else ""
            names |= {(getattr(node, "level", 0), above + alias.name) for alias in node.names}
    return names


def imported_files(path: Path) -> set[Path]:
    """Files of the engine that a file of the engine imports."""
    places = [path.parents[level - 1].joinpath(*name.split(".")) for level, name in imports(path) if level]
    return {file_of(place) or file_of(place.parent) for place in places} - {None}


def file_of(module: Path) -> Path | None:
    files = (module.with_suffix(".py"), module / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def names_in(path: Path) -> set[str]:
    """What a file imports, and what it may import by name: its strings."""
    strings = (node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
               if isinstance(node, ast.Constant) and isinstance(node.value, str))  # fmt: skip
    return {name for _, name in imports(path)} | {string.lstrip(".") for string in strings}


def test_the_engine_imports_torch_and_the_standard_library_only():
    for path in MODULES:
        outside = {name.split(".")[0] for level, name in imports(path) if not level}
        allowed = {"torch", "__future__"} | OPTIONAL.get(module_name(path), set()) | set(sys.stdlib_module_names)
        assert outside <= allowed, path


def test_arrows_between_the_rooms_are_those_of_the_table_and_point_up():
    arrows = {(room(path), room(file)) for path in MODULES for file in imported_files(path)}
    above: set[str] = set()
    for name, allowed in IMPORTS.items():
        assert allowed <= above, f"{name} may import {sorted(allowed - above)} from below"
        assert {end for start, end in arrows if start == name} - {name, "compiling"} == allowed, name
        above.add(name)
    assert {start for start, _ in arrows} <= above


def test_modules_go_round_in_no_circle():
    """Also not inside a room. What a function imports when it is called counts as well."""
    arrows = {path: imported_files(path) for path in MODULES if path.name != "__init__.py"}
    list(graphlib.TopologicalSorter(arrows).static_order())  # raises CycleError, which names the circle


def test_a_host_uses_one_module_of_the_engine_and_no_other_host():
    """By import, or by name, as import_module does."""
    for host, friends in HOSTS.items():
        others = "|".join(set(HOSTS) - {host} - friends)
        for path in (ROOT / host).rglob("*.py"):
            names = names_in(path)
            foreign = {name for name in names if re.fullmatch(rf"({others})\.\w+(\.\w+)*", name) and file_of(
                ROOT.joinpath(*name.split(".")[:2]))}  # fmt: skip
            assert foreign == IN_A_HOSTS_PYTHON.get(path.relative_to(ROOT).as_posix(), set()), path
            if host in ("extension", "comfy_nodes"):
                engine = {name for name in names if re.fullmatch(r"tome_core(\.\w+)*", name)}
                assert not {name for name in engine if not name.startswith("tome_core.hosting")}, path


def test_importing_the_engine_does_nothing_but_define_and_imports_nothing_optional():
    code = "import sys, torch, logging; before = len(logging.root.handlers); state = torch.get_rng_state();" \
        "known = set(sys.modules); import tome_core;" \
        "assert torch.equal(torch.get_rng_state(), state) and len(logging.root.handlers) == before;" \
        "assert not [name for name in set(sys.modules) - known if name.split('.')[-1].startswith('triton')]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
