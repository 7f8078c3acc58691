"""What tests of several rooms of the engine ask for by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.sized_attention import MergedAttention
from tome_core.attention import sizes
from tome_core.attention.core import Attended, attend_merged
from tome_core.unet import parts


@pytest.fixture
def fresh_compiler():
    """For a module that compiles: `pytestmark = pytest.mark.usefixtures("fresh_compiler")`."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("words")


@pytest.fixture
def build(words) -> Callable:
    """Makes pipelines of diffusers: `tests.pipelines.make`, which is imported where it is wanted."""
    from tests import pipelines

    return partial(pipelines.make, words)


@pytest.fixture
def load(words, tmp_path) -> Callable:
    """Loads adapters into a pipeline: `tests.pipelines.load`."""
    from tests import pipelines

    return partial(pipelines.load, words, tmp_path)


@pytest.fixture
def attended(monkeypatch) -> list[MergedAttention]:
    """What every merged self-attention that is known was asked and answered."""
    calls = []

    def note(known, module, x, keys, values, plan, kwargs, *made) -> Attended:
        done = attend_merged(known, module, x, keys, values, plan, kwargs, *made)
        calls.append(MergedAttention(module, plan, done.way, x, keys, done.out))
        return done

    monkeypatch.setattr(parts, "attend_merged", note)
    return calls


@pytest.fixture
def wide_heads(monkeypatch):
    """Wider heads wherever they fit, as in large pictures on a GPU; else a CPU takes the bias."""
    monkeypatch.setattr(sizes, "_BIAS_UP_TO", {"cpu": 0})
