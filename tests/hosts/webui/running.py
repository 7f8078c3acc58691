"""A real webui on a free port of this machine, with settings, extensions and pictures in a folder of the tests."""

import base64
import contextlib
import io
import json
import os
import re
import shlex
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from tests.gradio_panel.serving import OPENER, free_port, running
from tests.host_doubles.webuis import custom, merged_tokens

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
QUIET = {"live_previews_enable": False, "show_progressbar": False, "samples_save": False, "grid_save": False,
         "sd_vae": "None", "sd_model_checkpoint": "first.safetensors"}  # fmt: skip
# what tests override: A1111 1.10 puts back after a request only those settings that were saved once
OVERRIDDEN = {"token_merging_ratio": 0.0, "batch_cond_uncond": True, "hypertile_enable_unet": False,
              "hypertile_enable_unet_secondpass": False, "ad_script_names": ""}  # fmt: skip
START = ["--skip-torch-cuda-test", "--do-not-download-clip", "--no-download-sd-model", "--skip-version-check",
         "--skip-install", "--skip-python-version-check", "--skip-prepare-environment",
         "--disable-console-progressbars", "--api"]  # fmt: skip
FOR_CPU = {"a1111": "--no-half --precision full --use-cpu all",
           **dict.fromkeys(("forge", "reforge"), "--always-cpu --attention-pytorch --all-in-fp32")}  # fmt: skip
HALF = custom(0.5)  # half of all tokens, the engine's default, however small the picture
SAVED = "% less work"  # in a line from `Twins.law`, in any model and size
ASKED = "strength 0.5, own settings"  # the beginning of our line
# a picture with as many tokens as a strength needs: on a CPU fewer than elsewhere
PAYING = dict.fromkeys(("width", "height"), 512 if "WEBUI_FLAGS" in os.environ else 256)
TWICE = {name: 2 * size for name, size in PAYING.items()}  # here a level at half the latent's size pays too

# a picture for image to image
FILE = io.BytesIO()
Image.linear_gradient("L").rotate(30).resize((128, 128)).convert("RGB").save(FILE, "PNG")
PICTURE = base64.b64encode(FILE.getvalue()).decode()


class Picture(NamedTuple):
    """all: the pixels of every image; facts: what the API says about them."""

    all: tuple[bytes, ...]
    facts: dict

    pixels = property(lambda self: self.all[0])
    infotext = property(lambda self: self.facts["infotexts"][0])
    ours = property(lambda self: [pair for pair in re.split(", |\n", self.infotext) if pair.startswith("ToMe")])
    report = property(lambda self: self.facts["extra_generation_params"]["ToMe report"])
    merged = property(lambda self: merged_tokens(self.facts["extra_generation_params"]))


def kind_of(checkout: Path) -> str:
    if not (checkout / "modules_forge").exists():
        return "a1111"
    return "forge" if (checkout / "backend").exists() else "reforge"


class Webui:
    """The running server, with a log and a memory of pictures."""

    def __init__(self, port: int, log: Path, kind: str) -> None:
        self.url, self.log, self.kind = f"http://127.0.0.1:{port}", log, kind
        self.drawn: dict[str, Picture] = {}

    def ask(self, path: str, body: Any = None) -> Any:
        """The answer to a GET, or with a body to a POST, however long it takes."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with OPENER.open(request) as answer:
            return json.loads(answer.read() or "null")

    def draw(self, *args: Any, hires: bool = False, path: str = "txt2img", **more: Any) -> Picture:
        """Draw a small picture. args: those of our script, left out if there are none."""
        body = {"prompt": "a lake", "seed": 42, "steps": 3, "width": 128, "height": 128, "sampler_name": "Euler",
                "cfg_scale": 7, "save_images": False, **more}  # fmt: skip
        if hires:
            body |= {"enable_hr": True, "hr_scale": 1.5, "hr_second_pass_steps": 2, "hr_upscaler": "Latent",
                     "denoising_strength": 0.7}  # fmt: skip
            if self.kind != "a1111":
                body |= {"hr_additional_modules": ["Use same choices"], "hr_cfg": 7}
        if args:
            others = body.get("alwayson_scripts", {})
            body["alwayson_scripts"] = {**others, "Token Merging (ToMe)": {"args": list(args)}}
        answer = self.ask(f"/sdapi/v1/{path}", body)
        images = (Image.open(io.BytesIO(base64.b64decode(image))) for image in answer["images"])
        return Picture(tuple(image.convert("RGB").tobytes() for image in images), json.loads(answer["info"]))

    def draw_once(self, **job: Any) -> Picture:
        """Draw, or return the same picture again: drawing takes seconds, and many tests need equal pictures."""
        key = json.dumps(job)
        if key not in self.drawn:
            self.drawn[key] = self.draw(**job)
        return self.drawn[key]

    def choose(self, **options: Any) -> str:
        """Change settings as the settings tab does; return the log of it. Pictures from before do not count."""
        start = len(self.log_text())
        self.ask("/sdapi/v1/options", options)
        self.drawn.clear()
        return self.log_text(start)

    def state(self) -> dict:
        """The probe extension's record since the last call."""
        return self.ask("/tome_test/state")

    def log_text(self, start: int = 0) -> str:
        return self.log.read_text(errors="replace")[start:]

    def our_lines(self, start: int = 0) -> list[str]:
        lines = self.log_text(start).splitlines()
        return [line.removeprefix("ToMe: ") for line in lines if line.startswith("ToMe: ")]


