"""Nothing of ours opens a pickle or a socket, few files start programs, and an import in a host stays at home."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import install_hosts
from tests.checkout import tracked

ROOT = Path(__file__).parents[2]
SHIPPED = ("tome_core", "extension", "comfy_nodes", "scripts", "demo", "benchmarks")
# modules that open sockets, and modules whose reading of a file can run what is in it
NETWORK = {"socket", "socketserver", "ssl", "urllib", "urllib3", "http", "requests", "httpx", "aiohttp", "ftplib",
           "smtplib", "poplib", "imaplib", "telnetlib", "xmlrpc", "webbrowser", "websocket", "websockets",
           "huggingface_hub"}  # fmt: skip
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "pickletools"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
# calls that load a pickle, and the keyword without which they do
SAFE_WITH = {"torch.load": [("weights_only", True)], "np.load": [("allow_pickle", False)],
             "numpy.load": [("allow_pickle", False)]}  # fmt: skip
REFUSED = {"torch.save", "torch.hub.load", "torch.hub.download_url_to_file", "torch.hub.load_state_dict_from_url",
           "torch.package", "pandas.read_pickle"}  # fmt: skip
# methods of diffusers and transformers, which may download, or open a pickle
FROM_A_HUB = {"from_pretrained": [("local_files_only", True), ("use_safetensors", True)],
              "from_single_file": [("local_files_only", True)]}  # fmt: skip
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
    if isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
        return [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return []


def offences(tree: ast.AST) -> Iterator[str]:
    """What a parsed file does although it is refused above."""
    for node in ast.walk(tree):
        for name in imported(node):
            if name.split(".")[0] in NETWORK | PICKLES or name in REFUSED | set(SAFE_WITH):
                yield f"imports {name}"
        if not isinstance(node, ast.Call):
            continue
        name, given = dotted(node.func), {one.arg: one.value for one in node.keywords}
        if name in RUNS_TEXT or name in REFUSED:
            yield f"calls {name}"
        last = name.rpartition(".")[2]
        for keyword, value in (*SAFE_WITH.get(name, ()), *FROM_A_HUB.get(last, ())):
            if getattr(given.get(keyword), "value", None) is not value:
                yield f"{last} without {keyword}={value}"


# --- what our code may import -----------------------------------------------------------------------------------------


def test_nothing_opens_a_pickle_or_a_socket_and_programs_are_started_for_known_reasons_only():
    known = tracked() or [path.relative_to(ROOT) for top in SHIPPED for path in (ROOT / top).rglob("*.py")]
    for path in (path for path in known if path.suffix == ".py" and path.parts[0] != "tests"):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert set(offences(tree)) == {offence for file, offence in ALLOWED if file == path.as_posix()}, path
        names = {name for node in ast.walk(tree) for name in imported(node)}
        calls = {dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        starts = "subprocess" in names or bool(calls & {"os.system", "os.popen", "os.execv", "os.spawnv"})
        assert starts <= (path.as_posix() in STARTS_PROGRAMS), f"{path} starts programs; say why in STARTS_PROGRAMS"


def test_the_law_sees_each_way_and_lets_others_pass():
    for line in ("import pickle", "from urllib.request import urlopen", "import http.client", "import_module('socket')",
                 "importlib.import_module('requests.api')", "torch.load(path)", "torch.load(path, weights_only=False)",
                 "from torch import load", "np.load(path, allow_pickle=True)", "torch.save(state, path)", "exec(text)",
                 "__import__('os')", "P.from_pretrained(path)", "x.from_single_file(path, local_files_only=given)",
                 "from torch import hub, package", "from torch.hub import load"):  # fmt: skip
        assert list(offences(ast.parse(line))), line
    for line in ("torch.load(path, weights_only=True)", "model.eval()", "made().eval()", "re.compile(text)",
                 "torch.compile(model)", "import copy", "from .http import x",
                 "P.from_pretrained(path, local_files_only=True, use_safetensors=True)"):  # fmt: skip
        assert not list(offences(ast.parse(line))), line


# --- what an import does ----------------------------------------------------------------------------------------------

# lines that do what an import must not do
PLANTED = """
open({elsewhere!r}).close()
open(__file__ + ".log", "w").close()
import socket; socket.socket().close()
import subprocess, sys; subprocess.run([sys.executable, "--version"], capture_output=True)
"""


def watched(host: install_hosts.Host, folder: Path, planted: str = "") -> dict[str, list[str]]:
    """What happens while a host imports a copy of us; a module of ours begins with the planted lines."""
    place = folder / host.place / install_hosts.NAME
    place.parent.mkdir(parents=True)
    install_hosts.put(host, place, copy=True)
    file = place / "tome_core" / "compiling.py"
    file.write_text(file.read_text(encoding="utf-8") + planted, encoding="utf-8")
    command = [sys.executable, "-B", "-m", "tests.import_watch", host.command, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("host", [install_hosts.WEBUI, install_hosts.COMFYUI], ids=lambda host: host.name)
def test_an_import_stays_at_home(host, tmp_path):
    """No socket, no program, no file but our own and those of Python and its packages; nothing is written."""
    seen = watched(host, tmp_path)
    assert any(Path(path).name == "bipartite.py" for path in seen["own"]), "the import was not watched"
    assert seen["outside"] == [] and seen["written"] == [] and seen["refused"] == []


def test_the_watch_sees_an_import_that_does_not(tmp_path):
    elsewhere = tmp_path.resolve() / "secret.txt"
    elsewhere.touch()
    seen = watched(install_hosts.WEBUI, tmp_path / "host", PLANTED.format(elsewhere=str(elsewhere)))
    assert str(elsewhere) in seen["outside"] and any(path.endswith("compiling.py.log") for path in seen["written"])
    assert {event.split()[0] for event in seen["refused"]} >= {"socket.__new__", "subprocess.Popen"}
