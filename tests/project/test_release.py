"""A release: one version, and a wheel and an sdist whose engine passes its tests in an environment with torch alone."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import install
import tome_core
from tests import release
from tests.checkout import fresh, tracked

ROOT = Path(__file__).parents[2]
ENGINE_TESTS = tuple(f"{name}.py" for name in (
    "settings/test_config", "settings/test_schedule", "merging/test_methods", "merging/test_plan"))


# --- one version ----------------------------------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere():
    assert release.disagreements() == []
    assert release.version() == tome_core.__version__
    # without our expressions, as ComfyUI's Manager and pip read it
    assert install.read_project(ROOT / "pyproject.toml")["project"]["version"] == tome_core.__version__


@pytest.fixture
def copy(tmp_path) -> Path:
    """The three files that name the version."""
    for path in (release.SOURCE, release.COPY, release.CHANGELOG):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def test_a_checkout_is_small():
    """Everybody who installs it in a host downloads all of it."""
    files = tracked()
    if files is None:
        pytest.skip("needs git's list of the project's files")
    assert sum((ROOT / name).stat().st_size for name in files) < 25e6


def test_a_new_version_is_written_in_one_place_and_the_rest_follows(copy):
    source = copy / release.SOURCE
    source.write_text(source.read_text(encoding="utf-8").replace(tome_core.__version__, "9.8.7"), encoding="utf-8")
    before = (copy / release.COPY).read_text(encoding="utf-8")
    assert len(release.disagreements(root=copy)) == 2, "pyproject.toml and the changelog"
    release.write(copy)
    after = (copy / release.COPY).read_text(encoding="utf-8")
    assert after == before.replace(f'\nversion = "{tome_core.__version__}"', '\nversion = "9.8.7"')
    (sentence,) = release.disagreements(root=copy)
    assert "no entry under '## 9.8.7'" in sentence


def test_a_tag_of_another_version_is_refused(copy):
    assert release.disagreements(f"v{tome_core.__version__}", copy) == []
    for tag in ("v9.8.7", tome_core.__version__, f"v{tome_core.__version__}rc1"):
        assert tag in release.disagreements(tag, copy)[0]


def test_the_entry_of_a_version_ends_where_the_next_one_begins(copy):
    (copy / release.CHANGELOG).write_text("# Changelog\n\n## 0.2.0\n\n- new\n\n## 0.1.0\n\n- old\n", encoding="utf-8")
    assert (release.entry("0.2.0", copy), release.entry("0.1.0", copy)) == ("- new", "- old")
    assert release.entry("0.1", copy) == ""


def test_the_version_is_told_without_torch():
    code = "import sys, runpy; sys.argv = ['release']; runpy.run_module('tests.release', run_name='__main__');" \
        "assert 'torch' not in sys.modules"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, tome_core.__version__), done.stderr


@pytest.mark.parametrize("folder", ["tome_core", "extension", "comfy_nodes", "scripts"])
def test_a_clone_in_a_host_needs_no_installed_metadata(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert not re.search(r"importlib[. ](import )?metadata|pkg_resources", path.read_text(encoding="utf-8")), path


def test_comfyuis_registry_gets_what_the_nodes_need_and_little_else():
    lines = (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    left_out = {line.removeprefix("/") for line in lines if line and not line.startswith("#")}
    needed = {*install.COMFYUI.copied, "install.py"}  # the Manager runs it
    assert not left_out & needed
    known = tracked()
    if known is None:
        pytest.skip("this is no git checkout, so what belongs to it is not known")
    there = {path.parts[0] for path in known}
    harmless = {"README.md", "CHANGELOG.md", "docs", ".gitignore", ".comfyignore"}
    assert there - needed - harmless == left_out, "name it in .comfyignore, or in install.py if the nodes need it"


# --- wheel and sdist --------------------------------------------------------------------------------------------------


def run(command: list, **options) -> str:
    """The output of a command that succeeds."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False,
                          env={**environment, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """Both distributions, built from a copy, so that nothing is left in the checkout; and the wheel that pip builds."""
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("building needs setuptools 77 or newer, as pyproject.toml says")
    folder = tmp_path_factory.mktemp("built")
    source = fresh(folder / "source")
    for hook in ("build_sdist", "build_wheel"):
        run([sys.executable, "-c", f"from setuptools.build_meta import {hook}; {hook}({str(folder)!r})"], cwd=source)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet")
    run([sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", folder / "again", sdist])
    (again,) = (folder / "again").glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", **({"filter": "data"} if sys.version_info >= (3, 12) else {}))
    (unpacked,) = (folder / "unpacked").iterdir()
    return {"wheel": wheel, "again": again, "sdist": sdist, "unpacked": unpacked}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_the_engine_and_requires_torch(built):
    files = contents(built["wheel"])
    tracked = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tome_core").rglob("*.py")}
    assert {name for name in files if ".dist-info/" not in name} == tracked | {"tome_core/py.typed"}
    metadata = next(text.decode() for name, text in files.items() if name.endswith("METADATA"))
    required = [line for line in re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE) if "extra ==" not in line]
    assert required == ["torch>=2.4"]
    assert f"Version: {tome_core.__version__}\n" in metadata and "License-Expression: MIT" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in files)


def test_the_sdist_makes_the_same_wheel_and_carries_the_engines_tests(built):
    assert contents(built["again"]) == contents(built["wheel"])
    assert all((built["unpacked"] / "tests" / "engine" / name).is_file() for name in ENGINE_TESTS)
    assert (built["unpacked"] / "CHANGELOG.md").is_file()


def with_all_it_requires(name: str, found: dict[str, importlib.metadata.Distribution] | None = None) -> dict:
    """Installed distributions by name: this one, and those that it requires here."""
    requirement_of = install.import_vendored("packaging.requirements").Requirement
    found = {} if found is None else found
    if name.lower() not in found:
        found[name.lower()] = importlib.metadata.distribution(name)
        for line in found[name.lower()].requires or ():
            requirement = requirement_of(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                with_all_it_requires(requirement.name, found)
    return found


@pytest.fixture(scope="module")
def empty(built, tmp_path_factory) -> tuple[Path, Path]:
    """A new environment in which our wheel was installed, and its packages' folder; of others it sees torch's alone."""
    if os.name == "nt":
        pytest.skip("torch is lent by symbolic links, which Windows allows to administrators only")
    folder = tmp_path_factory.mktemp("empty")
    lent = folder / "lent"
    lent.mkdir()
    for one in with_all_it_requires("torch").values():
        for name in {file.parts[0] for file in one.files or () if ".." not in file.parts} - {"__pycache__"}:
            if not (lent / name).exists():
                (lent / name).symlink_to(one.locate_file(name))
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder / "environment")
    python = install.venv_python(folder / "environment")
    packages = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]).strip())
    (packages / "lent.pth").write_text(f"{lent}\n", encoding="utf-8")
    # with its requirements: pip would have to fetch what is missing, and may not
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--quiet"]
    run([*pip, built["again"]], cwd=folder)
    return python, packages


