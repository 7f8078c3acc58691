"""Every network of the installed diffusers is known, or is refused by its name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import diffusers
import pytest
import torch

import tome_core
from tome_core.models.transformer import NAMES


def networks() -> Iterator[type]:
    """Those that may have attention over a picture; modules that lack a package are passed over."""
    for name in ("transformers", "unets"):
        package = importlib.import_module(f"diffusers.models.{name}")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            try:
                members = vars(importlib.import_module(module.name)).values()
            except (ImportError, RuntimeError):
                continue
            yield from (one for one in members if inspect.isclass(one) and one.__module__ == module.name
                        and issubclass(one, diffusers.ModelMixin))  # fmt: skip


@pytest.mark.slow
def test_every_network_of_diffusers_is_taken_or_refused_by_its_name():
    seen = 0
    for kind in networks():
        try:
            with torch.device("meta"):  # as large as it is, without memory
                model = kind()
        except (TypeError, ValueError):  # it has no sizes of its own
            continue
        seen += 1
        try:
            tome_core.patch(model).remove()
        except tome_core.UnsupportedModelError as error:
            assert kind.__name__ in str(error) and kind.__name__ not in NAMES
    assert seen > 40
