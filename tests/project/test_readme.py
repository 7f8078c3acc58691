"""The commands and the Python of the pages: each command is read by its own program, and the Python runs."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import install
from benchmarks import doc_tables
from tests.samplings import pipeline_of

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))), "demo/README.md",
         "CONTRIBUTING.md")  # fmt: skip
# programs of install.py whose options are their own
PROGRAMS = {"demo": "demo", "page": "demo.page", "gpu": "benchmarks.gpu"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)


def commands_of(page: str) -> list[str]:
    """The commands that a page tells its reader to run, in order; without the map of the code, which lists files."""
    text = (ROOT / page).read_text(encoding="utf-8").split("\n## The map\n")[0]
    lines = [line for language, body in FENCE.findall(text) if not language for line in body.splitlines()]
    quoted = re.findall(r"`((?:\w+=\S+ )*(?:python|pip|torchrun|accelerate)\s[^`]*)`", FENCE.sub("", text))
    plain = (re.sub(r"(^|\s+)#.*$|\b[A-Z_]+=\S+ ", "", line) for line in (*lines, *quoted))
    return list(dict.fromkeys(" ".join(line.split()) for line in plain if line.strip()))


class Read(BaseException):
    """The program has read its command line; it is not to do more."""


def hold_options(module: str, arguments: list[str], monkeypatch) -> None:
    """Let a program read these arguments. It ends with 2 if it does not know them."""
    if not arguments:
        assert importlib.util.find_spec(module)
        return
    plain = argparse.ArgumentParser.parse_args

    def parse(parser, *args, **kwargs):
        plain(parser, *args, **kwargs)
        raise Read

    with monkeypatch.context() as context, pytest.raises(Read):
        context.setattr(os, "environ", dict(os.environ))
        context.setattr(argparse.ArgumentParser, "parse_args", parse)
        context.setattr(sys, "argv", [module, *arguments])
        context.delitem(sys.modules, module, raising=False)  # runpy warns of a module that is imported already
        runpy.run_module(module, run_name="__main__")


def hold(command: str, monkeypatch) -> None:
    """A command of the pages can be typed as it stands there, but for what its placeholders stand for."""
    words = shlex.split(command)
    if words[0] == "pip":
        extras = install.read_project(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
        named = re.findall(r"\[(.*?)\]", command)
        assert {extra for names in named for extra in names.split(",")} <= set(extras)
        assert all((ROOT / word).is_file() for word in words if word.endswith(".txt"))
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
    for command in commands_of(page):
        try:
            hold(command, monkeypatch)
        except (AssertionError, SystemExit) as error:
            raise AssertionError(f"{command}: {error}") from error
    assert commands_of("README.md")[0] == "python install.py demo" and len(commands_of("demo/README.md")) > 5


def test_the_tables_of_the_pages_are_those_of_the_committed_results():
    for page in doc_tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert doc_tables.fill(text) == text, f"{page}: run python -m benchmarks.doc_tables --write"


def python_of(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = re.findall(r"`(with tome_core\.[^`\n]*)`", text)
    blocks = [body for language, body in FENCE.findall(text) if language == "python"]
    return [*blocks, *(f"import tome_core\n{line}" for line in lines)]


@pytest.mark.parametrize("page", ["README.md", "docs/diffusers.md", *(
    page for page in PAGES if python_of(page) and page not in ("README.md", "docs/diffusers.md"))])  # fmt: skip
def test_the_python_of_a_page_runs_and_leaves_nothing_behind(page, tiny_folder):
    assert python_of(page)
    for code in python_of(page):
        pipe = pipeline_of(tiny_folder)
        pipe.scheduler.register_to_config(num_train_timesteps=1000)
        exec(code, {"pipe": pipe})
        assert not any("forward" in vars(module) or "_forward" in vars(module) for module in pipe.unet.modules()), code


def test_the_smallest_form_attends_as_repeated_means_do_and_leaves_other_keys_alone():
    """The functions in docs/methods.md that a reader copies."""
    section = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8").split("\n## ")[1]
    shown: dict = {}
    exec(re.search(r"^```python\n(.*?)^```$", section, re.S | re.M)[1], shown)
    form, heads = SimpleNamespace(**shown), 2
    generator = torch.Generator().manual_seed(0)

    def plain(*tensors):
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in tensors)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def repeated(x, group):
        """Every token is replaced by the mean of its group."""
        return torch.stack([torch.stack([tokens[numbers == number].mean(0) for number in numbers])
                            for tokens, numbers in zip(x, group, strict=True)])  # fmt: skip

    for keys, side in ((64, 8), (16, 4), (77, None)):
        q, k, v = (torch.randn(2, count, 16, generator=generator) for count in (64, keys, keys))
        group = form.group_tokens(k, v, side, side, 0.75)[0] if side else torch.arange(keys).expand(2, -1)
        expected = plain(q, repeated(k, group), repeated(v, group))
        torch.testing.assert_close(form.attend(q, k, v, heads, (8, 8), 0.75), expected, atol=1e-5, rtol=0)
        assert len(group.unique()) == (keys // 4 if side else keys)
