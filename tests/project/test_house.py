"""The project's structure: imports follow the map in CONTRIBUTING.md, do nothing, and models come from safetensors."""

import ast
import re
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = {path.relative_to(ROOT / "tome_core"): path for path in (ROOT / "tome_core").rglob("*.py")}
MAP = re.search(r"## The map\n\n```\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)[1]
# the rooms of each row of the map; what follows three spaces is a comment
ROWS = [re.findall(r"(\w+)(?:\.py)?", line.split("   ")[0]) for line in MAP.splitlines()]
# other hosts that a host may import: benchmarks measure the demo's models
HOSTS = {"extension": set(), "comfy_nodes": set(), "demo": set(), "benchmarks": {"demo"}}


def imports(path: Path) -> set[str]:
    """Full names of a file's imports; relative ones begin with "clone."."""
    package, names = ".".join(("clone", *path.relative_to(ROOT).parent.parts)), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def test_the_engine_imports_torch_and_the_standard_library_only():
    for path in ENGINE.values():
        allowed = {"clone", "torch", *sys.stdlib_module_names}
        if path.stem.startswith("triton_kernels"):
            allowed.add("triton")
        assert {name.split(".")[0] for name in imports(path)} <= allowed, path


def test_a_room_imports_from_the_rows_below_it_in_the_map():
    row_of = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
    assert set(row_of) == {inside.parts[0].removesuffix(".py") for inside in ENGINE}
    for inside, path in ENGINE.items():
        room = inside.parts[0].removesuffix(".py")
        others = {name.split(".")[2] for name in imports(path) if name.startswith("clone.")} - {room}
        assert not [other for other in others if row_of[other] <= row_of[room]], path


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


def test_models_are_loaded_from_this_machine_and_from_safetensors_alone():
    """A single file has weights only, so diffusers may fetch its configuration."""
    for path in (path for top in ("tome_core", *HOSTS) for path in (ROOT / top).rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)
                 and getattr(node.func, "attr", None) == "from_pretrained"]  # fmt: skip
        for call in calls:
            given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
            assert given.get("local_files_only") is True and given.get("use_safetensors") is True, path
