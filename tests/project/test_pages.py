"""The pages agree with the project: links, commands, Python, quoted messages, docstrings' examples, and words."""

import argparse
import ast
import doctest
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import install
from tests.small_models.sd_pipelines import read_folder
from tome_core.settings import form

ROOT = Path(__file__).parents[2]
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in (
    *ROOT.glob("*.md"), *(page for name in ("docs", "demo", "comfy_nodes") for page in (ROOT / name).rglob("*.md")))}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# programs of install.py whose options are their own
PROGRAMS = {"demo": "demo", "page": "demo.page", "gpu": "benchmarks.gpu"}
QUOTED = {text for text in re.findall(r"`([^`\n]*)`", PAGES["docs/troubleshooting.md"])
          if (len(text.split()) >= 5 and "->" not in text) or f"\n| `{text}` |" in PAGES["docs/troubleshooting.md"]}
PACKAGES = ("tome_core", "extension", "comfy_nodes")
# modules whose texts are labels, help, log lines and names, and no reasons why something is left alone
NO_REASONS = {
    *(f"tome_core/{name}.py" for name in ("attention/merged", "faults", "merging/kernels/proof", "reporting/gains",
                                          "settings/config", "settings/form")),
    *(f"extension/{name}.py" for name in ("settings_tab", "ui")), "comfy_nodes/inputs.py", "comfy_nodes/nodes.py",
}  # fmt: skip
# phrases that had to be read twice
STUMBLES = re.compile(
    r"\b(nobody|somebody|anybody|whoever|anew|besides|beside 0|bears? (more|less|little|much)|hangs? on|per cent|\d+ %|"
    r"(is|are|was|were) told (of|about)|where it (is|does|has|can|may) not)(?!\w)", re.IGNORECASE)


def anchors(page: str) -> set[str]:
    """The names by which links on GitHub find the page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere_and_the_readme_leads_to_every_page_of_docs():
    for name, text in PAGES.items():
        links = {link for pair in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", FENCE.sub("", text)) for link in pair}
        for link in (link for link in links if link and not re.match(r"[a-z]+:", link)):
            path, _, anchor = link.partition("#")
            target = (ROOT / name).parent.joinpath(path).resolve() if path else ROOT / name
            assert target.exists() and target.is_relative_to(ROOT), f"{name} links to {link}, which is not there"
            assert not anchor or anchor in anchors(target.read_text("utf-8")), f"{name}: {link} has no such heading"
        assert name != "README.md" or links >= {page for page in PAGES if page.startswith("docs/")}


def test_the_examples_of_a_docstring_give_what_they_say():
    for path in (path for path in (ROOT / "tome_core").rglob("*.py") if ">>>" in path.read_text("utf-8")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        result = doctest.testmod(import_module(name))
        assert result.attempted and not result.failed, path


def commands_of(page: str) -> list[str]:
    """The commands that a page tells its reader to run; without the map of the code, which lists files."""
    text = PAGES[page].split("\n## The map\n")[0]
    lines = [line for language, body in FENCE.findall(text) if not language for line in body.splitlines()]
    quoted = re.findall(r"`((?:\w+=\S+ )*(?:python|pip|torchrun|accelerate)\s[^`]*)`", FENCE.sub("", text))
    plain = (re.sub(r"(^|\s+)#.*$|\b[A-Z_]+=\S+ ", "", line) for line in (*lines, *quoted))
    return [" ".join(line.split()) for line in plain if line.strip()]


class Read(BaseException):
    """Raised when the program has read its command line, to stop it."""


def hold_options(module: str, arguments: list[str], monkeypatch) -> None:
    """Let a program read these arguments. The program exits with 2 if it does not know them."""
    plain = argparse.ArgumentParser.parse_args

    def parse(parser, *args, **kwargs):
        plain(parser, *args, **kwargs)
        raise Read

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns of a module that is imported already
    with pytest.raises(Read):
        runpy.run_module(module, run_name="__main__")


@pytest.mark.parametrize("command", dict.fromkeys(command for page in PAGES for command in commands_of(page)))
def test_a_command_of_a_page_is_one_that_its_program_takes(command, monkeypatch):
    """The command is the page's, with values for its placeholders."""
    words = shlex.split(command)
    if words[0] == "pip":
        extras = install.read_project(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
        assert {extra for names in re.findall(r"\[(.*?)\]", command) for extra in names.split(",")} <= set(extras)
        assert all((ROOT / word).is_file() for word in words if word.endswith(".txt"))
    elif "pytest" in words:
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
    elif "-m" in words:
        module, *arguments = words[words.index("-m") + 1:]
        if arguments:
            hold_options(module, arguments, monkeypatch)
        assert find_spec(module)
    elif words[:2] == ["python", "install.py"]:
        assert words[2] in install.COMMANDS
        if words[2] in PROGRAMS:
            hold_options(PROGRAMS[words[2]], words[3:], monkeypatch)
    else:
        assert os.access(ROOT / words[0], os.X_OK)


def python_of(page: str) -> list[str]:
    lines = re.findall(r"`(with tome_core\.[^`\n]*)`", PAGES[page])
    blocks = [body for language, body in FENCE.findall(PAGES[page]) if language == "python"]
    return [*blocks, *(f"import tome_core\n{line}" for line in lines)]


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)])
def test_the_python_of_a_page_runs_and_leaves_nothing_behind(page, tiny_folder):
    for code in python_of(page):
        pipe = read_folder(tiny_folder)
        pipe.scheduler.register_to_config(num_train_timesteps=1000)
        exec(code, {"pipe": pipe})
        assert not any("forward" in vars(module) or "_forward" in vars(module) for module in pipe.unet.modules()), code


def said_by(path: Path, errors: bool = True) -> set[str]:
    """The strings of a module, without docstrings. errors: also the sentences of its exceptions?"""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    if not errors:
        left_out |= {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Raise) for inner in ast.walk(node)}
    return {node.value for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out}  # fmt: skip


def test_the_page_on_troubles_quotes_what_the_code_says_and_explains_every_reason_for_a_call_left_alone():
    modules = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    said = [text for path in modules for text in said_by(path)]
    assert not [quoted for quoted in QUOTED if not any(quoted in text for text in said)], "nothing says these any more"
    missing = {}
    for path in modules:
        name = path.relative_to(ROOT).as_posix()
        reasons = {text.strip() for text in said_by(path, errors=False)
                   if len(text.split()) >= 4 and not re.search(r"->|%s|less work|\{left\}", text)}  # fmt: skip
        assert name not in NO_REASONS or reasons, f"{name} needs no exception"
        left = {reason for reason in reasons if not any(quoted.strip() in reason for quoted in QUOTED)}
        missing |= {name: left} if left and name not in NO_REASONS else {}
    assert not missing, "explain these in docs/troubleshooting.md"


def test_no_word_is_misspelled():
    done = subprocess.run([sys.executable, "-m", "codespell_lib"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "")


def test_no_phrase_that_had_to_be_read_twice_comes_back():
    texts = {**PAGES, "nodes": (ROOT / "locales" / "en" / "nodeDefs.json").read_text("utf-8")}
    texts |= {f"setting {field.name}": f"{field.label} {field.help}" for field in form.FIELDS}
    stumbles = {(name, hit[0]) for name, text in texts.items() for hit in STUMBLES.finditer(text)}
    assert not stumbles, "name who it is, and write: again, also, if it is 0, tolerates, gets, depends on, 88%"
