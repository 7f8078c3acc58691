"""The commands and the Python of the pages: each command is read by its own program, two of them and all Python run."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import install
from benchmarks import doc_tables
from tests import checkout
from tests.samplings import pipeline_of

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))), "demo/README.md",
         "CONTRIBUTING.md")  # fmt: skip
# programs of install.py whose options are their own
PROGRAMS = {"demo": "demo", "page": "demo.page", "gpu": "benchmarks.gpu"}
NO_DEPS = "tests/requirements-no-deps.txt"


def commands_of(page: str) -> list[str]:
    """The commands a page tells its reader to run, in order; without the map of the code, which describes files."""
    text = (ROOT / page).read_text(encoding="utf-8").split("\n## The map\n")[0]
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
    blocks = [body for language, body in fence.findall(text) if not language]
    lines = [re.sub(r"(^|\s+)#.*$", "", line).strip() for block in blocks for line in block.splitlines()]
    prose = re.sub(r"<!--.*?-->", "", fence.sub("", text))
    quoted = re.findall(r"`((?:\w+=\S+ )*(?:python|pip|torchrun|accelerate)\s[^`]*)`", prose)
    without_settings = (re.sub(r"\b[A-Z_]+=\S+ ", "", line) for line in (*lines, *quoted))
    return [" ".join(line.split()) for line in without_settings if line]


class Read(BaseException):
    """The program has read its command line; it is not to do more."""


def hold_options(module: str, arguments: list[str], monkeypatch) -> None:
    """Let a program read these arguments. It ends with 2 if it does not know them."""
    if not arguments or module == "demo.eight_bits":  # which takes files, and has no parser
        assert importlib.util.find_spec(module)
        return
    plain = argparse.ArgumentParser.parse_args

    def parse(parser, *args, **kwargs):
        plain(parser, *args, **kwargs)
        raise Read

    with mock.patch.dict(os.environ), monkeypatch.context() as context, pytest.raises(Read):
        context.setattr(argparse.ArgumentParser, "parse_args", parse)
        context.setattr(sys, "argv", [module, *arguments])
        context.delitem(sys.modules, module, raising=False)  # runpy warns of a module that is imported already
        runpy.run_module(module, run_name="__main__")


def hold_pip(words: list[str]) -> None:
    """What pip is told to install, or to download, is what the project is tested with."""
    project = install.read_project(ROOT / "pyproject.toml")
    tested = install.requirements(project, ["demo", "benchmarks", "test"])
    tested += (ROOT / NO_DEPS).read_text(encoding="utf-8").splitlines()
    for word in (word for word in words if not word.startswith("-") and word != "DIR"):
        if word == NO_DEPS:
            assert "--no-deps" in words
        elif inside := re.fullmatch(r"(?:\.|DIR)\[(.*)\]|\.", word):  # DIR: a clone of this project
            assert set((inside[1] or "demo").split(",")) <= set(project["project"]["optional-dependencies"])
        else:
            assert any(re.fullmatch(rf"{re.escape(word)}(\W.*)?", line) for line in tested), word


def hold(command: str, monkeypatch) -> None:
    """A command of the pages can be typed as it stands there, but for what its placeholders stand for."""
    words = shlex.split(command)
    if words[0] == "pip":
        hold_pip(words[2:])
    elif "-m" in words:
        module, *arguments = words[words.index("-m") + 1:]
        if module == "pytest":
            assert all((ROOT / word).exists() for word in arguments if not word.startswith("-"))
        else:
            hold_options(module, arguments, monkeypatch)
    elif words[:2] == ["python", "install.py"]:
        name, *arguments = words[2:]
        assert name in install.COMMANDS
        if name in PROGRAMS:
            hold_options(PROGRAMS[name], arguments, monkeypatch)
    else:
        assert os.access(ROOT / words[0], os.X_OK)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_one_that_its_program_takes(page, monkeypatch):
    for command in dict.fromkeys(commands_of(page)):
        try:
            hold(command, monkeypatch)
        except (AssertionError, SystemExit) as error:
            raise AssertionError(f"{command}: {error}") from error


@pytest.fixture(scope="module")
def copy(request, tmp_path_factory):
    return checkout.kept(request.config, tmp_path_factory.mktemp("readme"))


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    "install.py demo --strength 0.5 --steps 1 --device cpu --output {new}/comparison.png",
    "-m torch.distributed.run --nproc-per-node 2 -m benchmarks.quality --smallest --pictures 1 "
    "--model demo/scenes128.safetensors --output {new}/quality.json",
])  # fmt: skip
def test_it_runs_in_a_fresh_copy(command, copy, tmp_path):
    line = [sys.executable, *command.format(new=tmp_path).split()]
    done = subprocess.run(line, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert any(tmp_path.iterdir())


def test_the_tables_of_the_pages_are_those_of_the_committed_results():
    for page in doc_tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert doc_tables.fill(text) == text, f"{page}: run python -m benchmarks.doc_tables --write"


def python_of(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = re.findall(r"`(with tome_core\.[^`\n]*)`", text)
    return [*re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M), *(f"import tome_core\n{one}" for one in lines)]


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)])
def test_the_python_of_a_page_runs_and_leaves_nothing_behind(page, tiny_folder):
    for code in python_of(page):
        pipe = pipeline_of(tiny_folder)
        pipe.scheduler.register_to_config(num_train_timesteps=1000)
        exec(code, {"pipe": pipe})
        assert not any("forward" in vars(module) or "_forward" in vars(module) for module in pipe.unet.modules()), code


def test_the_readme_and_the_page_on_diffusers_show_what_is_held_here():
    assert "python install.py demo" in commands_of("README.md") and len(commands_of("demo/README.md")) > 5
    assert python_of("README.md") and python_of("docs/diffusers.md")
