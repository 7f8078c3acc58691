"""Every command and every piece of Python on the pages runs: in a fresh copy of the project, at its smallest."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import install
from tests import checkout
from tests.samplings import pipeline_of

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))), "demo/README.md",
         "CONTRIBUTING.md")  # fmt: skip
ONE_MODEL = "--model demo/scenes128.safetensors"
FRONT = "benchmarks/results/front-cpu-2026-11-22.json"
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MPS = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")
GPUS = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
HOSTS = tuple((name, os.environ.get(f"{name}_DIR", "")) for name in ("COMFYUI", "WEBUI"))
COMFYUI = pytest.mark.skipif(not HOSTS[0][1], reason="needs a ComfyUI checkout: set COMFYUI_DIR")
BOTH = pytest.mark.skipif(not all(dict(HOSTS).values()), reason="needs COMFYUI_DIR and WEBUI_DIR")


class Way(NamedTuple):
    """How a command is run here. fill: what stands for its placeholders; more: options that keep it short, which
    outweigh those before them; {new} is an empty folder.
    """

    more: str = ""
    fill: tuple[tuple[str, str], ...] = ()
    needs: pytest.MarkDecorator | None = None


FEW_MINUTES = "--minutes 0.02"
TO = "--output {new}/result.json"
SMALL = f"{ONE_MODEL} {TO}"
SHORT_TRAINING = "--minutes 0.05 --batch 2 --state {new}/state.safetensors --output {new}/model.safetensors"
SHORT_CALLS = f"--smoke --sizes 64 --rounds 1 --attention NAMES {TO}"
WAYS = {
    "python install.py demo": Way("--pictures 1 --steps 1 --device cpu --output {new}/comparison.png"),
    "python install.py demo --output demo/demo.png": Way("--strength 0.5 --steps 1 --device cpu --output {new}/a.png"),
    "python install.py webui DIR": Way(fill=(("DIR", "{new}/webui"),)),
    "python install.py comfyui DIR": Way(fill=(("DIR", "{new}/comfyui"),)),
    "python install.py gpu": Way(f"{FEW_MINUTES} --output {{new}}/gpu"),
    "python -m benchmarks.gpu": Way(f"{FEW_MINUTES} --output {{new}}/gpu"),
    "python -m benchmarks.gpu --minutes 30 --output FOLDER": Way(FEW_MINUTES, (("FOLDER", "{new}/gpu"),)),
    "python -m benchmarks.report FILE...": Way(fill=(("FILE...", "{new}/front.json"),)),
    "python -m benchmarks.cases": Way(f"--cases '1 step' --pictures 1 {SMALL}"),
    "python -m benchmarks.cases --list": Way(),
    "python -m benchmarks.strength RESULT.json...": Way(fill=(("RESULT.json...", FRONT),)),
    "python -m benchmarks.quality": Way(f"--variants tomesd-0.5 --noised 2 --pictures 1 --steps 1 {SMALL}"),
    "python -m benchmarks.quality --smallest": Way(SMALL),
    "python -m benchmarks.quality --smallest --device mps": Way(ONE_MODEL, needs=MPS),
    "python -m benchmarks.quality --for choose": Way("--list"),
    "python -m benchmarks.quality --list": Way(),
    "python -m benchmarks.quality --variants NAME": Way("--list", (("NAME", "sized-0.5"),)),
    "python -m benchmarks.quality --model DIR": Way(
        f"--smallest --prompts {{new}}/prompts.txt --pictures 1 {TO}", (("DIR", "{pipeline}"),)
    ),
    "python -m benchmarks.quality --model DIR_OR_FILE --prompts prompts.txt --pictures 32": Way(
        f"--smallest --pictures 1 {TO}", (("DIR_OR_FILE", "{pipeline}"), ("prompts.txt", "{new}/prompts.txt")),
    ),
    "torchrun --nproc-per-node 2 -m benchmarks.quality --output ...": Way(
        f"--smallest {ONE_MODEL}", (("...", "{new}/quality.json"),)
    ),
    "accelerate launch --multi_gpu --num_processes 4 -m benchmarks.quality --output result.json --model ...": Way(
        "--smallest", (("...", "demo/scenes128.safetensors"),), GPUS
    ),
    "python -m benchmarks.host_calls": Way(SHORT_CALLS.replace("NAMES", "comfyui"), needs=COMFYUI),
    "python -m benchmarks.host_calls --comfyui COMFYUI --webui WEBUI": Way(
        SHORT_CALLS.replace("NAMES", "comfyui webui-sdp"), HOSTS, needs=BOTH
    ),
    "python -m benchmarks.host_calls --comfyui COMFYUI --attention comfyui --sizes 512 --rounds 1": Way(
        SHORT_CALLS.replace("NAMES", "comfyui"), HOSTS, needs=COMFYUI
    ),
    "python -m demo.samples": Way("--steps 1"),
    "python -m demo.eight_bits FILE": Way(fill=(("FILE", "{new}/model.safetensors"),)),
    "python -m demo.train --minutes 600": Way(SHORT_TRAINING),
    "python -m demo.train --minutes 30 --device cuda --batch 64": Way(SHORT_TRAINING, needs=GPU),
    "python -m demo.train --minutes 60 --coarse 0 --crops 0 --keep-heads --start demo/scenes128.safetensors --seed 3":
        Way(SHORT_TRAINING),
    "python -m pytest tests/engine/test_on_cuda.py": Way(),
    "python -m pytest tests/engine/merging/test_plan.py": Way("--collect-only --quiet"),
    "python -m pytest tests/hosts/comfyui": Way(),
    "python -m pytest tests/hosts/webui": Way(),
    "python -m benchmarks.doc_tables --write": Way(),
    "python -m tests.nodedefs": Way(),
    "python -m benchmarks.strength benchmarks/results/front-cpu-2026-11-25.json --compare": Way(),
    "python -m benchmarks.strength --compare benchmarks/results/sdxl-front-cpu-2026-11-24.json": Way(),
    "python -m benchmarks.strength --compare benchmarks/results/transformer-front-cpu-2026-11-24.json": Way(),
    "python -m tests.release --write": Way(),
}
TRAINING = "tests/demo/test_train.py"
JUDGED = ("tests/benchmarks/test_quality_transformers.py", "test_the_command_judges_a_transformer")
# what runs elsewhere: the file that has it run, and how it stands there
ELSEWHERE = {
    "python install.py test": (".github/workflows/ci.yml", "run: python install.py test"),
    **dict.fromkeys(("python install.py test --all", ".ci/run"), (".ci/run", "python3 install.py test --all")),
    **dict.fromkeys(('pip download -d DIR ".[demo]"', "pip download -d DIR numpy tomesd==0.1.3 matplotlib"),
                    ("tests/project/test_install.py", '"download", "-d"')),
    "python install.py page": ("tests/demo/test_page.py", '"install.py"), "page"'),
    "python -m demo.train --layout sdxl --minutes 600 --start demo/scenes128.safetensors":
        (TRAINING, '"--layout", "sdxl"'),
    "python -m demo.train --layout flux --minutes 600 --coarse .6 --crops 0": (TRAINING, "LAYOUTS"),
    "python -m demo.train --layout flux --minutes 600 --coarse 0 --crops 0 --start demo/scenes-flux.safetensors":
        (TRAINING, "LAYOUTS"),
    "python -m demo.train --layout sdxl --minutes 600 --coarse 0 --start demo/scenes-sdxl.safetensors --keep-heads":
        (TRAINING, '"--keep-heads"'),
    "python -m pytest tests/engine/patching/test_patch_contract.py": (
        "tests/engine/patching/test_patch_contract.py", "def test_"
    ),
    "python -m benchmarks.quality --model demo/scenes-sdxl.safetensors --noised 4 --pictures 4": (
        "tests/demo/test_model_layouts.py", "Amounts("
    ),
    "python -m benchmarks.quality --model demo/scenes-flux.safetensors --noised 4 --pictures 2": JUDGED,
    "python -m benchmarks.quality --model demo-output/scenes-flux.safetensors": JUDGED,
    "python -m benchmarks.strength RESULT.json... --layout sdxl": (
        "tests/benchmarks/test_strength.py", '"--layout", layout'
    ),
    "python -m benchmarks.strength RESULT.json... --compare": (JUDGED[0], '"--compare"'),
    "python -m demo.train": (TRAINING, "train.main("),
}  # fmt: skip
PIP = re.compile(r"pip install (?P<what>.*)")


def commands_of(page: str) -> list[str]:
    """The commands a page tells its reader to run, in order; without the map of the code, which describes files."""
    text = (ROOT / page).read_text(encoding="utf-8").split("\n## The map\n")[0]
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
    blocks = [body for language, body in fence.findall(text) if not language]
    lines = [re.sub(r"(^|\s+)#.*$", "", line).strip() for block in blocks for line in block.splitlines()]
    prose = re.sub(r"<!--.*?-->", "", fence.sub("", text))
    quoted = re.findall(r"`((?:\w+=\S+ )*(?:python|pip|torchrun|accelerate)\s[^`]*)`", prose)
    return [" ".join(line.split()) for line in (*lines, *quoted) if line]


COMMANDS = sorted({re.sub(r"\b[A-Z_]+=\.\.\. ", "", command) for page in PAGES for command in commands_of(page)})


def test_the_pages_have_commands_and_each_is_run_somewhere():
    assert "python install.py demo" in COMMANDS and len(COMMANDS) > 25
    known = {*WAYS, *ELSEWHERE, *(command for command in COMMANDS if PIP.fullmatch(command))}
    assert not set(COMMANDS) - known, "give these a way to run in tests/project/test_readme.py"
    assert not known - set(COMMANDS), "no page has these any more"


@pytest.mark.parametrize(("command", "place"), ELSEWHERE.items())
def test_what_runs_elsewhere_stands_there(command, place):
    file, phrase = place
    assert phrase in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [command for command in COMMANDS if PIP.fullmatch(command)])
def test_pip_is_told_to_install_what_the_project_is_tested_with(command):
    told = shlex.split(PIP.fullmatch(command)["what"])
    project = install.read_project(ROOT / "pyproject.toml")
    extras = project["project"]["optional-dependencies"]
    tested = install.requirements(project, ["demo", "benchmarks", "test"])
    no_deps = "tests/requirements-no-deps.txt"
    for one in (one for one in told if not one.startswith("-")):
        if one == no_deps:
            assert "--no-deps" in told
        elif inside := re.fullmatch(r"(?:\.|DIR)(?:\[(.*)\])?", one):  # DIR: a clone of this project
            assert not inside[1] or set(inside[1].split(",")) <= set(extras)
        else:
            assert any(line == one or re.fullmatch(rf"{re.escape(one)}\W.*", line)
                       for line in (*tested, *(ROOT / no_deps).read_text().splitlines())), one  # fmt: skip


@pytest.fixture(scope="module")
def copy(request, tmp_path_factory):
    return checkout.kept(request.config, tmp_path_factory.mktemp("readme"))


GENERATED = (*PAGES, "pyproject.toml", "locales/en/nodeDefs.json")


@pytest.fixture(scope="module")
def before(copy):
    """What is generated, as the copy had it at first."""
    return {name: (copy / name).read_bytes() for name in GENERATED}


@pytest.fixture
def new(tmp_path):
    """A folder with what the placeholders stand for."""
    (tmp_path / "prompts.txt").write_text("a cat\n", encoding="utf-8")
    (tmp_path / "front.json").write_bytes((ROOT / FRONT).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((ROOT / "demo/scenes128.safetensors").read_bytes())
    for name, host in (("webui", install.WEBUI), ("comfyui", install.COMFYUI)):
        for part in host.looked_for[0]:
            (tmp_path / name / part).mkdir(parents=True)
    return tmp_path


def started(command: str, way: Way, places: dict[str, str]) -> list[str]:
    """The command as it is run: with this interpreter, something for each placeholder, and the options to be short."""
    words = shlex.split(command)
    filled = [dict(way.fill).get(word, word).format(**places) for word in words]
    module = {"torchrun": ["-m", "torch.distributed.run"], "accelerate": ["-m", "accelerate.commands.accelerate_cli"]}
    program = module.get(filled[0], [])
    return [sys.executable, *program, *filled[1:], *(word.format(**places) for word in shlex.split(way.more))]


@pytest.mark.slow
@pytest.mark.parametrize("command", [pytest.param(name, marks=way.needs or ()) for name, way in WAYS.items()])
def test_it_runs(command, copy, before, new, tiny_folder):
    places = {"new": str(new), "pipeline": str(tiny_folder)}
    line = started(command, WAYS[command], places)
    done = subprocess.run(line, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout or done.stderr or "--write" in command or "nodedefs" in command


def test_what_the_commands_generate_is_what_the_project_has(copy, before):
    for name in GENERATED:
        assert (copy / name).read_bytes() == before[name], name


def python_of(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = re.findall(r"`(with tome_core\.[^`\n]*)`", text)
    return [*re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M), *(f"import tome_core\n{one}" for one in lines)]


@pytest.mark.parametrize("code", [code for page in PAGES for code in python_of(page)])
def test_the_python_runs_and_leaves_nothing_behind(code, tiny_folder, capsys):
    pipe = pipeline_of(tiny_folder)
    pipe.scheduler.register_to_config(num_train_timesteps=1000)
    exec(code, {"pipe": pipe})
    assert not any("forward" in vars(module) or "_forward" in vars(module) for module in pipe.unet.modules())


def test_the_readme_and_three_pages_show_python():
    assert all(python_of(page) for page in ("README.md", "docs/diffusers.md", "docs/methods.md"))
