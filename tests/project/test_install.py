"""install.py: quiet for hosts, clear for people. tests/host_doubles/folders.py has its calls and a host's folders."""

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import install
import install_hosts
from tests.host_doubles.folders import call_install, make_folder

ROOT = Path(__file__).parents[2]
PYPROJECT = """
[project]
name = "x"
dependencies = ["torch>=2.4"]
[project.optional-dependencies]
demo = ["numpy>=1", "pillow"]
test = ["pytest", "numpy>=1"]
"""
PIP = install.pip
TORCH_VERSION = "import importlib.metadata as m; print(m.version('torch'))"


def output(command: list, **options) -> str:
    """The output of a command that succeeds and says nothing else."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


def test_a_bare_call_says_nothing_leaves_nothing_and_imports_the_standard_library_alone(tmp_path):
    done = call_install(cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not list(tmp_path.iterdir())
    log = call_install(cwd=tmp_path, options=["-X", "importtime", "-S"]).stderr
    modules = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in log.splitlines() if "import time:" in line}
    assert modules - {*sys.stdlib_module_names, "_frozen_importlib_external", "imported package"} == {"install_hosts"}


def test_help_lists_every_command_and_so_does_the_refusal_of_an_unknown_command(capsys):
    assert install.main(["--help"]) == 0 and install.main(["demoo"]) == 2
    shown, refused = capsys.readouterr()
    assert all(f"install.py {name}" in text for text in (shown, refused) for name in install.COMMANDS)
    assert "'demoo'" in refused


def test_the_folder_for_extensions_is_taken_as_the_host_and_a_missing_folder_is_told(tmp_path, monkeypatch):
    folder, host = make_folder(install.WEBUI, tmp_path), install.WEBUI
    expected = install_hosts.target(host, folder)
    monkeypatch.chdir(folder)
    assert install_hosts.target(host, folder / host.place) == install_hosts.target(host, Path(host.place)) == expected
    with pytest.raises(install.Failure, match=r"nope does not exist; give the folder that holds webui's launch\.py"):
        install_hosts.target(host, tmp_path / "nope")


def test_a_torch_that_is_there_is_found_without_importing_it_unless_a_requirement_refuses_it():
    code = "import sys, install; print(install.reusable_torch('torch>=2.4')); assert 'torch' not in sys.modules"
    assert Path(output([sys.executable, "-c", code], cwd=ROOT), "torch", "__init__.py").exists()
    assert install.reusable_torch("torch>=99") is None
    assert install.satisfies("2.10.0+cpu", "torch>=2.4") and install.satisfies("2.6.0.dev20250101", "torch>=2.4")
    assert not install.satisfies("2.13.0", "torch>=2.4,<2.10")


@pytest.fixture
def pip_calls(tmp_path, monkeypatch) -> list[list[str]]:
    """Calls of pip, which does nothing, in an own repository; without pip environments take a fifth of the time."""
    def without_pip(builder, context):
        (next(Path(context.env_dir).glob("**/site-packages")) / "pip.py").touch()

    pip_calls = []
    monkeypatch.setattr(venv.EnvBuilder, "_setup_pip", without_pip)
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "pip", lambda python, arguments: pip_calls.append(list(arguments)))
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    return pip_calls


def test_the_environment_is_filled_once_and_again_when_the_requirements_change(tmp_path, pip_calls, capsys):
    python = install.environment(["demo", "test"], ["old-thing==1"])
    assert pip_calls == [["torch>=2.4", "numpy>=1", "pillow", "pytest"], ["--no-deps", "old-thing==1"]]
    said = capsys.readouterr().out
    assert set(install.SIZES) == set(install.read_project(ROOT / "pyproject.toml")["project"]["optional-dependencies"])
    assert "install.py test " in said and str(tmp_path / ".venv") in said and "190 MB" in said and "taken from" in said
    assert install.environment(["demo", "test"], ["old-thing==1"]) == python
    assert len(pip_calls) == 2 and capsys.readouterr().out == "", "the second call went to pip"
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.replace("numpy>=1", "numpy>=2"))
    install.environment(["demo", "test"], ["old-thing==1"])
    assert pip_calls[2] == ["torch>=2.4", "numpy>=2", "pillow", "pytest"]
    assert "Making" not in capsys.readouterr().out, "an environment that runs is kept"
    assert output([python, "-c", TORCH_VERSION]) == importlib.metadata.version("torch")


@pytest.mark.parametrize("ending, code, sentence", [
    (KeyboardInterrupt, 130, "stopped; the same command goes on"), (None, 1, "pip could not install what is needed")])
def test_an_installation_that_ends_early_goes_on_where_it_was(ending, code, sentence, tmp_path, pip_calls, monkeypatch,
                                                              capsys):  # fmt: skip
    def ended(command):
        (tmp_path / ".venv" / "what pip had by then").touch()
        if ending:
            raise ending
        return 1

    with monkeypatch.context() as context:
        context.setattr(install, "pip", PIP)
        context.setattr(install, "run", ended)
        assert install.main(["demo"]) == code
    assert capsys.readouterr().err.startswith(f"install.py: {sentence}")
    assert not list((tmp_path / ".venv").glob("installed-*"))
    install.environment(["demo"])
    assert (tmp_path / ".venv" / "what pip had by then").exists() and list((tmp_path / ".venv").glob("installed-*"))


@pytest.mark.slow
def test_an_environment_made_from_an_environment_sees_the_same_torch(tmp_path, pip_calls):
    first = install.environment(["demo"])
    os.rename(tmp_path / ".venv", tmp_path / "parent")
    code = f"import sys, pathlib; sys.path.insert(0, {str(ROOT)!r}); import install;" \
        f"install.ROOT = pathlib.Path({str(tmp_path)!r}); install.pip = lambda *a: None;" \
        "print(install.environment(['demo']))"  # fmt: skip
    child = output([first.replace(".venv", "parent"), "-c", code]).splitlines()[-1]
    assert output([child, "-c", TORCH_VERSION]) == importlib.metadata.version("torch")
    assert install.path_line(Path("ünï 字")).isascii(), "Pythons differ in how they decode such a file"


def test_an_environment_of_our_own_that_broke_is_made_again_and_the_users_is_never_removed(tmp_path, pip_calls):
    content = tmp_path / ".venv" / "content"
    content.parent.mkdir()
    content.touch()
    with pytest.raises(install.Failure, match=r"was not made by install\.py"):
        install.environment(["demo"])
    assert content.exists() and not pip_calls
    (tmp_path / ".venv" / install.OWNER).touch()
    assert Path(install.environment(["demo"])).exists() and not content.exists()


def test_a_python_that_cannot_make_environments_is_told_what_to_install(pip_calls, monkeypatch):
    find_spec = install.find_spec
    monkeypatch.setattr(install, "find_spec", lambda name: None if name == "ensurepip" else find_spec(name))
    with pytest.raises(install.Failure, match="apt install python3-venv"):
        install.environment(["demo"])
