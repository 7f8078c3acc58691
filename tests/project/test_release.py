"""A release: one version everywhere, and a wheel and a registry's pack that hold what they need."""

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import install
import tome_core
from tests.project import release
from tests.project.checkout import fresh, tracked

ROOT = Path(__file__).parents[2]


def run(command: list, **options) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False, env=environment, **options)  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_version_is_the_same_everywhere_and_told_without_torch():
    assert release.disagreements(f"v{tome_core.__version__}") == []
    # read without our code, as ComfyUI's Manager and pip do
    assert install.read_project(ROOT / "pyproject.toml")["project"]["version"] == tome_core.__version__
    printed = run([sys.executable, "-X", "importtime", "-m", "tests.project.release"], cwd=ROOT)
    assert printed.endswith(f"\n{tome_core.__version__}\n") and "torch" not in printed


def test_comfyuis_registry_gets_what_the_nodes_need_and_little_else():
    lines = (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    left_out = {line.removeprefix("/") for line in lines if line and not line.startswith("#")}
    needed = {*install.COMFYUI.copied, "install.py", "install_hosts.py"}  # the Manager runs the first
    harmless = {"README.md", "CHANGELOG.md", "docs", ".gitignore", ".comfyignore"}
    there = {name.split("/")[0] for name in tracked()}
    assert there - needed - harmless == left_out, "name it in .comfyignore, or in install_hosts.py if the nodes need it"


@pytest.mark.slow
def test_the_wheel_from_the_sdist_holds_the_engine_and_requires_torch(tmp_path):
    """The wheel is built from a copy, so that the checkout stays as it is."""
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("building needs setuptools 77 or newer, as pyproject.toml says")
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    run([sys.executable, "-c", code], cwd=fresh(tmp_path / "source"))
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check")
    run([sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", tmp_path, *tmp_path.glob("*.tar.gz")])
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    engine = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tome_core").rglob("*.py")}
    assert {name for name in files if ".dist-info/" not in name} == engine | {"tome_core/py.typed"}
    (metadata,) = (text.decode() for name, text in files.items() if name.endswith("/METADATA"))
    assert f"\nVersion: {tome_core.__version__}\n" in metadata
    assert re.findall(r"^Requires-Dist: (?!.*extra ==)(.*)$", metadata, re.M) == ["torch>=2.4"]
    assert any(name.endswith("licenses/LICENSE") for name in files)
