"""What cannot merge in a compiled model is left alone, and the report says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models import attention_processor
from diffusers.models.attention_processor import AttnProcessor, XFormersAttnProcessor
from torch import nn

import tome_core
from tests.compiling import LEAST, TINY, by_blocks, where_compilers_were_tried, whole
from tests.conformance import with_xformers
from tests.thoroughness import some_quick
from tests.tiny_transformers import STRONG
from tome_core.models import compiled as operators

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), where_compilers_were_tried]


@pytest.mark.parametrize("way", some_quick([whole, by_blocks]), ids=lambda way: way.__name__)
def test_a_call_that_cannot_merge_under_a_compiler_is_left_alone_and_the_report_says_why(way: Callable, monkeypatch):
    compiled = way(TINY, model := TINY.build())
    plain = TINY.call(compiled)

    def report_of(call: Callable[[], torch.Tensor]) -> str:
        with tome_core.patch(compiled, **STRONG) as handle:
            torch.testing.assert_close(call(), plain, rtol=0.1, atol=0.1)
        return str(handle.report())

    def with_gradients() -> torch.Tensor:
        model.requires_grad_()
        with monkeypatch.context() as patches:
            patches.setattr(torch, "no_grad", torch.enable_grad)
            out = TINY.call(compiled)
        out.sum().backward()
        assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())
        return out.detach()

    def under_autocast() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return TINY.call(compiled).float()

    assert "a backward pass may follow a compiled call" in report_of(with_gradients)
    assert "autocast is not supported in compiled models" in report_of(under_autocast)
    torch._dynamo.reset()
    monkeypatch.setattr(operators, "_TRIED", False)
    assert "merging was not tested with this torch's compiler" in report_of(lambda: TINY.call(compiled))


def test_an_exported_model_asks_nobody():
    def exported(*args: Any, **kwargs: Any) -> Any:
        return torch.export.export(model, args, kwargs).module()(*args, **kwargs)

    plain = LEAST.call(model := LEAST.build())
    with tome_core.patch(model, **STRONG) as handle:
        torch.testing.assert_close(LEAST.call(exported), plain)
        assert "exported models cannot depend on this package" in str(handle.report())
        assert not handle.report().merged_anything


def _wrapper(attention: nn.Module) -> None:
    own = attention.forward
    attention.forward = lambda *args, **kwargs: own(*args, **kwargs)


@pytest.mark.parametrize("change", some_quick([
    _wrapper, lambda attention: attention.set_processor(AttnProcessor()),
    lambda attention: attention.set_processor(XFormersAttnProcessor()),
]), ids=["a wrapper", "by hand", "by xformers"])  # fmt: skip
def test_an_attention_that_a_graph_cannot_ask_is_left_alone_and_named(change: Callable, monkeypatch):
    """The operator knows the arguments of torch's function; those of xformers' are others."""
    with_xformers(monkeypatch, attention_processor)
    model = LEAST.build()
    change(next(module for path, module in model.named_modules() if path.endswith("attn1")))
    with tome_core.patch(model, **STRONG) as handle:
        LEAST.call(model)
        assert not handle.report().reasons, "it merges without a compiler"
        handle.reset_counts()
        LEAST.call(whole(LEAST, model))
        (level,) = handle.report().levels
        assert level.calls_merged == level.blocks - 1
        assert "its function is not known in a compiled model" in str(handle.report())


@pytest.mark.parametrize("more", [{"proportional": False}, {"merge_crossattn": True, "merge_mlp": True}], ids=str)
def test_a_compiled_block_merges_in_its_self_attention_alone_and_says_so(more):
    """tomesd's rule merges there as many tokens, but those whose keys are alike."""
    settings = {"ratio": 0.5, **more}
    with tome_core.patch(eager := TINY.build(), **settings) as wanted:
        TINY.call(eager)
    with tome_core.patch(model := TINY.build(), **settings) as handle:
        assert TINY.call(whole(TINY, model)).isfinite().all()
    (level,), (expected,) = handle.report().levels, wanted.report().levels
    assert level.tokens == expected.tokens and level.work_saved == expected.work_saved
    reason = "its parts merge by a rule that compiled blocks do not follow"
    assert not level.mlp_tokens and (reason in level.traced) == ("merge_mlp" in more)
