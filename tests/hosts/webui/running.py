"""A real webui on a free port of this machine, its settings, extensions and pictures in a folder of the tests' own."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shlex
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from tests.gradio_panel.serving import OPENER, free_port, running
from tests.hosts.webui.make_checkpoint import make_hypernetwork
from tests.webui_doubles import custom, merged_tokens

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
QUIET = {"live_previews_enable": False, "show_progressbar": False, "samples_save": False, "grid_save": False,
         "sd_vae": "None", "sd_model_checkpoint": "first.safetensors"}  # fmt: skip
# what tests override: A1111 1.10 puts back after a request only those settings that were saved once
OVERRIDDEN = {"token_merging_ratio": 0.0, "batch_cond_uncond": True, "skip_early_cond": 0.0,
              "hypertile_enable_unet": False, "hypertile_enable_unet_secondpass": False,
              "ad_script_names": ""}  # fmt: skip
QUICK = {name: ["sd_model_checkpoint", "tome_enabled", "tome_strength"]
         for name in ("quicksettings_list", "quick_setting_list")}  # fmt: skip  # the second in Forge
START = [
    "--skip-torch-cuda-test", "--do-not-download-clip", "--no-download-sd-model", "--skip-version-check",
    "--skip-install", "--skip-python-version-check", "--skip-prepare-environment", "--disable-console-progressbars",
    "--api",
]  # fmt: skip
ON_CPU = "WEBUI_FLAGS" not in os.environ
HALF = custom(0.5)  # of all tokens, as the engine's own defaults have it, however small the picture
_FORGE = (Path(os.environ.get("WEBUI_DIR", HERE)) / "backend").exists()
# by that: three quarters at the finest level, and nothing below it, where Forge has an attention more
SAVED = f"{69 if _FORGE else 70}% of attention left out"
ASKED = "strength 0.5, own settings"  # as what it came to begins
# a picture with as many tokens as a strength asks for: on a CPU fewer than elsewhere
PAYING = dict.fromkeys(("width", "height"), 256 if ON_CPU else 512)
TWICE = {name: 2 * size for name, size in PAYING.items()}  # where a level at half the latent's size pays too
ON_A_CPU = {
    "a1111": "--no-half --precision full --use-cpu all --opt-sdp-attention",
    "forge": "--always-cpu --attention-pytorch --all-in-fp32",
    "reforge": "--always-cpu --attention-pytorch --all-in-fp32",
}


def ours(infotext: str) -> list[str]:
    """What it says of us."""
    return [one for one in infotext.replace("\n", ", ").split(", ") if one.startswith("ToMe")]


class Picture(NamedTuple):
    """pixels: of the first image; all: of every image; infotext, facts: what the API says about it."""

    pixels: bytes
    all: tuple[bytes, ...]
    infotext: str
    facts: dict

    @property
    def ours(self) -> list[str]:
        """What the infotext says of us."""
        return ours(self.infotext)

    @property
    def report(self) -> dict:
        """What API callers are told."""
        return self.facts["extra_generation_params"]["ToMe report"]


def kind_of(checkout: Path) -> str:
    """a1111, forge or reforge."""
    if not (checkout / "modules_forge").exists():
        return "a1111"
    return "forge" if (checkout / "backend").exists() else "reforge"


def as_text(image: Image.Image) -> str:
    """A picture for the API."""
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def merged_in(done: Picture, name: str = "first pass") -> list[tuple[int, int]]:
    """`merged_tokens` of what the API is told of a picture."""
    return merged_tokens(done.facts["extra_generation_params"], name)


class Webui:
    """The server."""

    def __init__(self, port: int, log: Path, kind: str) -> None:
        self.url, self.log, self.kind = f"http://127.0.0.1:{port}", log, kind
        self.drawn: dict[str, Picture] = {}

    def ask(self, path: str, body: Any = None, raw: tuple[str, str] = ("", "")) -> Any:
        """The answer to a GET, or with a body to a POST, however long it takes. raw: put into its JSON, in place of."""
        data = None if body is None else json.dumps(body).replace(*raw).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with OPENER.open(request) as answer:
            return json.loads(answer.read() or "null")

    def draw(self, *args: Any, hires: bool = False, path: str = "txt2img", raw: tuple[str, str] = ("", ""),
             **more: Any) -> Picture:
        """A small picture; args: of our script, left out where there are none. raw: as of `ask`."""
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
        answer = self.ask(f"/sdapi/v1/{path}", body, raw)
        facts = json.loads(answer["info"])
        found = tuple(Image.open(io.BytesIO(base64.b64decode(one))).convert("RGB").tobytes()
                      for one in answer["images"])  # fmt: skip
        return Picture(found[0], found, facts["infotexts"][0], facts)

    def draw_once(self, **job: Any) -> Picture:
        """The same, remembered: a picture takes seconds, and many tests ask for the same one."""
        key = json.dumps(job)
        if key not in self.drawn:
            self.drawn[key] = self.draw(**job)
        return self.drawn[key]

    def info_of(self, script: str) -> dict:
        """What the API tells of a script in txt2img."""
        told = self.ask("/sdapi/v1/script-info")
        (info,) = [one for one in told if one["name"] == script and not one["is_img2img"]]
        return info

    def values_of(self, script: str, **changes: Any) -> list:
        """A script's arguments for the API: its defaults, but for ``changes``, by label with _ for spaces.

        Labels that occur twice mean their first.
        """
        info = self.info_of(script)["args"]
        labels, values = [(one["label"] or "").replace(" ", "_") for one in info], [one["value"] for one in info]
        for label, value in changes.items():
            values[labels.index(label)] = value
        return values

    def state(self) -> dict:
        """What the probe extension saw since the last call."""
        return self.ask("/tome_test/state")

    def has_started(self) -> bool:
        """By the log: a request before this line breaks the start of A1111 1.10."""
        return "Startup time" in self.said()

    def said(self, start: int = 0) -> str:
        """The log from a position on."""
        return self.log.read_text(errors="replace")[start:]

    def told(self, start: int) -> list[str]:
        """Our own lines in the log from a position on."""
        return [line.partition("ToMe: ")[2] for line in self.said(start).splitlines() if line.startswith("ToMe: ")]


@contextlib.contextmanager
def serve(
    checkout: Path, checkpoints: Path, folder: Path, with_us: bool, *options: str, extensions: Sequence[Path] = ()
) -> Iterator[Webui]:
    """Start the checkout's server on a data folder, wait until it is ready, and stop it at the end."""
    kind = kind_of(checkout)
    port = free_port()
    _fill(folder, with_us, extensions)
    flags = shlex.split(os.environ.get("WEBUI_FLAGS", ON_A_CPU[kind]))
    command = [
        os.environ.get("WEBUI_PYTHON", sys.executable), "launch.py", *_known_to(checkout, START), *flags,
        "--port", str(port), "--data-dir", str(folder), *_checkpoints(checkout, checkpoints),
        "--gradio-allowed-path", str(checkout), *options,  # Forge serves its own scripts from its data folder alone
    ]  # fmt: skip
    webui = Webui(port, folder / "server.log", kind)
    with running(command, webui.log, webui.has_started, cwd=checkout, env=environment()):
        webui.ask("/sdapi/v1/options")
        yield webui


