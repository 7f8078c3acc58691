"""Nothing of ours opens a pickle or a socket, few files start programs, and an import in a host writes nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import install_hosts

ROOT = Path(__file__).parents[2]
SHIPPED = ("tome_core", "extension", "comfy_nodes", "scripts", "demo", "benchmarks")
# modules that open sockets, and modules whose reading of a file can run what is in it
NETWORK = {"socket", "socketserver", "ssl", "urllib", "urllib3", "http", "requests", "httpx", "aiohttp", "ftplib",
           "smtplib", "xmlrpc", "webbrowser", "websocket", "websockets", "huggingface_hub"}  # fmt: skip
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
REFUSED = {"eval", "exec", "compile", "__import__", "torch.save", "torch.hub", "torch.package"}
# calls that load a pickle, or download, and the keyword without which they do
SAFE_WITH = {"load": [("weights_only", True)], "from_single_file": [("local_files_only", True)],
             "from_pretrained": [("local_files_only", True), ("use_safetensors", True)]}  # fmt: skip
ALLOWED = {
    ("demo/source.py", "from_single_file without local_files_only=True"):
        "a single file of the user's has weights only; diffusers has its configuration, or fetches those text files",
}  # fmt: skip
# other programs that our code starts, each with its reason
STARTS_PROGRAMS = {
    "install.py": "environments, pip, and the command that the user asked for",
    "benchmarks/gpu_laws.py": "the project's own tests of its kernels run in a process of their own",
    "benchmarks/results.py": "asks git for the commit",
    "benchmarks/host_calls.py": "a host's UNet is measured in the host's own Python",
}


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name with attributes; a question mark for another expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def imported(node: ast.AST) -> list[str]:
    """Full names of what a statement, or a call of import_module, imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
        return [value.value for value in node.args if isinstance(value, ast.Constant)]
    return []


def offences(tree: ast.AST) -> Iterator[str]:
    """What a parsed file does although it is refused above."""
    for node in ast.walk(tree):
        for name in imported(node):
            if name.split(".")[0] in NETWORK | PICKLES or name in REFUSED | {"torch.load", "numpy.load"}:
                yield f"imports {name}"
        if not isinstance(node, ast.Call):
            continue
        name, given = dotted(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
        if name in REFUSED or name.startswith("torch.hub."):
            yield f"calls {name}"
        last = name.rpartition(".")[2]
        for keyword, value in SAFE_WITH.get(last, ()) if last != "load" or name == "torch.load" else ():
            if getattr(given.get(keyword), "value", None) is not value:
                yield f"{last} without {keyword}={value}"


def test_nothing_opens_a_pickle_or_a_socket_and_programs_are_started_for_known_reasons_only():
    for path in (*ROOT.glob("*.py"), *(path for top in SHIPPED for path in (ROOT / top).rglob("*.py"))):
        name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
        assert set(offences(tree)) == {offence for file, offence in ALLOWED if file == name}, name
        calls = {dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        starts = calls & {"os.system", "os.popen", "os.execv", "os.spawnv"} or any(
            "subprocess" in imported(node) for node in ast.walk(tree))  # fmt: skip
        assert not starts or name in STARTS_PROGRAMS, f"{name} starts programs; say why in STARTS_PROGRAMS"


# Python tells an audit hook, which stays for good, of every file opened, socket made and program started
WATCH = """
import importlib, json, os, sys
from pathlib import Path
import torch
from tests.comfy_loader import load_pack
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
print(json.dumps(seen))
"""


@pytest.mark.parametrize("host", [install_hosts.WEBUI, install_hosts.COMFYUI], ids=lambda host: host.name)
def test_an_import_in_a_host_writes_nothing_and_starts_no_socket_and_no_program(host, tmp_path):
    install_hosts.put(host, tmp_path / "tome_core", copy=True)
    command = [sys.executable, "-B", "-c", WATCH, host.command, str(tmp_path / "tome_core")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
