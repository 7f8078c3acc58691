"""The Triton kernels without a GPU: their laws, their code, and what happens if Triton is missing or broken."""

import logging
import os
import platform
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import install
import tome_core
from tests.small_models.unets import small
from tome_core import MergePlan
from tome_core.merging import kernels
from tome_core.merging.kernels.proof import _CHECKS
from tome_core.merging.methods.base import best_keys

ROOT = Path(__file__).parents[3]
PINS = ROOT / "tests/requirements-triton.txt"
NO_TESTS_RAN = 5  # pytest's exit code if a whole file was skipped


@pytest.fixture(scope="module")
def triton(request, tmp_path_factory) -> str:
    """A folder to find Triton in: none if torch brought it along, else one in pytest's cache folder."""
    if find_spec("triton") is not None:
        return ""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("needs Triton, which is not installed and whose wheels are for Linux on x86-64")
    cache = getattr(request.config, "cache", None)  # pytest may have no cache
    folder = cache.mkdir("triton") if cache else tmp_path_factory.mktemp("triton")
    mark, stamp = install.fingerprint(sys.version, [PINS.read_text(encoding="utf-8")]), folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != mark:
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--upgrade"]
        command += ["--no-deps", "--only-binary=:all:", "--target", str(folder), "-r", str(PINS)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs Triton, and pip could not install it: {' '.join(done.stderr.splitlines()[-2:])}")
        stamp.write_text(mark)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("arguments, interpret", [
    (("pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/kernels/laws.py"), "1"),
    (("tests.kernels.compiled_code",), "0"),
    (("pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/direct_launches.py"), "0")],
                         ids=["keep their laws in Triton's interpreter", "compile for GPUs that are not here",
                              "are launched as Triton launches"])
def test_the_kernels(arguments, interpret, triton, tmp_path):
    paths = filter(None, (triton, os.environ.get("PYTHONPATH")))
    variables = {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": interpret}
    command, environment = [sys.executable, "-m", *arguments], os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode == NO_TESTS_RAN:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]


@pytest.fixture
def put_in_place(monkeypatch):
    """Treat the CPU as a device with kernels; each launch calls the given function."""
    values = {"DEVICES": ("cpu",), "_is_loaded": False, "_kernels": None, "_why_off": "", "_off": {},
              "_verified": set()}  # fmt: skip
    for name, value in values.items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.delitem(sys.modules, "tome_core.merging.kernels.triton_kernels", raising=False)
    monkeypatch.delattr("tome_core.merging.kernels.triton_kernels", raising=False)
    monkeypatch.delenv("TOME_CORE_TRITON", raising=False)

    def put(launch):
        monkeypatch.setattr(kernels, "_is_loaded", True)
        monkeypatch.setattr(kernels, "_kernels", SimpleNamespace(**dict.fromkeys(_CHECKS, launch)))

    return put


X, KEYS = (torch.randn(2, count, 4, generator=torch.Generator().manual_seed(count)) for count in (20, 6))


def work(x=X):
    """A match's search and a merge."""
    plan = MergePlan(torch.arange(20)[None] % 7, 7)
    return (*best_keys(x, torch.arange(5)[None], KEYS), plan.merge(x))


def assert_as_torch():
    results = work()
    with kernels.kernels_off():
        assert all(map(torch.equal, results, work()))


@pytest.mark.parametrize("why", ["it is missing", "its import fails", "it is not wanted", "it cannot launch"])
def test_without_triton_torchs_operators_do_the_same_and_it_is_said_once(put_in_place, monkeypatch, caplog, why):
    launch = Mock(side_effect=RuntimeError("no C compiler"))
    if why == "it is not wanted":
        monkeypatch.setenv("TOME_CORE_TRITON", "0")
    elif why == "it cannot launch":
        put_in_place(launch)
    else:  # None makes an import an ImportError; an empty module lacks the names that are imported from it
        monkeypatch.setitem(sys.modules, "triton", None if why == "it is missing" else SimpleNamespace())
    with caplog.at_level(logging.DEBUG, "tome_core.merging.kernels"):
        assert_as_torch()
        assert_as_torch()
    assert len(caplog.records) == (0 if why == "it is not wanted" else launch.call_count or 1)
    assert all(record.levelno == logging.DEBUG for record in caplog.records)
    assert launch.call_count == len(kernels._off) == (2 if why == "it cannot launch" else 0)
    with tome_core.patch(small()) as handle:
        report = str(handle.report())
    if why == "it cannot launch":
        assert report.count("no C compiler") == 1 and "kernels best_keys, mean_rows are off" in report
    assert "kernels" in report, "a user is told why there are none"


def test_a_lack_of_memory_passes(put_in_place):
    """One launch falls back on torch's operators, the next uses the kernel again, and the report has no note."""
    launch = Mock(side_effect=torch.cuda.OutOfMemoryError("CUDA out of memory"))
    put_in_place(launch)
    assert_as_torch()
    assert launch.call_count > 1 and not kernels.notes()


def test_while_a_graph_is_recorded_only_what_has_been_proven_is_launched(put_in_place, monkeypatch):
    launch = Mock()
    put_in_place(launch)
    monkeypatch.setattr(kernels, "find_fault", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: nullcontext())
    x = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16)
    assert not kernels.launch(x, ("correct", 40)) and not launch.called
    kernels._verified.add(("correct", 40, x.device, x.dtype))
    assert kernels.launch(x, ("correct", 40)) and launch.called


@pytest.mark.parametrize("count", [1, 2])
def test_the_tensors_device_is_made_current_if_there_is_another(count, put_in_place, monkeypatch):
    """Making it current costs the host time, which a single device saves."""
    events, x = [], SimpleNamespace(device=torch.device("cuda", 6 + count), dtype=torch.float16)
    put_in_place(lambda: events.append("launch"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: events.append(tensor) or nullcontext())
    kernels._verified.add(("correct", x.device, x.dtype))
    assert kernels.launch(x, ("correct",)) and events == [x, "launch"][-count:]


def test_what_torch_does_on_a_card_for_want_of_a_kernel_is_told(monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda device: True)
    monkeypatch.setattr(kernels, "_by_torch", {})
    before = kernels.notes()
    assert all(kernels.corrects(torch.empty(1, 4, 2, width, dtype=torch.float16)) for width in (40, 160, 256))
    assert kernels.notes() == before
    assert not kernels.corrects(torch.empty(1, 4, 2, 512, dtype=torch.float16))
    assert not any(kernels.corrects(torch.empty(1, 4, 2, 64)) for _ in range(2))
    wide, exact = kernels.notes()[len(before):]
    assert "heads of 512 channels" in wide and "256" in wide and "torch.float32" in exact and "half" in exact


@pytest.mark.parametrize("capability, version, supported", [
    ((7, 5), (3, 9), False), ((8, 0), (3, 0), True), ((9, 0), (3, 1), False), ((9, 0), (3, 2), True),
    ((12, 0), (3, 1), False),
])  # fmt: skip
def test_an_old_triton_compiles_nothing_for_a_gpu_for_which_it_would_end_the_process(
    capability, version, supported, monkeypatch):  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "_module", lambda: SimpleNamespace(TRITON=version))
    monkeypatch.setattr(kernels, "_by_torch", {})
    assert kernels._supports.__wrapped__(torch.device("cuda")) == supported
    assert ["Triton 3.2" in note for note in kernels.notes()] == [True] * (capability >= (9, 0) and not supported)