def _known_to(checkout: Path, flags: Sequence[str]) -> list[str]:
    """Those that its sources know: forks drop some, and end at one that they do not know."""
    known = (checkout / "modules" / "cmd_args.py").read_text()
    return [flag for flag in flags if f'"{flag}"' in known]


def _checkpoints(checkout: Path, folder: Path) -> list[str]:
    """Where they are, and which is the first to be loaded; Forge Neo takes that from its settings."""
    if not _known_to(checkout, ["--ckpt"]):
        return ["--ckpt-dirs", str(folder)]
    return ["--ckpt-dir", str(folder), "--ckpt", str(folder / "first.safetensors")]


def _fill(folder: Path, with_us: bool, extensions: Sequence[Path]) -> None:
    (folder / "extensions").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**QUIET, **OVERRIDDEN, **(QUICK if with_us else {})}))
    make_hypernetwork(folder / "models" / "hypernetworks" / "small.pt")
    for one in extensions:
        (folder / "extensions" / one.name).symlink_to(one, target_is_directory=True)
    (folder / "extensions" / "probe").symlink_to(HERE / "probe", target_is_directory=True)
    if with_us:
        (folder / "extensions" / "tome_core").symlink_to(ROOT, target_is_directory=True)


def environment() -> dict[str, str]:
    """What the checkout's processes see."""
    # one thread: equal bits are asked for, and they depend on how sums are split
    more = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
            "GRADIO_ANALYTICS_ENABLED": "False", "SD_WEBUI_RESTARTING": "1", "no_proxy": "*"}  # fmt: skip
    kept = {key: value for key, value in os.environ.items() if key not in ("COMMANDLINE_ARGS", "PYTHONPATH")}
    return {**kept, **more}
