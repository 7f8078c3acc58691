"""What happens while a host imports us: ``python -B -m tests.import_watch webui|comfyui FOLDER`` prints it as JSON.

Python tells an audit hook of every file opened, socket made and program started. The webui's modules and gradio are
doubles; torch is real and was there before us, as in a host.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import sysconfig
from pathlib import Path

import torch

from tests.comfy_loader import load_pack
from tests.webui_modules import Modules

REFUSED = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.spawn", "os.posix_spawn", "os.startfile",
           "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.", "pickle.", "marshal.dump")  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def libraries() -> list[Path]:
    """Where Python and its packages are."""
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    beside_torch = Path(torch.__file__).parents[1]  # in an environment that borrows it from another
    folders = [*(Path(paths[name]) for name in names), Path(sys.base_prefix, "lib"), beside_torch]
    return [folder.resolve() for folder in folders]


def watch(place: Path) -> dict[str, list[str]]:
    """From now on, and for good, what happens is noted in the lists of the returned dict."""
    seen: dict[str, list[str]] = {name: [] for name in ("own", "outside", "written", "refused")}
    ours, known = place.resolve(), libraries()

    def opened(path: object, mode: str | None, flags: int) -> None:
        if isinstance(path, int):  # a file that is open already
            return
        where = Path(os.fsdecode(path)).absolute().resolve()
        if flags & WRITES or set(mode or "") & set("wax+"):
            seen["written"].append(str(where))
        elif where.is_relative_to(ours):
            seen["own"].append(str(where))
        elif not any(where.is_relative_to(folder) for folder in known):
            seen["outside"].append(str(where))

    def hook(event: str, args: tuple) -> None:
        if event == "open":
            opened(*args)
        elif event.startswith(REFUSED):
            seen["refused"].append(f"{event} {args!r}"[:200])

    sys.addaudithook(hook)
    return seen


def webui(place: Path) -> None:
    """A webui's start: the shim is run, and the settings are asked for; then what it leaves for later."""
    modules = Modules(dict.__setitem__)
    gradio = modules.put("gradio")
    gradio.__getattr__ = lambda name: type(name, (), {})
    modules.put("gradio.context", Context=None)
    modules.start(place)
    import_all(place / "extension", "_tome_core_webui.extension")


def comfyui(place: Path) -> None:
    """ComfyUI's loader; then what the pack leaves for later."""
    pack = load_pack(place)
    import_all(place / "comfy_nodes", f"{pack.__name__}.comfy_nodes")


def import_all(folder: Path, package: str) -> None:
    """Every module of a package of ours."""
    for file in sorted(folder.glob("*.py")):
        importlib.import_module(f"{package}.{file.stem}" if file.stem != "__init__" else package)


if __name__ == "__main__":
    host, place = sys.argv[1], Path(sys.argv[2])
    sys.path.remove(os.getcwd())  # a host would not find us there
    found = watch(place)
    {"webui": webui, "comfyui": comfyui}[host](place)
    print(json.dumps(found))
