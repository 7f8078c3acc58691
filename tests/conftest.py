"""Every test has no network and one thread: with small tensors two threads only wait for each other."""

import gc
import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import pytest
import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; child processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
ROOT = Path(__file__).parents[1]


class PlainRoot:
    """The root, collected as a folder although it has ComfyUI's `__init__.py`, which must not be imported."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path, parent):
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out the tests marked slow: `install.py test` does")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes seconds, or starts programs; left out by --quick")
    config.addinivalue_line("markers", "pays: what costs more than it saves does not merge, as for users")
    config.addinivalue_line("markers", "bounded: a strength bounds the model's own error, as for users")
    # registered, because pytest does not call a conftest's own hooks for the folders above it
    config.pluginmanager.register(PlainRoot())


def pytest_collection_modifyitems(config, items):
    """Files with slow tests first: processes that share the files then end at about the same time."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    files = {item.path for item in slow}
    items.sort(key=lambda item: item.path not in files)
    if config.getoption("quick"):
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)


def pytest_terminal_summary(terminalreporter):
    """Print a line for each reason of skipped tests."""
    reasons = Counter(skip.longrepr[2].removeprefix("Skipped: ") for skip in terminalreporter.stats.get("skipped", ())
                      if isinstance(skip.longrepr, tuple))  # fmt: skip
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


def pytest_collection_finish():
    """Imported modules stay to the end, a million objects: the garbage collector need not scan them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A diffusers folder with random weights; copy it before changing it."""
    from tests.small_models.sd_pipelines import write_folder

    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def any_size_pays(request, monkeypatch):
    """Tests' pictures are so small that merging costs more than it saves; they merge unless a test is marked `pays`."""
    if not request.node.get_closest_marker("pays"):
        for name in [name for name in sys.modules if name.endswith("tome_core.engine.work")]:
            for function in ("pays", "pays_in_part"):
                monkeypatch.setattr(sys.modules[name], function, lambda *args: True)


@pytest.fixture(autouse=True)
def any_error_is_allowed(request, monkeypatch):
    """Random weights err more than trained ones: a strength does not bound this unless a test is marked `bounded`."""
    if not request.node.get_closest_marker("bounded"):
        for name in [name for name in sys.modules if name.endswith("tome_core.engine.own_error")]:
            monkeypatch.setattr(sys.modules[name], "allowed", lambda *args: float("inf"))


@pytest.fixture
def work(monkeypatch) -> list[str]:
    """The work for plans: "match" or "renew", one entry for each attention."""
    from tome_core.engine import state

    done, plain = [], state.match

    def noted(k, v, layout, rule, draw=None, old=None):
        done.append("match" if old is None else "renew")
        return plain(k, v, layout, rule, draw, old)

    monkeypatch.setattr(state, "match", noted)
    return done


@pytest.fixture
def fresh_compiler():
    """For a module that compiles: `pytestmark = pytest.mark.usefixtures("fresh_compiler")`."""
    from tome_core.models import compiled

    if not compiled.TRIED:
        pytest.skip("this torch's compiler is left alone")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def server(monkeypatch):
    """The double of ComfyUI's server, which receives the nodes' texts."""
    from tests.host_doubles.comfy import Server

    double = Server()
    monkeypatch.setitem(sys.modules, "server", double)
    return double


@pytest.fixture
def waits() -> list[str]:
    """The methods that waited for the device of `tests.watching.on_device` since the test began."""
    from tests.watching.on_device import OnDevice

    OnDevice.waits.clear()
    return OnDevice.waits


@pytest.fixture(scope="module")
def chromium():
    """A browser that reaches this machine alone."""
    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # fmt: skip
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("needs a Chromium: install it, or set CHROMIUM to its path")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, headless=True, args=flags)
        yield browser
        browser.close()
