"""The two operators of compiled models: what they promise a compiler, and one definition for a process."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

import tome_core
from tests import tiny_transformers
from tests.compiling import LEAST, where_compilers_were_tried
from tests.least_unet import FEW, KEPT, build, call, draw, same
from tests.tiny_transformers import STRONG
from tome_core.models import compiled
from tome_core.models.sites import AttentionSite, ModelSite
from tome_core.models.wrap import wrap_of

pytestmark = where_compilers_were_tried


def sites(model, kind) -> list:
    wraps = (wrap_of(vars(module).get("forward")) for module in model.modules())
    return [wrap for wrap in wraps if isinstance(wrap, kind)]


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("build", [LEAST.build, lambda: tiny_transformers.build("Wan")], ids=["UNet", "transformer"])
def test_an_attentions_output_lies_as_the_compiler_was_told(build, by_head: bool):
    """And is nobody else's memory, which a compiler may write over."""
    tome_core.patch(model := build(), **STRONG)
    site = sites(model, AttentionSite)[0]
    q, k, v = (torch.randn(1, 2, 24, 16) if by_head else torch.randn(1, 24, 2, 16) for _ in range(3))
    with torch.no_grad():
        torch.library.opcheck(
            compiled.OPERATORS["attend"], (site.number, site.number, q, k, v, None, by_head, None, False, ""),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def test_the_operator_of_a_call_is_what_a_compiler_was_told():
    tome_core.patch(model := LEAST.build(), **STRONG)
    (site,) = sites(model, ModelSite)
    with torch.no_grad():
        torch.library.opcheck(
            compiled.OPERATORS["begin"], (site.number, "tt", [torch.randn(1, 4, 16, 16), torch.tensor(5)], []),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def test_a_compiler_may_write_over_what_it_was_given(monkeypatch):
    """An operator's results are the graph's own, and memory is used again."""
    given, plain = [], AttentionSite.answers
    monkeypatch.setattr(AttentionSite, "answers", lambda *args: given.append(plain(*args)) or given[-1])
    torch._dynamo.reset()
    with tome_core.patch(model := build(), KEPT) as handle:
        expected = draw(model, handle)
    with tome_core.patch(model := build(), KEPT) as handle:
        model.compile(backend="eager", fullgraph=True)
        found = []
        for number, time in enumerate(FEW):
            handle.set_time(timestep=time, sampling="a")
            found.append(call(model, seed=number))
            for one in given:
                one.zero_()
    assert given and same(found, expected)


def _copy_of_the_engine():
    spec = importlib.util.spec_from_file_location("tome_core.models.another", compiled.__file__)
    another = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(another)
    return another


def test_copies_of_the_engine_share_the_operators_and_no_number():
    """As where two hosts in one process bring one each, or a webui reloads it: torch takes a name once."""
    modules, numbers = [torch.nn.Module() for _ in range(2)], []
    for module in modules:
        another = _copy_of_the_engine()
        assert not another.OPERATORS
        numbers += [int(one.number_of(module)) for one in (another, compiled)]
        assert another.OPERATORS == compiled.OPERATORS != {}
    assert len(set(numbers)) == 4


def test_where_torch_cannot_be_told_of_the_operators_no_graph_merges_until_it_can(monkeypatch):
    """A host's module that raises when torch looks at it: graphs ask from the first site after it is gone."""

    def refuse(*_, **__):
        raise AttributeError("type object '__file__' has no attribute 'endswith'")

    other = _copy_of_the_engine()
    monkeypatch.setattr(other, "_NAMESPACE", "tome_core_test")
    state = tome_core.patch(LEAST.build(), **STRONG)
    with monkeypatch.context() as broken:
        broken.setattr(torch.library, "register_fake", refuse)
        other.number_of(torch.nn.Module())
        with torch.no_grad():
            assert not other.OPERATORS and other.why_not_in_graph(state) is not None
    other.number_of(torch.nn.Module())
    with torch.no_grad():
        assert other.OPERATORS and other.why_not_in_graph(state) is None
    sys.modules.pop("_tome_core_test_operators").library._destroy()
