"""Attentions that compute their scores by hand: merged by description, run by their own code on a stand-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, SlicedAttnProcessor
from torch import nn

from tests import conformance as laws
from tests.conformance import CHANNELS, DTYPES, HEADS, SIDE, attention, telling, tokens, way, why_left_alone
from tests.doubles import of_heads
from tome_core import MergePlan
from tome_core.attention import by_hand
from tome_core.attention.by_hand import ForwardOnStandIn, full_name, known_of, register
from tome_core.attention.merged import BIAS, OWN_BIAS


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale = HEADS, 0.3
        self.to_q, self.to_k, self.to_v = (nn.Linear(CHANNELS, CHANNELS, bias=False) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.Dropout(0.0))

    def of(self, x: torch.Tensor, context: torch.Tensor | None) -> list[torch.Tensor]:
        context = x if context is None else context
        return [of_heads(one, self.heads) for one in (self.to_q(x), self.to_k(context), self.to_v(context))]


class OwnScale(Projections):
    """Scales by an attribute; in pieces, with k scaled before; takes the output projection apart."""

    def forward(self, x, context=None):
        q, k, v = self.of(x, context)
        k = k * self.scale
        parts = [(piece @ k.transpose(-1, -2)).softmax(-1) @ v for piece in q.split(7, dim=2)]
        projection, dropout = self.to_out
        return dropout(projection(torch.cat(parts, 2).transpose(1, 2).flatten(2)))


class Masked(Projections):
    """Cuts heads by the width of its input, and adds a mask."""

    def forward(self, x, context=None, mask=None):
        q, k, v = self.of(x, context)
        logits = q @ k.transpose(-1, -2) * (x.shape[-1] // self.heads) ** -0.5
        return self.to_out(((logits if mask is None else logits + mask).softmax(-1) @ v).transpose(1, 2).flatten(2))


class _Adding(ForwardOnStandIn):
    adds_bias = True


class _Picky(_Adding):
    def problem(self, module: nn.Module, kwargs: dict[str, Any]) -> str | None:
        return "it is picky" if kwargs.get("picky") else None


KINDS = {OwnScale: (ForwardOnStandIn(by_attribute=True), OWN_BIAS), Masked: (_Adding(by_attribute=False), BIAS)}


@pytest.fixture(autouse=True)
def _described(monkeypatch):
    """As a host, or a user, makes its attentions known."""
    monkeypatch.setattr(by_hand, "_ENTRIES", dict(by_hand._ENTRIES))
    for kind, (known, _) in KINDS.items():
        register(full_name(kind.forward), known)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_keys_give_what_repeated_keys_give(kind):
    for dtype in DTYPES:
        assert way(telling(kind(), dtype), dtype, batches=(3,)) == KINDS[kind][1], dtype


@pytest.mark.parametrize("kind", [*KINDS, AttnProcessor, SlicedAttnProcessor])
def test_its_own_code_attends_to_merged_keys_and_the_module_stays_as_it_is(kind):
    """Without sizes, which are equal here."""
    made = kind() if kind in KINDS else attention(kind(3) if kind is SlicedAttnProcessor else kind())
    module, x = telling(made, torch.float64), tokens(2, torch.float64)
    plan = MergePlan(torch.arange(SIDE**2)[None] % 16, 16)
    known = known_of(type(getattr(module, "processor", None)).__call__) or known_of(type(module).forward)
    q, k, v = (layer(x) for layer in (module.to_q, module.to_k, module.to_v))
    before = dict(vars(module))
    with torch.no_grad():
        out = known.finish(module, known.attend(module, q, plan.merge(k), plan.merge(v), None, {}))
        with laws.grouped(laws.layers_called(module, lambda: module(x)), plan):
            expected = module(x)
    assert laws.far(out, expected) < 1e-12
    assert vars(module) == before


def test_an_attention_without_a_description_is_left_alone_and_the_function_is_named():
    by_hand._ENTRIES.clear()
    reason = f"{full_name(OwnScale.forward)} calls no attention function that is known"
    assert reason in why_left_alone(telling(OwnScale()))


def test_a_second_description_takes_the_place_of_the_first_and_may_refuse_a_call(monkeypatch):
    forward = Masked.forward
    monkeypatch.setattr(Masked, "forward", lambda self, x, picky=True: forward(self, x))
    register(full_name(Masked.forward), _Picky(by_attribute=False))
    assert "it is picky" in why_left_alone(telling(Masked()), picky=True)


def test_a_mask_or_tokens_of_others_are_left_alone():
    mask = torch.zeros(1, 1, 1, SIDE**2)
    assert "mask" in why_left_alone(telling(Masked()), context=tokens(3), mask=mask)
    assert "mask" in why_left_alone(telling(Masked()), mask=mask)
    reason = why_left_alone(telling(Masked()), context=tokens(3, count=20))
    assert "keys and values are not the picture's tokens" in reason
    assert way(telling(OwnScale()), batches=(2,), context=tokens(2)) == OWN_BIAS  # the tokens themselves
