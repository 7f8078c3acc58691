"""For every test: no network, and one thread, because small tensors on two threads only wait for each other.

The repository's root holds an `__init__.py`, because ComfyUI asks for one; pytest has to overlook it.
"""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import pytest
import torch

torch.set_num_threads(1)
ROOT = Path(__file__).parents[1]


class PlainRoot:
    """Collects the root as a folder; as a package it would be imported, under the name of the user's clone."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path, parent):
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config):
    # registered, because a conftest's own hooks are not asked about the folders above it
    config.pluginmanager.register(PlainRoot())
