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
ENGINE_TESTS = re.findall(r"tests/engine/\S+\.py", (ROOT / "MANIFEST.in").read_text(encoding="utf-8"))
MANY = 60  # tests of the engine that the sdist carries and that are quick


# --- one version ------------------------------------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere_and_told_without_torch():
    assert release.disagreements() == []
    # without our expressions, as ComfyUI's Manager and pip read it
    assert install.read_project(ROOT / "pyproject.toml")["project"]["version"] == tome_core.__version__
    code = "import sys, runpy; sys.argv = ['release']; runpy.run_module('tests.release', run_name='__main__');" \
        "assert 'torch' not in sys.modules"
    assert run([sys.executable, "-c", code], cwd=ROOT).strip() == tome_core.__version__


def test_a_new_version_is_written_in_one_place_and_the_rest_follows(tmp_path):
    for path in (release.SOURCE, release.COPY, release.CHANGELOG):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    assert release.disagreements(f"v{tome_core.__version__}", tmp_path) == []
    for tag in ("v9.8.7", tome_core.__version__, f"v{tome_core.__version__}rc1"):
        assert tag in release.disagreements(tag, tmp_path)[0]
    source = tmp_path / release.SOURCE
    source.write_text(source.read_text(encoding="utf-8").replace(tome_core.__version__, "9.8.7"), encoding="utf-8")
    before = (tmp_path / release.COPY).read_text(encoding="utf-8")
    assert len(release.disagreements(root=tmp_path)) == 2, "pyproject.toml and the changelog"
    release.write(tmp_path)
    after = (tmp_path / release.COPY).read_text(encoding="utf-8")
    assert after == before.replace(f'\nversion = "{tome_core.__version__}"', '\nversion = "9.8.7"')
    (sentence,) = release.disagreements(root=tmp_path)
    assert "no entry under '## 9.8.7'" in sentence


# --- a clone in a host ------------------------------------------------------------------------------------------------


def test_a_clone_in_a_host_is_small_and_needs_no_installed_metadata():
    for path in (path for folder in ("tome_core", "extension", "comfy_nodes", "scripts")
                 for path in (ROOT / folder).rglob("*.py")):  # fmt: skip
        assert not re.search(r"importlib[. ](import )?metadata|pkg_resources", path.read_text(encoding="utf-8")), path
    assert sum((ROOT / name).stat().st_size for name in tracked() or ()) < 25e6


def test_comfyuis_registry_gets_what_the_nodes_need_and_little_else():
    lines = (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    left_out = {line.removeprefix("/") for line in lines if line and not line.startswith("#")}
    needed = {*install.COMFYUI.copied, "install.py", "install_hosts.py"}  # the Manager runs the first
    assert not left_out & needed
    known = tracked()
    if known is None:
        pytest.skip("this is no git checkout, so what belongs to it is not known")
    harmless = {"README.md", "CHANGELOG.md", "docs", ".gitignore", ".comfyignore"}
    there = {path.parts[0] for path in known}
    assert there - needed - harmless == left_out, "name it in .comfyignore, or in install_hosts.py if the nodes need it"


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
    """The wheel, the unpacked sdist and the wheel that pip builds from it; of a copy, so that the checkout stays."""
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
    return {"wheel": wheel, "again": again, "unpacked": unpacked}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_the_engine_and_requires_torch_and_the_sdist_makes_it_too(built):
    files = contents(built["wheel"])
    engine = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tome_core").rglob("*.py")}
    assert {name for name in files if ".dist-info/" not in name} == engine | {"tome_core/py.typed"}
    metadata = next(text.decode() for name, text in files.items() if name.endswith("METADATA"))
    required = [line for line in re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE) if "extra ==" not in line]
    assert required == ["torch>=2.4"]
    assert f"Version: {tome_core.__version__}\n" in metadata and "License-Expression: MIT" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in files)
    assert contents(built["again"]) == files
    assert len(ENGINE_TESTS) > 2 and (built["unpacked"] / "CHANGELOG.md").is_file()


def with_all_it_requires(name: str, known: dict[str, importlib.metadata.Distribution] | None = None) -> dict:
    """Installed distributions by name: this one, and those that it requires here."""
    requirement_of = install.import_vendored("packaging.requirements").Requirement
    known = {} if known is None else known
    if name.lower() not in known:
        known[name.lower()] = importlib.metadata.distribution(name)
        for line in known[name.lower()].requires or ():
            requirement = requirement_of(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                with_all_it_requires(requirement.name, known)
    return known


USE = """
import importlib.util, torch, tome_core
print(tome_core.__version__)
print(tome_core.__file__)
assert not any(map(importlib.util.find_spec, ("pytest", "diffusers", "tomesd"))), "the environment is not empty"
plan = tome_core.MergePlan(torch.tensor([[0, 0, 1]]), 2)
print(plan.merge(torch.tensor([[[1.0], [3.0], [5.0]]])).flatten().tolist())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="torch is lent by symbolic links, for which Windows asks an administrator")
def test_an_installed_engine_needs_torch_alone_and_passes_its_tests(built, tmp_path):
    """The wheel is installed in a new environment that sees torch's packages and no others, and is used there.

    Then the tests of the sdist run, away from any checkout. Their tools are lent; the engine is the installed one.
    """
    lent = tmp_path / "lent"
    lent.mkdir()
    for distribution in with_all_it_requires("torch").values():
        names = {file.parts[0] for file in distribution.files or () if ".." not in file.parts} - {"__pycache__"}
        for name in (name for name in names if not (lent / name).exists()):
            (lent / name).symlink_to(distribution.locate_file(name))
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "environment")
    python = install.venv_python(tmp_path / "environment")
    packages = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]).strip())
    (packages / "lent.pth").write_text(f"{lent}\n", encoding="utf-8")
    # with its requirements: pip would have to fetch what is missing, and may not
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--quiet", built["again"]],
        cwd=tmp_path)
    version, path, merged = run([python, "-c", USE], cwd=tmp_path).splitlines()
    assert version == tome_core.__version__ and Path(path).is_relative_to(packages) and merged == "[2.0, 5.0]"

    shutil.copytree(built["unpacked"] / "tests", tmp_path / "tests")
    tools = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    (packages / "tools.pth").write_text("".join(f"{folder}\n" for folder in tools), encoding="utf-8")
    assert run([python, "-c", "import tome_core; print(tome_core.__file__)"], cwd=tmp_path).strip() == path
    said = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--quick", *ENGINE_TESTS], cwd=tmp_path)
    assert int(re.search(r"(\d+) passed", said).group(1)) > MANY
