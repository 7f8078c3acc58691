"""The two operators of compiled models: what they promise a compiler, and one definition for a process."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import tome_core
from tests.compiling import TINY, where_compilers_were_tried
from tests.tiny_transformers import STRONG, Transformer
from tests.traces import wraps_of
from tome_core.models import compiled
from tome_core.models.sites import AttentionSite

pytestmark = where_compilers_were_tried


@torch.no_grad()
def check(name: str, *arguments: Any) -> None:
    torch.library.opcheck(compiled.OPERATORS[name], arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("one", [TINY, Transformer("Wan")], ids=lambda one: one.name)
def test_operators_give_what_a_compiler_was_told(one: Any):
    """An attention's output lies as it was said, and is nobody else's memory, which a compiler may write over."""
    wraps = wraps_of(tome_core.patch(one.build(), **STRONG))
    number = next(wrap.number for wrap in wraps if isinstance(wrap, AttentionSite))
    for by_head in (False, True):
        q, k, v = (torch.randn(1, 2, 24, 16) if by_head else torch.randn(1, 24, 2, 16) for _ in range(3))
        check("attend", number, number, q, k, v, None, by_head, None, False, "")
    if one is TINY:
        check("begin", wraps[0].number, "tt", [torch.randn(1, 16, 8, 8), torch.tensor(5)], [])


# --- one definition for a process -------------------------------------------------------------------------------------


def _copy_of_the_engine() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tome_core.models.another", compiled.__file__)
    another = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(another)
    return another


def test_copies_of_the_engine_share_the_operators_and_no_number():
    """As if two hosts in one process bring one each, or a webui reloads it: torch takes a name once."""
    modules, numbers = [nn.Module() for _ in range(2)], []
    for module in modules:
        another = _copy_of_the_engine()
        assert not another.OPERATORS
        numbers += [int(one.number_of(module)) for one in (another, compiled)]
        assert another.OPERATORS == compiled.OPERATORS != {}
    assert len(set(numbers)) == 4


def test_if_torch_refuses_the_operators_no_graph_merges_until_it_takes_them(monkeypatch):
    """A host's module that raises when torch looks at it: graphs ask from the first site after it is gone."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AttributeError("type object '__file__' has no attribute 'endswith'")

    other = _copy_of_the_engine()
    monkeypatch.setattr(other, "_NAMESPACE", "tome_core_test")
    state = tome_core.patch(TINY.build(), **STRONG)
    with monkeypatch.context() as broken:
        broken.setattr(torch.library, "register_fake", refuse)
        other.number_of(nn.Module())
        with torch.no_grad():
            assert not other.OPERATORS and other.why_not_in_graph(state) is not None
    other.number_of(nn.Module())
    with torch.no_grad():
        assert other.OPERATORS and other.why_not_in_graph(state) is None
    sys.modules.pop("_tome_core_test_operators").library._destroy()
