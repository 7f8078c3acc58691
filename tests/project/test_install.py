"""install.py: quiet for hosts, clear for people."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import install
from tests.host_folders import call_install

ROOT = Path(__file__).parents[2]
PYPROJECT = """
[project]
name = "x"
dependencies = ["torch>=2.4"]
[project.optional-dependencies]
demo = ["numpy>=1", "pillow"]
test = ["pytest", "numpy>=1"]
"""


def imported(text):
    """Top-level modules in the output of -X importtime."""
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in text.splitlines() if "import time:" in line}


def test_a_bare_call_says_nothing_and_succeeds(tmp_path):
    done = call_install(cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_a_bare_call_imports_no_torch_and_nothing_else_of_weight(tmp_path):
    empty = tmp_path / "empty.py"
    empty.touch()
    plain = subprocess.run([sys.executable, "-X", "importtime", str(empty)], capture_output=True, text=True, check=True)
    ours = imported(call_install(cwd=tmp_path, options=["-X", "importtime"]).stderr)
    assert "site" in ours, "the import log was not read"
    assert ours - imported(plain.stderr) <= {"__future__"}


@pytest.mark.skipif(os.name == "nt", reason="no resource module")
def test_a_bare_call_needs_less_than_half_a_second_of_processor_time(tmp_path):
    import resource

    spent = []
    for _ in range(3):  # the least of three: the first one may compile and read from a cold disk
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        call_install(cwd=tmp_path)
        spent.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
    assert min(spent) < 0.5


def test_help_lists_every_command_and_so_does_the_refusal_of_an_unknown_one(tmp_path):
    told, refused = call_install("--help", cwd=tmp_path), call_install("demoo", cwd=tmp_path)
    assert (told.returncode, refused.returncode) == (0, 2)
    assert all(f"install.py {name}" in text for text in (told.stdout, refused.stderr) for name in install.COMMANDS)
    assert "'demoo'" in refused.stderr and "Traceback" not in refused.stderr


def test_an_interrupt_ends_without_a_traceback(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(install.COMMANDS, "demo", interrupted)
    assert install.main(["demo"]) == 130
    assert capsys.readouterr().err.strip() == "install.py: stopped."


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyboardInterrupt(), 130, "stopped; the same command goes on with what is there"),
        (install.Failure("pip could not install"), 1, "pip could not install"),
    ],
)
def test_an_installation_that_ends_early_says_one_sentence_and_goes_on_where_it_was(
    repository, monkeypatch, capsys, error, code, sentence
):
    folder, _ = repository

    def ended(python, arguments):
        (folder / ".venv" / "what pip had by then").touch()
        raise error

    with monkeypatch.context() as context:
        context.setattr(install, "pip", ended)
        assert install.main(["demo"]) == code
    assert capsys.readouterr().err.strip() == f"install.py: {sentence}"
    assert not list((folder / ".venv").glob("installed-*"))
    install.environment(["demo"])
    assert (folder / ".venv" / "what pip had by then").exists() and list((folder / ".venv").glob("installed-*"))


@pytest.mark.parametrize("torch_folder", [None, Path("here", "site-packages")])
def test_what_will_be_downloaded_is_said_before_it_is(repository, monkeypatch, capsys, torch_folder):
    said = []
    monkeypatch.setattr(install, "reusable_torch", lambda requirement: torch_folder)
    for step in ("make_environment", "pip"):
        monkeypatch.setattr(install, step, lambda *_: said.append(capsys.readouterr().out))
    (repository[0] / ".venv").mkdir()
    install.environment(["demo"])
    assert len(said) == 2 and str(repository[0] / ".venv") in said[0] and "goes on" in said[0]
    assert f"{install.SIZES['demo']} MB" in said[0] and "install.py demo" in said[0] and "pip's cache" in said[0]
    assert f"taken from {torch_folder}" in said[0] if torch_folder else "2 to 4 GB" in said[0]


@pytest.mark.parametrize("visible", [True, False])
def test_it_is_said_again_where_the_environment_is_there_and_more_is_asked_for(
    repository, monkeypatch, capsys, visible
):
    """Another command, and the same one after Ctrl-C: the environment is used, and torch is told as it is in there."""
    if not visible:
        monkeypatch.setattr(install, "reusable_torch", lambda requirement: None)
    install.environment(["demo"])
    capsys.readouterr()
    said = []
    monkeypatch.setattr(install, "pip", lambda *_: said.append(capsys.readouterr().out))
    for stamp in (repository[0] / ".venv").glob("installed-*"):
        stamp.unlink()
    install.environment(["demo"])
    install.environment(["demo", "test"])
    for told, command, size in zip(said, ("demo", "test"), (120, 190), strict=True):
        assert f"install.py {command} " in told and f"{size} MB" in told
        assert ("torch: there already" if visible else "2 to 4 GB") in told and "Making" not in told
    install.environment(["demo", "test"])
    assert capsys.readouterr().out == "", "nothing is downloaded, so nothing is said"


def test_each_extra_that_is_installed_has_its_size():
    extras = install.read_project(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    assert set(install.SIZES) == set(extras)


def test_a_folder_of_any_name_is_taken_and_told_where_the_output_has_few_letters(tmp_path, monkeypatch):
    comfyui = tmp_path / "with spaces ünï 字"
    for name in install.COMFYUI.looked_for[0]:
        (comfyui / name).mkdir(parents=True)
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = call_install("comfyui", comfyui)
    assert done.returncode == 0, done.stderr
    assert (comfyui / "custom_nodes" / install.NAME).exists() and "with spaces \\xfcn\\xef \\u5b57" in done.stdout


@pytest.mark.parametrize("host", [install.COMFYUI, install.WEBUI], ids=lambda host: host.name)
def test_the_hosts_folder_for_extensions_is_taken_as_the_host(host, tmp_path, monkeypatch):
    for name in host.looked_for[0]:
        (tmp_path / "host" / name).mkdir(parents=True)
    expected = install.target(host, tmp_path / "host")
    assert install.target(host, tmp_path / "host" / host.place) == expected
    monkeypatch.chdir(tmp_path / "host")
    assert install.target(host, Path(host.place)) == expected
    other = tmp_path / "other" / host.place
    other.mkdir(parents=True)
    with pytest.raises(install.Failure, match=f"is not a {host.name} folder"):
        install.target(host, other)


def test_a_folder_that_does_not_exist_is_told_from_one_that_is_no_host(tmp_path):
    for folder, sentence in ((tmp_path / "nope", "does not exist; give the folder that holds ComfyUI's main.py"),
                             (tmp_path, "is not a ComfyUI folder")):  # fmt: skip
        with pytest.raises(install.Failure, match=rf"{re.escape(str(folder))} {sentence}"):
            install.target(install.COMFYUI, folder)


def test_packages_in_a_folder_of_any_name_are_seen_whatever_letters_python_reads(tmp_path):
    wanted = tmp_path / "with spaces ünï 字" / "site-packages"
    wanted.mkdir(parents=True)
    (tmp_path / "torch_of_parent.pth").write_text(install.path_line(wanted))
    code = f"import site, sys; site.addsitedir({str(tmp_path)!r}); print(ascii(sys.path[-1]))"
    plain = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-X", "utf8=0", "-c", code], capture_output=True, text=True, env=plain,
                          check=False)  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == (ascii(str(wanted)), "")


@pytest.mark.skipif(os.name == "nt", reason="Windows ends a program without telling it")
def test_sigterm_reaches_the_command_that_runs_and_is_waited_for():
    inner = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7));" \
        "print('on', flush=True); time.sleep(60)"
    outer = f"import install, sys; sys.exit(install.run([sys.executable, '-c', {inner!r}]))"
    with subprocess.Popen([sys.executable, "-c", outer], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "on\n"
        process.terminate()
        assert process.wait(30) == 7


def test_requirements_are_the_dependencies_and_the_extras_without_repeats():
    project = {"project": {"dependencies": ["torch>=2.4"], "optional-dependencies": {"a": ["x", "y"], "b": ["y", "z"]}}}
    assert install.requirements(project, []) == ["torch>=2.4"]
    assert install.requirements(project, ["a", "b"]) == ["torch>=2.4", "x", "y", "z"]
    with pytest.raises(install.Failure, match=r"'c'.*has a, b"):
        install.requirements(project, ["c"])


def test_the_real_pyproject_lists_what_the_commands_need():
    lines = install.requirements(install.read_project(ROOT / "pyproject.toml"), ["demo", "test"])
    names = {re.split(r"[<>=!~ \[]", line)[0] for line in lines}
    assert {"torch", "diffusers", "scikit-image", "pytest", "ruff"} <= names


def test_a_version_meets_a_requirement_as_pip_would_say():
    for version in ("2.13.0+cpu", "2.4.0", "2.10.0", "2.6.0.dev20250101"):
        assert install.satisfies(version, "torch>=2.4"), version
    assert not install.satisfies("2.3.1", "torch>=2.4") and not install.satisfies("2.13.0", "torch>=2.4,<2.10")


def test_a_fingerprint_changes_with_python_and_with_each_requirement():
    facts = (("3.10", ["a", "b"]), ("3.11", ["a", "b"]), ("3.10", ["a"]), ("3.10", ["a", "c"]))
    marks = [install.fingerprint(*one) for one in facts]
    assert len(set(marks)) == 4 and marks[0] == install.fingerprint(*facts[0])


def test_a_torch_that_is_there_is_found_without_importing_it():
    code = "import sys, install; print(install.reusable_torch('torch>=2.4')); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "torch" / "__init__.py").exists()


def test_a_torch_that_is_too_old_is_not_reused():
    assert install.reusable_torch("torch>=99") is None


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of its own for install.py, whose pip only notes what it is asked for; an empty module stands for
    pip in its environments, which are made in a fifth of the time without it.
    """
    def without_pip(builder, context):
        (next(Path(context.env_dir).glob("**/site-packages")) / "pip.py").touch()

    monkeypatch.setattr(venv.EnvBuilder, "_setup_pip", without_pip)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    monkeypatch.setattr(install, "root", lambda: tmp_path)
    asked = []
    monkeypatch.setattr(install, "pip", lambda python, arguments: asked.append(list(arguments)))
    return tmp_path, asked


