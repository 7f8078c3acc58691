"""A real ComfyUI on a free port of this machine, with models, packs and outputs in a folder of the tests."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gradio_panel.serving import OPENER, free_port, running

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
WORKFLOWS = ("txt2img", "sdxl", "hires_fix", "easycache")


def workflow(name: str) -> dict:
    return json.loads((ROOT / "example_workflows" / f"{name}.json").read_text(encoding="utf-8"))


class Comfy:
    """The running server; each `graph` is in ComfyUI's API format."""

    def __init__(self, port: int, log: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log

    def ask(self, path: str, body: Any = None) -> Any:
        """The answer to a GET, or with a body to a POST."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with OPENER.open(request, timeout=60) as answer:
            text = answer.read().decode()
        try:
            return json.loads(text) if text else None
        except json.JSONDecodeError:
            return text

    def queue(self, graph: dict) -> str:
        """Post a graph; AssertionError with ComfyUI's reason if it refuses."""
        try:
            return self.ask("/prompt", {"prompt": graph})["prompt_id"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error

    def run(self, graph: dict) -> dict:
        """Run the graph, without a time limit; return the probe's results and the history."""
        self.ask("/tome_test/clear")
        prompt = self.queue(graph)
        while not (history := self.ask(f"/history/{prompt}")):
            time.sleep(0.1)
        return {**self.ask("/tome_test/state"), "history": history[prompt]}

    def good(self, graph: dict) -> dict:
        """`run`, for a graph that has to succeed."""
        seen = self.run(graph)
        assert seen["history"]["status"]["status_str"] == "success", seen["history"]["status"]["messages"]
        assert all(latent["finite"] for latent in seen["latents"].values())
        return seen

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            self.ask("/system_stats")
            return True
        return False


def host_python() -> str:
    return os.environ.get("COMFYUI_PYTHON", sys.executable)


def run_script(checkout: Path, script: str, *arguments: object) -> str:
    """Run a script of this folder by ComfyUI's Python, and return its output; AssertionError if it fails."""
    command = [host_python(), str(HERE / script), *map(str, arguments)]
    variables = {**environment(), "PYTHONPATH": f"{checkout.resolve()}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def make_base(checkout: Path, folder: Path, models: Path | None = None) -> None:
    """Fill a folder with models, our pack and the probe pack. models: the models' folder of another base."""
    for name in ("custom_nodes", "input", "output", "temp", "user"):
        (folder / name).mkdir()
    shutil.copytree(HERE / "probe_pack", folder / "custom_nodes" / "probe_pack")
    (folder / "custom_nodes" / "tome-core.v1").symlink_to(ROOT.resolve(), target_is_directory=True)
    if models is None:
        run_script(checkout, "make_models.py", "graphs", folder / "models")
    else:
        (folder / "models").symlink_to(models, target_is_directory=True)


@contextlib.contextmanager
def serve(checkout: Path, base: Path) -> Iterator[Comfy]:
    """Start the checkout's server on a folder, wait until it answers, and stop it at the end."""
    port = free_port()
    command = [host_python(), "main.py", "--cpu", "--listen", "127.0.0.1", "--port", str(port), "--disable-auto-launch",
               "--disable-api-nodes", "--use-pytorch-cross-attention", "--base-directory", str(base)]  # fmt: skip
    comfy = Comfy(port, base / "server.log")
    with running(command, comfy.log, comfy.answers, cwd=checkout, env=environment()):
        yield comfy


def environment() -> dict[str, str]:
    # one thread: equal bits are expected, and they depend on how sums are split
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
