"""What may come in and go out: rights of GitHub's workflows, weights from disk, and no socket at a host's import.

ruff refuses pickles, sockets and the start of programs in our files: `banned-api` in pyproject.toml.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import install_hosts

yaml = pytest.importorskip("yaml", reason="PyYAML comes with omegaconf: python install.py test")
ROOT = Path(__file__).parents[2]
TEXTS = {path.stem: path.read_text("utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
WORKFLOWS = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
ON = True  # YAML 1.1 reads the key `on` so
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v?\d+(\.\d+)*")
# the rights of a job beyond reading the repository, and the secrets of a workflow
WRITES = {("publish-pypi", "publish"): {"id-token": "write"}}
SECRETS = {"publish-comfy": {"REGISTRY_ACCESS_TOKEN"}}


@pytest.mark.parametrize("name", ["publish-comfy", "publish-pypi"])
def test_a_tag_alone_publishes_after_the_checks_and_if_it_is_the_version(name):
    assert WORKFLOWS[name][ON] == {"push": {"tags": ["v*"]}}
    jobs = WORKFLOWS[name]["jobs"]
    assert jobs["ci"]["uses"] == "./.github/workflows/ci.yml"
    steps, job = [], "publish"
    while job != "ci":
        steps = [*jobs[job]["steps"], *steps]
        job = jobs[job]["needs"]
    assert any("tests.release --tag" in step.get("run", "") for step in steps[:-1])
    assert [step for step in steps if "publish" in step.get("uses", "")] == steps[-1:]


def test_a_job_has_no_right_secret_or_foreign_code_that_it_does_not_need():
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] in ({}, {"contents": "read"}) and "pull_request_target" not in workflow[ON]
        assert set(re.findall(r"secrets\.(\w+)", TEXTS[name])) == SECRETS.get(name, set())
        actions = [line for line in re.findall(r"uses: (.+)", TEXTS[name]) if not line.startswith("./")]
        assert all(map(PINNED.fullmatch, actions)), actions
        for job, content in workflow["jobs"].items():
            granted = content.get("permissions", workflow["permissions"])
            assert {right: how for right, how in granted.items() if how != "read"} == WRITES.get((name, job), {})
            for step in content.get("steps", ()):
                assert "${{" not in step.get("run", ""), "a stranger's text becomes a command"
                if step.get("uses", "").startswith("actions/checkout@"):
                    assert step["with"]["persist-credentials"] is False


def test_models_are_loaded_from_this_machine_and_from_safetensors_alone():
    """A single file has weights only, so diffusers may fetch its configuration."""
    for path in (path for top in ("tome_core", "extension", "comfy_nodes", "demo", "benchmarks")
                 for path in (ROOT / top).rglob("*.py")):  # fmt: skip
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)
                 and getattr(node.func, "attr", None) == "from_pretrained"]  # fmt: skip
        for call in calls:
            given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
            assert given.get("local_files_only") is True and given.get("use_safetensors") is True, path


# Python tells an audit hook, which stays for good, of every file opened, socket made and program started
WATCH = """
import importlib, os, sys
from pathlib import Path
import torch
from tests.host_folders import load_pack
from tests.webui_modules import Modules

REFUSED = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "urllib.")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
host, place, seen = sys.argv[1], Path(sys.argv[2]), []
sys.path.remove("")  # a host would not find us there

def hook(event, args):
    mode, flags = args[1:] if event == "open" else (None, None)
    if event.startswith(REFUSED) or set(mode or "") & set("wax+") or (flags or 0) & WRITES:
        seen.append(f"{event} {args!r}")

sys.addaudithook(hook)
if host == "comfyui":
    folder, package = place / "comfy_nodes", load_pack(place).__name__ + ".comfy_nodes"
else:
    modules = Modules(dict.__setitem__)
    modules.put("gradio").__getattr__ = lambda name: type(name, (), {})
    modules.put("gradio.context", Context=None)
    modules.start(place)
    folder, package = place / "extension", "_tome_core_webui.extension"
for file in sorted(folder.glob("[a-z]*.py")):  # what a host leaves for later too
    importlib.import_module(f"{package}.{file.stem}")
sys.exit(str(seen) if seen else 0)
"""


@pytest.mark.parametrize("host", [install_hosts.WEBUI, install_hosts.COMFYUI], ids=lambda host: host.name)
def test_an_import_in_a_host_writes_nothing_and_starts_no_socket_and_no_program(host, tmp_path):
    install_hosts.put(host, tmp_path / "tome_core", copy=True)
    command = [sys.executable, "-B", "-c", WATCH, host.command, str(tmp_path / "tome_core")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
