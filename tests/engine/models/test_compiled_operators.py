"""The two operators of compiled models: what they promise a compiler, one definition for a process, and the way of a
call's arguments through a graph.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import tome_core
from tests import tiny_transformers
from tests.compiling import TINY, where_compilers_were_tried
from tests.least_unet import FEW, KEPT, build, call, draw, same
from tests.tiny_transformers import STRONG
from tome_core.models import compiled
from tome_core.models.compiled import pack, unpack
from tome_core.models.sites import AttentionSite, ModelSite
from tome_core.models.wrap import wrap_of

pytestmark = where_compilers_were_tried


def test_what_is_packed_is_unpacked():
    tensor = torch.zeros(1)
    values = [tensor, None, 3, [(1, 2, 3), [tensor], ()], (7,), True]
    form, tensors, numbers = pack(values)
    assert unpack(form, tensors, numbers) == values and len(tensors) == 2
    assert pack([{}]) is None and pack(["word"]) is None
    assert pack([0.5, 2]) == ("ti", [torch.tensor(0.5)], [2]), "of a fraction a graph takes any"


def first_site(model: nn.Module, kind: type) -> Any:
    wraps = (wrap_of(vars(module).get("forward")) for module in model.modules())
    return next(wrap for wrap in wraps if isinstance(wrap, kind))


@torch.no_grad()
def check(name: str, *arguments: Any) -> None:
    torch.library.opcheck(compiled.OPERATORS[name], arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("build", [TINY.build, lambda: tiny_transformers.build("Wan")], ids=["UNet", "transformer"])
def test_operators_give_what_a_compiler_was_told(build: Any):
    """An attention's output lies as it was said, and is nobody else's memory, which a compiler may write over."""
    tome_core.patch(model := build(), **STRONG)
    number = first_site(model, AttentionSite).number
    for by_head in (False, True):
        q, k, v = (torch.randn(1, 2, 24, 16) if by_head else torch.randn(1, 24, 2, 16) for _ in range(3))
        check("attend", number, number, q, k, v, None, by_head, None, False, "")
    if build is TINY.build:
        check("begin", first_site(model, ModelSite).number, "tt", [torch.randn(1, 16, 8, 8), torch.tensor(5)], [])


def test_a_compiler_may_write_over_what_it_was_given(monkeypatch, fresh_compiler):
    """An operator's results are the graph's own, and memory is used again."""
    given, plain = [], AttentionSite.answers
    monkeypatch.setattr(AttentionSite, "answers", lambda *args: given.append(plain(*args)) or given[-1])
    with tome_core.patch(model := build(1), KEPT) as handle:
        expected = draw(model, handle)
    with tome_core.patch(model := build(1), KEPT) as handle:
        model.compile(backend="eager", fullgraph=True)
        pictures = []
        for number, time in enumerate(FEW):
            handle.set_time(timestep=time, sampling="a")
            pictures.append(call(model, seed=number))
            for one in given:
                one.zero_()
    assert given and same(pictures, expected)


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
