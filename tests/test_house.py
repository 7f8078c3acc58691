"""The shape of the house: arrows in one direction, the engine on torch alone, nothing done at import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tome_core.settings_table import replace_between_markers

ROOT = Path(__file__).parents[1]
# what each module of the engine may import from the engine; read top to bottom, the arrows point up
MAY_IMPORT = {
    "triton_kernels_correction": set(),
    "triton_kernels_groups": set(),
    "triton_kernels": {"triton_kernels_correction", "triton_kernels_groups"},
    "kernels": {"triton_kernels"},
    "kernels_correction": {"kernels"},
    "plan": {"kernels"},
    "grid": set(),
    "methods": {"plan", "grid", "kernels"},
    "metric": {"kernels"},
    "attention": {"grid", "kernels", "kernels_correction", "plan"},
    "setting": set(),
    "config": {"methods", "metric", "setting"},
    "schedule": {"config"},
    "phases": {"config", "methods", "schedule"},
    "config_text": {"config", "methods", "phases"},
    "strength_table": set(),
    "presets": {"config", "strength_table"},
    "form": {"config", "presets"},
    "keep": set(),
    "timesteps": set(),
    "noise": {"schedule"},
    "gate": {"config", "schedule"},
    "gains": set(),
    "decision": {"config", "gate", "methods", "plan", "schedule"},
    "ledger": set(),
    "report_text": set(),
    "report": {"gains", "ledger", "report_text"},
    "late_pass": set(),
    "clock": {"config", "gate", "late_pass", "ledger", "noise", "phases", "schedule"},
    "wrap": set(),
    "switch": set(),
    "families": set(),
    "fingerprint": {"attention", "config", "families"},
    "latch": {"fingerprint", "gains", "gate", "schedule"},
    "run": {"clock", "config", "decision", "grid", "keep", "latch", "ledger", "noise", "plan", "schedule",
        "timesteps"},
    "measure": {"run", "switch", "wrap"},
    "example_inputs": {"families", "fingerprint"},
    "in_graph": set(),
    "memory": {"run"},
    "search": {"attention", "config", "keep", "plan"},
    "matching": {"attention", "config", "grid", "methods", "metric", "plan", "run", "search"},
    "compiled": {"attention", "config", "grid", "in_graph", "ledger", "matching", "methods", "plan", "run",
        "search"},
    "sites": {"attention", "compiled", "config", "decision", "grid", "in_graph", "matching", "memory",
        "run", "search", "switch", "wrap"},
    "parts": {"attention", "decision", "families", "ledger", "plan", "run", "sites", "wrap"},
    "wiring": {"families", "parts", "sites", "switch", "wrap"},
    "pipeline": {"keep", "run", "wrap"},
    "measured": {"config", "decision", "example_inputs", "families", "fingerprint", "gains", "latch", "measure", "run"},
    "handle": {"config", "config_text", "keep", "kernels", "ledger", "report", "run", "schedule"},
    "sequence": {"attention", "config", "decision", "grid", "handle", "ledger", "matching", "methods", "metric",
        "phases", "plan", "run", "schedule", "search"},
    "transformers": {"config", "grid", "pipeline", "run", "sequence", "switch", "wrap"},
    "patch": {"config", "families", "fingerprint", "handle", "ledger", "measured", "noise", "phases", "pipeline",
        "presets", "report", "run", "schedule", "transformers", "wiring", "wrap"},
    "graphs": {"families", "keep", "ledger", "plan", "run", "search", "sites", "switch", "wiring", "wrap"},
    "diffusers_model_hook": {"patch", "run", "wrap"},
    "diffusers_hooks": {"config", "diffusers_model_hook", "patch", "wrap"},
    "sd_block": {"attention"},
    "settings_table": {"config"},
    "host_time": {"config", "patch", "presets", "sd_block"},
    "bench": {"config", "grid", "host_time", "kernels", "methods", "patch", "plan", "presets", "sd_block"},
    "__init__": {"config", "families", "form", "gains", "graphs", "patch", "phases", "plan", "presets", "report",
        "schedule", "sequence"},
}
PACKAGES = ("methods", "attention", "sequence", "transformers", "graphs")
# what a module may import beside torch and the standard library: its one importer does without it where it is missing
OPTIONAL = {f"triton_kernels{which}": {"triton"} for which in ("", "_correction", "_groups")} | {
    "diffusers_hooks": {"diffusers"}, "diffusers_model_hook": {"diffusers"}}
# which hosts a host may import beside itself: the quality benchmark measures the demo's model
HOSTS = {"extension": set(), "comfy_nodes": set(), "demo": set(), "benchmarks": {"demo"}}


def _imports(path: Path) -> set[str]:
    """Top-level names it imports; relative imports as ``.module``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
            found |= {"." * node.level + name for name in names}
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "tome_core").rglob("*.py")), ids=lambda p: p.stem)
def test_the_engine_imports_torch_and_the_standard_library_only(path):
    outside = {name for name in _imports(path) if not name.startswith(".")}
    assert outside <= {"torch", "__future__"} | OPTIONAL.get(path.stem, set()) | set(sys.stdlib_module_names)


def test_importing_the_engine_imports_nothing_optional():
    code = "import sys, torch; before = set(sys.modules); import tome_core, tome_core.bench;" \
        "print(*{name.split('.')[-1] for name in set(sys.modules) - before} " \
        "& {'triton', 'triton_kernels', 'triton_kernels_correction'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_what_may_be_imported_stands_above_and_so_in_no_circle():
    above: set[str] = set()
    for module, may in MAY_IMPORT.items():
        assert may <= above, f"{module} may import {sorted(may - above)} from below"
        above.add(module)


@pytest.mark.parametrize("path", sorted((ROOT / "tome_core").rglob("*.py")), ids=lambda p: p.stem)
def test_arrows_inside_the_engine_point_one_way(path):
    inside = path.parent.name in PACKAGES
    module = path.parent.name if inside else path.stem
    used = {name.lstrip(".") for name in _imports(path) if name.startswith("." * (2 if inside else 1))}
    if inside:
        used = {name.lstrip(".") for name in _imports(path) if name.startswith("..")}
    assert used <= MAY_IMPORT[module], f"{module} imports {sorted(used - MAY_IMPORT[module])}"


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_do_not_import_each_other(host):
    others = set(HOSTS) - {host} - HOSTS[host]
    for path in (ROOT / host).rglob("*.py"):
        assert not {name.lstrip(".") for name in _imports(path)} & others, path


IN_A_HOSTS_PYTHON = ("unfused_hosts.py", "stack_comfyui_call.py")  # run there, as the host's extension does


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_do_not_ask_for_each_others_modules_by_name(host):
    """import_module takes a text, which the law above does not see."""
    for path in (ROOT / host).rglob("*.py"):
        texts = {node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                 if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # fmt: skip
        asked = {found[0] for text in texts for other in set(HOSTS) - {host} - HOSTS[host]
                 if (found := re.findall(rf"^\.?({other}\.\w+)$", text))}  # fmt: skip
        assert not asked or path.name in IN_A_HOSTS_PYTHON, path


def test_importing_the_engine_does_nothing_but_define():
    code = "import torch, logging; before = len(logging.root.handlers); state = torch.get_rng_state();" \
        "import tome_core; assert torch.equal(torch.get_rng_state(), state);" \
        "assert len(logging.root.handlers) == before"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


def test_the_settings_in_the_readme_are_those_of_the_code():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert replace_between_markers(text) == text, "run: python -m tome_core.settings_table --write README.md"