class Twins(NamedTuple):
    """Two servers with the same options; ``webui`` has our extension as well."""

    without: Webui
    webui: Webui

    def law(self, *args: Any, merges: bool = True, **job: Any) -> str:
        """Assert that it merges with `args`, that off again it draws as without us, with no trace.

        Return our line, without the share of the work that was left out, which depends on model and size.
        """
        expected = self.without.draw_once(**job)
        start = len(self.webui.log_text())
        on = self.webui.draw(*args, **job)
        assert (on.pixels != expected.pixels) is merges
        lines = self.webui.our_lines(start)
        assert self.webui.draw(**job).all == expected.all, "off is not the webui without us"
        assert self.webui.state()["patched"] == 0
        assert "Error running" not in self.webui.log_text(start)
        return re.sub(r"\d+(?=% less work)", "", lines[-1])


@contextlib.contextmanager
def serve_twins(checkout: Path, checkpoints: Path, folder: Path, *options: str,
                extensions: Sequence[Path] = ()) -> Iterator[Twins]:  # fmt: skip
    """Start the same server without and with our extension."""
    with contextlib.ExitStack() as both:
        yield Twins(*(both.enter_context(_serve(checkout, checkpoints, folder / name, [*extensions, *more], *options))
                      for name, more in (("without", []), ("with", [ROOT]))))  # fmt: skip


@contextlib.contextmanager
def _serve(checkout: Path, checkpoints: Path, folder: Path, extensions: Sequence[Path],
           *options: str) -> Iterator[Webui]:  # fmt: skip
    """Start the checkout's server on a data folder, wait until it is ready, and stop it at the end."""
    kind, port = kind_of(checkout), free_port()
    (folder / "extensions").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**QUIET, **OVERRIDDEN}))
    for extension in (*extensions, HERE / "probe"):
        name = "tome_core" if extension == ROOT else extension.name
        (folder / "extensions" / name).symlink_to(extension, target_is_directory=True)
    known = (checkout / "modules" / "cmd_args.py").read_text()  # forks drop flags, and end at one they do not know
    # Forge Neo takes the first checkpoint from its settings
    models = ["--ckpt-dir", checkpoints, "--ckpt", checkpoints / "first.safetensors"] if '"--ckpt"' in known \
        else ["--ckpt-dirs", checkpoints]  # fmt: skip
    command = [
        os.environ.get("WEBUI_PYTHON", sys.executable), "launch.py", *(flag for flag in START if f'"{flag}"' in known),
        *shlex.split(os.environ.get("WEBUI_FLAGS", FOR_CPU[kind])), "--port", str(port), "--data-dir", str(folder),
        *map(str, models), *options,
        "--gradio-allowed-path", str(checkout),  # Forge serves its own scripts from its data folder alone
    ]  # fmt: skip
    # one thread: equal bits are expected, and they depend on how sums are split
    more = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
            "GRADIO_ANALYTICS_ENABLED": "False", "SD_WEBUI_RESTARTING": "1", "no_proxy": "*"}  # fmt: skip
    kept = {key: value for key, value in os.environ.items() if key not in ("COMMANDLINE_ARGS", "PYTHONPATH")}
    webui = Webui(port, folder / "server.log", kind)
    # the log shows it: a request before this line breaks the start of A1111 1.10
    with running(command, webui.log, lambda: "Startup time" in webui.log_text(), cwd=checkout, env={**kept, **more}):
        webui.ask("/sdapi/v1/options")
        yield webui
