"""What our code may reach: the engine needs torch alone, nothing opens a pickle or a socket, imports stay at home."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import install
from install import COMFYUI, WEBUI
from tests.checkout import tracked

ROOT = Path(__file__).parents[2]
SHIPPED = ("tome_core", "extension", "comfy_nodes", "scripts", "demo", "benchmarks")
# modules that open sockets, and modules whose reading of a file can run what is in it
NETWORK = {"socket", "socketserver", "ssl", "urllib", "urllib3", "http", "requests", "httpx", "aiohttp", "ftplib",
           "smtplib", "poplib", "imaplib", "telnetlib", "xmlrpc", "webbrowser", "websocket", "websockets",
           "huggingface_hub"}  # fmt: skip
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "pickletools"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
# loads a pickle unless told otherwise: call, and the keyword that has to be there as written
TELL = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False), "numpy.load": ("allow_pickle", False)}
REFUSED = {"torch.save", "torch.hub.load", "torch.hub.download_url_to_file", "torch.hub.load_state_dict_from_url",
           "torch.package", "pandas.read_pickle"}  # fmt: skip
FROM_A_HUB = {"from_pretrained", "from_single_file"}  # diffusers' and transformers', which may download
ALLOWED = {
    ("demo/source.py", "from_single_file without local_files_only=True"):
        "a single file of the user's has weights only; diffusers has its configuration, or fetches those text files",
    ("demo/source.py", "from_pretrained without local_files_only=True"):
        "given in a dict of options, which the law below reads",
}  # fmt: skip
# other programs that our code starts, each with its reason
STARTS_PROGRAMS = {
    "install.py": "environments, pip, and the command that the user asked for",
    "benchmarks/gpu_laws.py": "the project's own tests of its kernels run in a process of their own",
    "benchmarks/results.py": "asks git for the commit",
    "benchmarks/host_calls.py": "a host's UNet is measured in the host's own Python",
}


def shipped() -> list[Path]:
    """Our Python files but the tests, relative to the root."""
    known = tracked()
    if known is None:
        known = [path.relative_to(ROOT) for top in SHIPPED for path in sorted((ROOT / top).rglob("*.py"))]
    return [path for path in known if path.suffix == ".py" and path.parts[0] != "tests"]


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name with attributes; what is no name is a question mark."""
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
    """What a parsed file does of all that is refused above."""
    for node in ast.walk(tree):
        for name in imported(node):
            if name.split(".")[0] in NETWORK | PICKLES or name in REFUSED | set(TELL):
                yield f"imports {name}"
        if not isinstance(node, ast.Call):
            continue
        name, given = dotted(node.func), {one.arg: one.value for one in node.keywords}
        if name in RUNS_TEXT or name in REFUSED:
            yield f"calls {name}"
        keyword, value = TELL.get(name, (None, None))
        if name.rpartition(".")[2] in FROM_A_HUB:
            keyword, value = "local_files_only", True
        if keyword and getattr(given.get(keyword), "value", None) is not value:
            yield f"{name.rpartition('.')[2]} without {keyword}={value}"


# --- what our code may import -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["__init__.py", "install.py", *SHIPPED])
def test_nothing_opens_a_pickle_or_a_socket_and_other_programs_are_started_for_known_reasons_only(folder):
    for path in (one for one in shipped() if one.parts[0] == folder):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        found, allowed = set(offences(tree)), {what for file, what in ALLOWED if file == path.as_posix()}
        assert found - allowed == set(), path
        assert allowed - found == set(), f"{path}: is allowed and no longer needed"
        names = {name for node in ast.walk(tree) for name in imported(node)}
        calls = {dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        starting = {"os.system", "os.popen", "os.execv", "os.spawnv", "os.startfile"}
        starts = "subprocess" in names or bool(calls & starting)
        assert starts <= (path.as_posix() in STARTS_PROGRAMS), f"{path} starts programs; say why in STARTS_PROGRAMS"


def test_the_demo_opens_a_folder_without_the_hub_and_without_pickles():
    """The options that the allow-list above takes on trust."""
    tree = ast.parse((ROOT / "demo" / "source.py").read_text(encoding="utf-8"))
    options = [{key.value: getattr(value, "value", None) for key, value in zip(node.keys, node.values, strict=True)}
               for node in ast.walk(tree) if isinstance(node, ast.Dict) and node.keys]  # fmt: skip
    assert any(one.get("local_files_only") is True and one.get("use_safetensors") is True for one in options)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loads = [call for call in calls if dotted(call.func).endswith(".from_pretrained")]
    assert loads and all([dotted(one.value) for one in load.keywords] == ["options"] for load in loads)


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from urllib.request import urlopen", "import http.client", "import_module('socket')",
     "importlib.import_module('requests.api')", "torch.load(path)", "torch.load(path, weights_only=False)",
     "from torch import load", "np.load(path, allow_pickle=True)", "torch.save(state, path)", "exec(text)",
     "__import__('os')", "Pipeline.from_pretrained(path)", "x.from_single_file(path, local_files_only=given)",
     "from torch import hub, package", "from torch.hub import load"],
)  # fmt: skip
def test_the_law_sees(line):
    assert list(offences(ast.parse(line)))


def test_the_law_lets_pass():
    for line in ("torch.load(path, weights_only=True)", "model.eval()", "made().eval()", "re.compile(text)",
                 "torch.compile(model)", "import copy", "from .http import x",
                 "P.from_pretrained(path, local_files_only=True)"):  # fmt: skip
        assert not list(offences(ast.parse(line))), line


# --- what an import does ----------------------------------------------------------------------------------------------

HOSTS = {"webui": WEBUI, "comfyui": COMFYUI}


def watched(host: str, place: Path) -> dict[str, list]:
    """What happens while a host imports us from ``place``: files opened outside of it, and everything worse."""
    command = [sys.executable, "-B", "-m", "tests.import_watch", host, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=HOSTS)
def placed(request, tmp_path) -> tuple[str, Path]:
    """A host's name, and the folder in it that holds a copy of us, as install.py makes it."""
    host = HOSTS[request.param]
    folder = tmp_path / "a host" / host.place
    folder.mkdir(parents=True)
    install.put(host, folder / install.NAME, copy=True)
    return request.param, folder / install.NAME


def test_an_import_stays_at_home(placed):
    """No socket, no program, no file but our own and those of Python and its packages; nothing is written."""
    host, place = placed
    seen = watched(host, place)
    assert any(Path(path).name == "bipartite.py" for path in seen["own"]), "the import was not watched"
    assert seen["outside"] == [] and seen["written"] == [] and seen["refused"] == []


PLANTED = {"webui": "extension/wish.py", "comfyui": "comfy_nodes/inputs.py"}
LINES = """
open({elsewhere!r}).close()
open(__file__ + ".log", "w").close()
import socket; socket.socket().close()
import subprocess, sys; subprocess.run([sys.executable, "--version"], capture_output=True)
"""


def test_the_watch_sees_each_of_these(placed):
    """The same import, with lines in it that do what must not be done."""
    host, place = placed
    elsewhere = place.parents[1] / "secret.txt"
    elsewhere.touch()
    file = place / PLANTED[host]
    file.write_text(file.read_text(encoding="utf-8") + LINES.format(elsewhere=str(elsewhere)), encoding="utf-8")
    seen = watched(host, place)
    assert str(elsewhere.resolve()) in seen["outside"]
    assert f"{file.resolve()}.log" in seen["written"]
    assert {one.split()[0] for one in seen["refused"]} >= {"socket.__new__", "subprocess.Popen"}
