"""The shape of the house: arrows in one direction, the engine on torch alone, nothing done at import."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from tests import conftest

ROOT = Path(__file__).parents[2]
# what each room of the engine may import from the others; read top to bottom, the arrows point up
MAY_IMPORT = {
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
DOORS = ("hosting", "__init__")  # what is used of the rooms from outside
BELOW_ALL = "compiling"  # what all of them may import, and what imports none
# what a module may import besides torch and the standard library: its one importer does without it if it is missing
OPTIONAL = {f"merging/kernels/triton_kernels{which}": {"triton"} for which in ("", "_correction")}
# which hosts a host may import beside itself: benchmarks measure the demo's models
HOSTS = {"extension": set(), "comfy_nodes": set(), "demo": set(), "benchmarks": {"demo"}}
# what a file asks for by name in a host's own Python, as the host's extension does
IN_A_HOSTS_PYTHON = {
    "benchmarks/host_inside.py": {"comfy_nodes.nodes", "extension.attentions"},
}
ENGINE = ROOT / "tome_core"
MODULES = sorted(ENGINE.rglob("*.py"))


def _name(path: Path) -> str:
    """The path of a module inside the engine, without `.py`."""
    return path.relative_to(ENGINE).with_suffix("").as_posix()


def _room(path: Path) -> str:
    return _name(path).split("/")[0]


def _imported_modules(path: Path) -> set[Path]:
    """Files of the engine that a file of the engine imports."""
    places = (path.parents[level - 1].joinpath(*name.split(".")) for level, name in _imports(path) if level)
    return {_file(place) or _file(place.parent) for place in places} - {None}


def _file(module: Path) -> Path | None:
    places = (module.with_suffix(".py"), module / "__init__.py")
    return next((place for place in places if place.is_file()), None)


def _imports(path: Path) -> set[tuple[int, str]]:
    """Level and full name of all that a file imports, (1, "a.b") where it says ``from .a import b``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            above = f"{node.module}." if getattr(node, "module", None) else ""
            found |= {(getattr(node, "level", 0), above + alias.name) for alias in node.names}
    return found


def _texts(path: Path) -> set[str]:
    """All strings of a file."""
    return {node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # fmt: skip


def test_the_engine_imports_torch_and_the_standard_library_only():
    for path in MODULES:
        outside = {name.split(".")[0] for level, name in _imports(path) if not level}
        allowed = {"torch", "__future__"} | OPTIONAL.get(_name(path), set()) | set(sys.stdlib_module_names)
        assert outside <= allowed, path


def test_arrows_between_the_rooms_are_those_of_the_table_and_point_up():
    above: set[str] = set()
    arrows = {(_room(path), _room(imported)) for path in MODULES for imported in _imported_modules(path)}
    assert {start for start, _ in arrows} <= {*MAY_IMPORT, BELOW_ALL}
    for room, may in MAY_IMPORT.items():
        assert may <= above, f"{room} may import {sorted(may - above)} from below"
        above.add(room)
        assert {end for start, end in arrows if start == room} - {room, BELOW_ALL} == may, room
    assert BELOW_ALL not in {start for start, _ in arrows}
    rooms = set(MAY_IMPORT) - set(DOORS)
    assert len(rooms) <= 8 and sum(len(MAY_IMPORT[room]) for room in rooms) <= 25


def test_whether_a_compiler_is_at_work_is_asked_in_few_places_and_of_the_thread_that_asks():
    """torch says it to all threads."""
    texts = {_name(path): path.read_text(encoding="utf-8") for path in MODULES}
    asking = [name for name, text in texts.items() if re.search(r"(?<!jit\.)is_tracing\(\)", text)]
    assert len(asking) <= 4, asking
    for name, text in texts.items():
        asked = "torch.compiler.is_compiling()"
        assert text.count(asked) == text.count(f"{asked} and is_tracing()"), name


def test_modules_go_round_in_no_circle():
    """Also not inside a room. What a function imports when it is called counts as well."""
    arrows = {path: _imported_modules(path) for path in MODULES if path.name != "__init__.py"}
    list(graphlib.TopologicalSorter(arrows).static_order())  # raises CycleError, which names the circle


def test_hosts_use_one_module_of_the_engine():
    """By import, or by name, as import_module does."""
    for path in (path for host in ("comfy_nodes", "extension") for path in (ROOT / host).rglob("*.py")):
        named = {name for _, name in _imports(path)} | {text.lstrip(".") for text in _texts(path)}
        engine = {name for name in named if re.match(r"tome_core(\.\w+)*$", name)}
        assert not {name for name in engine if not re.match(r"tome_core\.hosting\b", name)}, path


def test_hosts_do_not_import_each_other():
    """Nor ask for each other's modules by name, as import_module does."""
    for path in (path for host in HOSTS for path in (ROOT / host).rglob("*.py")):
        host = path.relative_to(ROOT).parts[0]
        others = set(HOSTS) - {host} - HOSTS[host]
        assert not {name.split(".")[0] for _, name in _imports(path)} & others, path
        asked = {found[0] for text in _texts(path) for other in others
                 if (found := re.findall(rf"^\.?({other}\.\w+)$", text))}  # fmt: skip
        assert asked == IN_A_HOSTS_PYTHON.get(path.relative_to(ROOT).as_posix(), set()), path
        assert all(_file(ROOT.joinpath(*name.split("."))) for name in asked), path


def test_no_test_imports_another():
    """What they share lies in modules of tests/ itself, so that each can be moved, renamed and split alone."""
    for path in (ROOT / "tests").rglob("*.py"):
        tests = sorted(name for _, name in _imports(path) if any(part.startswith("test_") for part in name.split(".")))
        assert not tests, f"{path.relative_to(ROOT)} imports {tests}"


def test_importing_the_engine_does_nothing_but_define_and_imports_nothing_optional():
    code = "import sys, torch, logging; before = len(logging.root.handlers); state = torch.get_rng_state();" \
        "known = set(sys.modules); import tome_core;" \
        "assert torch.equal(torch.get_rng_state(), state) and len(logging.root.handlers) == before;" \
        "assert not [name for name in set(sys.modules) - known if name.split('.')[-1].startswith('triton')]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Item(NamedTuple):
    """A collected test."""

    path: str
    name: str
    slow: bool = False

    def get_closest_marker(self, mark: str) -> bool:
        return self.slow and mark == "slow"


def test_quick_leaves_out_the_slow_tests_and_files_with_slow_tests_come_first():
    def collected(quick: bool) -> list[str]:
        items = [Item("a", "first"), Item("b", "long", slow=True), Item("b", "last")]
        hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
        conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: quick, hook=hook), items)
        return [item.name for item in items]

    left_out: list[Item] = []
    assert collected(False) == ["long", "last", "first"] and not left_out
    assert collected(True) == ["last", "first"] and [item.name for item in left_out] == ["long"]
