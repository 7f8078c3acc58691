"""The shape of the house: arrows in one direction, the engine on torch alone, nothing done at import."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.changed import imports
from tome_core.settings.table import replace_between_markers

ROOT = Path(__file__).parents[2]
# what each room of the engine may import from the others; read top to bottom, the arrows point up
MAY_IMPORT = {
    "model": set(),
    "reporting": set(),
    "merging": set(),
    "attention": {"merging"},
    "settings": {"merging"},
    "running": {"attention", "merging", "model", "reporting", "settings"},
    "measuring": {"model", "reporting", "running", "settings"},
    "unet": {"attention", "merging", "model", "reporting", "running", "settings"},
    "sequence": {"attention", "merging", "reporting", "running", "settings"},
    "transformers": {"merging", "model", "reporting", "running", "sequence", "settings"},
    "patching": {"measuring", "model", "reporting", "running", "settings", "transformers", "unet"},
    "__init__": {"merging", "model", "patching", "reporting", "sequence", "settings"},
}
BELOW_ALL = "compiling"  # what all of them may import, and what imports none
# what a module may import beside torch and the standard library: its one importer does without it where it is missing
OPTIONAL = {f"merging/triton_kernels{which}": {"triton"} for which in ("", "_correction", "_groups")}
# which hosts a host may import beside itself: benchmarks measure the demo's models
HOSTS = {"extension": set(), "comfy_nodes": set(), "demo": set(), "benchmarks": {"demo"}}
# what a file asks for by name in a host's own Python, as the host's extension does
IN_A_HOSTS_PYTHON = {
    "benchmarks/stack_comfyui_call.py": {"comfy_nodes.nodes"},
    "benchmarks/unfused_hosts.py": {"comfy_nodes.attentions", "extension.attentions"},
}


ENGINE = ROOT / "tome_core"
MODULES = sorted(ENGINE.rglob("*.py"))


def _name(path: Path) -> str:
    """Of a module of the engine: where it lies in there, without `.py`."""
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
    return imports(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_the_engine_imports_torch_and_the_standard_library_only(path):
    outside = {name.split(".")[0] for level, name in _imports(path) if not level}
    assert outside <= {"torch", "__future__"} | OPTIONAL.get(_name(path), set()) | set(sys.stdlib_module_names)


def test_what_may_be_imported_stands_above_and_so_in_no_circle():
    above: set[str] = set()
    for module, may in MAY_IMPORT.items():
        assert may <= above, f"{module} may import {sorted(may - above)} from below"
        above.add(module)


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_arrows_between_the_rooms_point_one_way(path):
    room = _room(path)
    others = {_room(imported) for imported in _imported_modules(path)} - {room}
    assert others <= MAY_IMPORT.get(room, set()) | {BELOW_ALL}, f"{_name(path)} imports {sorted(others)}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_what_torch_says_of_compiling_is_believed_for_the_thread_that_compiles(path):
    text, asked = path.read_text(encoding="utf-8"), "torch.compiler.is_compiling()"
    assert text.count(asked) == text.count(f"{asked} and compiles_here()")


def test_modules_go_round_in_no_circle():
    """Also not inside a room. What a function imports when it is called counts as well."""
    arrows = {path: _imported_modules(path) for path in MODULES if path.name != "__init__.py"}
    list(graphlib.TopologicalSorter(arrows).static_order())  # raises CycleError, which names the circle


def test_every_room_says_what_it_is_for():
    for room in (ENGINE / name for name in MAY_IMPORT if name != "__init__"):
        assert ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))), room


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_do_not_import_each_other(host):
    """Nor ask for each other's modules by name, as import_module does."""
    others = set(HOSTS) - {host} - HOSTS[host]
    for path in (ROOT / host).rglob("*.py"):
        assert not {name.split(".")[0] for _, name in _imports(path)} & others, path
        texts = {node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                 if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        asked = {found[0] for text in texts for other in others
                 if (found := re.findall(rf"^\.?({other}\.\w+)$", text))}  # fmt: skip
        assert asked == IN_A_HOSTS_PYTHON.get(path.relative_to(ROOT).as_posix(), set()), path


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


def test_the_settings_on_their_page_are_those_of_the_code():
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert replace_between_markers(text) == text, "run: python -m tome_core.settings.table --write docs/settings.md"