USE = """
import importlib.util, torch, tome_core
print(tome_core.__version__)
print(tome_core.__file__)
assert not any(map(importlib.util.find_spec, ("pytest", "diffusers", "tomesd"))), "the environment is not empty"
plan = tome_core.MergePlan(torch.tensor([[0, 0, 1]]), 2)
print(plan.merge(torch.tensor([[[1.0], [3.0], [5.0]]])).flatten().tolist())
"""


def test_it_installs_and_runs_where_torch_is_all_there_is(empty, tmp_path):
    python, packages = empty
    version, path, merged = run([python, "-c", USE], cwd=tmp_path).splitlines()
    assert version == tome_core.__version__ and Path(path).is_relative_to(packages) and merged == "[2.0, 5.0]"


@pytest.mark.slow
def test_the_installed_engine_passes_its_tests(empty, built, tmp_path):
    """Those of the sdist, away from any checkout. Their tools are lent now; the engine is still the installed one."""
    python, packages = empty
    shutil.copytree(built["unpacked"] / "tests", tmp_path / "tests")
    tools = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    (packages / "tools.pth").write_text("".join(f"{folder}\n" for folder in tools), encoding="utf-8")
    where = run([python, "-c", "import tome_core; print(tome_core.__file__)"], cwd=tmp_path).strip()
    assert Path(where).is_relative_to(packages)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    said = run([*command, *(f"tests/engine/{name}" for name in ENGINE_TESTS)], cwd=tmp_path)
    assert int(re.search(r"(\d+) passed", said).group(1)) > 150