def test_the_environment_is_filled_once_and_again_when_the_requirements_change(repository):
    folder, asked = repository
    python = install.environment(["demo", "test"], ["old-thing==1"])
    assert asked == [["torch>=2.4", "numpy>=1", "pillow", "pytest"], ["--no-deps", "old-thing==1"]]
    assert install.environment(["demo", "test"], ["old-thing==1"]) == python
    assert len(asked) == 2, "the second call went to pip"
    (folder / "pyproject.toml").write_text(PYPROJECT.replace("numpy>=1", "numpy>=2"))
    install.environment(["demo", "test"], ["old-thing==1"])
    assert asked[2] == ["torch>=2.4", "numpy>=2", "pillow", "pytest"]


def test_the_environment_sees_the_torch_of_the_python_that_made_it(repository):
    python = install.environment(["demo"])
    code = "import importlib.metadata as m, sys; print(m.version('torch')); assert sys.prefix != sys.base_prefix"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == importlib.metadata.version("torch")


@pytest.mark.slow
def test_an_environment_made_from_an_environment_sees_the_same_torch(repository):
    folder, _ = repository
    first = install.environment(["demo"])
    os.rename(folder / ".venv", folder / "parent")
    parent = Path(first.replace(".venv", "parent"))
    code = f"import sys, pathlib; sys.path.insert(0, {str(ROOT)!r}); import install;" \
        f"install.root = lambda: pathlib.Path({str(folder)!r}); install.pip = lambda *a: None;" \
        "print(install.environment(['demo']))"  # fmt: skip
    done = subprocess.run([str(parent), "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    child = done.stdout.strip().splitlines()[-1]
    version = "import importlib.metadata as m; print(m.version('torch'))"
    answer = subprocess.run([child, "-c", version], capture_output=True, text=True, check=False)
    assert answer.stdout.strip() == importlib.metadata.version("torch"), answer.stderr


def test_an_environment_of_our_own_that_broke_is_made_again(repository):
    folder, _ = repository
    (folder / ".venv").mkdir()
    (folder / ".venv" / install.OWNER).touch()
    (folder / ".venv" / "leftover").touch()
    assert Path(install.environment(["demo"])).exists()
    assert not (folder / ".venv" / "leftover").exists()


def test_an_environment_of_the_user_is_never_removed(repository):
    folder, asked = repository
    precious = folder / ".venv" / "precious"
    precious.mkdir(parents=True)
    with pytest.raises(install.Failure, match=r"was not made by install\.py"):
        install.environment(["demo"])
    assert precious.exists() and not asked


@pytest.mark.parametrize("missing", ["venv", "ensurepip"])
def test_a_python_that_cannot_make_environments_is_told_what_to_install(repository, monkeypatch, missing):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(install.Failure, match="apt install python3-venv"):
        install.environment(["demo"])


def write_wheel(folder: Path, name: str) -> None:
    """A package of one empty module."""
    info = f"{name}-99.dist-info"
    files = {f"{name}.py": "", f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 99\n",
             f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-99-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)


@pytest.mark.slow
def test_without_a_network_pip_takes_what_was_downloaded_before(tmp_path, monkeypatch):
    """The two steps of the demo's page, with real pip, in a clone with spaces and letters of other alphabets."""
    clone, index, kept = tmp_path / "with spaces ünï 字", tmp_path / "index", tmp_path / "kept wheels"
    clone.mkdir()
    index.mkdir()
    for name in ("thing", "setuptools"):  # torch asks for a newer one than an environment may begin with
        write_wheel(index, name)
    (clone / "pyproject.toml").write_text(PYPROJECT.replace('"numpy>=1", "pillow"', '"thing"'))
    monkeypatch.setattr(install, "root", lambda: clone)
    offline = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    subprocess.run([sys.executable, "-m", "pip", "download", "-d", str(kept), "thing", "setuptools"],
                   env=offline, check=True)  # fmt: skip
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", kept.as_uri())):
        monkeypatch.setenv(name, value)
    python = install.environment(["demo"])
    assert subprocess.run([python, "-c", "import thing, torch"], check=False).returncode == 0
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (clone / "pyproject.toml").write_text(PYPROJECT.replace('"numpy>=1", "pillow"', '"other-thing"'))
    with pytest.raises(install.Failure, match="pip could not install"):
        install.environment(["demo"])


def test_a_newcomer_runs_the_quick_tests_and_all_runs_every_one():
    quick, everything = install.tests_to_run([]), install.tests_to_run(["--all"])
    assert [one for one in quick if one != "--quick"] == everything and "--quick" in quick
    assert 1 <= int(everything[everything.index("-n") + 1]) <= 4
    assert install.tests_to_run(["tests/project", "-x"]) == ["tests/project", "-x"]
