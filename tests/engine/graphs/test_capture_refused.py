"""Calls that no graph can hold are made as they are, and it is said; models whose calls no graph can hold are refused.

By the stand-in for CUDA graphs of `recorded_operators`, as `test_capture`.
"""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests.least_unet import FEW, KEPT, TIMES, build, call, draw, same
from tests.recorded_operators import counts, first_block, kinds, recorded
from tome_core import MergeConfig
from tome_core.diffusers_hooks import TokenMergingConfig, apply_token_merging
from tome_core.graphs.model_state import WRAPPED
from tome_core.running import gate, latch


def test_on_a_cpu_calls_are_made_as_they_are_and_it_is_said_once(caplog):
    plain, model = build(), build()
    eager, handle = tome_core.patch(plain, KEPT), tome_core.patch(model, KEPT)
    with tome_core.capture(model) as graphs:
        assert same(draw(model, handle), draw(plain, eager)) and counts(handle) == counts(eager)
        assert not graphs.graphs and sum(graphs.plain_calls.values()) == len(FEW)
    said = [one.getMessage() for one in caplog.records]
    assert said == [
        "tome_core.capture: the UNet is called without a graph: its latents are on cpu, and graphs are CUDA's; move it "
        "to a CUDA device."
    ]


def test_what_may_change_unseen_is_not_recorded():
    model, x, text = build(), torch.randn(1, 16, 8, 8), torch.randn(1, 5, 24)
    with recorded(model) as graphs:
        with torch.no_grad(), pytest.raises(TypeError):
            model(x, torch.tensor([5.0]), text, stranger=object())
        assert list(graphs.plain_calls) == ["an argument or a result is of class object, which may change unseen"]


def test_calls_that_no_graph_fits_are_made_as_they_are():
    model, x, text = build(), torch.randn(1, 16, 8, 8), torch.randn(1, 5, 24)
    expected = model(x, torch.tensor([5.0]), text)
    with recorded(model) as graphs:
        assert torch.equal(model(x, torch.tensor([5.0]), text), expected)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(x, torch.tensor([5.0]), text)
        assert [why.split(";")[0] for why in graphs.plain_calls] == ["a backward pass may follow", "autocast is on"]
        assert not graphs.graphs


def two_with(projection):
    """Two equal models in which it makes queries."""
    models = build(), build()
    for one in models:
        torch.manual_seed(0)
        first_block(one).attn1.to_q = projection(16, 16).requires_grad_(False)
    return models


def test_a_model_that_asks_its_host_is_called_as_it_is(caplog):
    class Asks(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1.0 if float(x.sum()) > 0 else 0.5)

    plain, model = two_with(Asks)
    with recorded(model) as graphs:
        for seed in range(6):
            assert torch.equal(call(model, seed=seed), call(plain, seed=seed))
        (why,) = graphs.plain_calls
        assert "_local_scalar_dense waits for the device" in why and not graphs.graphs
    assert len(caplog.records) == 1


def test_a_model_that_counts_its_calls_is_called_as_it_is():
    class Counts(torch.nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    plain, model = two_with(Counts)
    with recorded(model) as graphs:
        call(model)  # made thrice
        assert first_block(model).attn1.to_q.calls == 3 and not graphs.graphs
        first_block(plain).attn1.to_q.calls = 3
        for seed in range(3):
            assert torch.equal(call(model, seed=seed), call(plain, seed=seed))
        assert graphs.plain_calls == {"its calls change attributes of its modules, which replayed ones would not": 4}
        assert graphs.backend.recorded == 1


NO_GRAPH = {
    'torch.compile(mode="reduce-overhead") records graphs by itself': lambda model: model.compile(backend="eager"),
    "accelerate moves": lambda model: setattr(first_block(model), "_hf_hook", object()),
    "somebody's hook lies on a BasicTransformerBlock":
        lambda model: first_block(model).register_forward_hook(lambda *_: None),
    "somebody's wrapper lies on a BasicTransformerBlock":
        lambda model: setattr(first_block(model), "forward", lambda *args, **kwargs: None),
}  # fmt: skip


@pytest.mark.parametrize("says", NO_GRAPH)
def test_models_that_no_graph_can_hold_are_refused_and_later_left_alone(says):
    model = build()
    with recorded(model) as graphs:
        call(model)
        NO_GRAPH[says](model)
        if "moves" in says or "hook" in says:
            call(model)
            assert len(graphs.plain_calls) == 1 and says in next(iter(graphs.plain_calls))
            assert not graphs.graphs
    with pytest.raises(ValueError, match="cannot be captured") as refused:
        tome_core.capture(model)
    assert says in str(refused.value)
    assert "_tome_core_capture" not in vars(model)


def test_what_is_put_on_above_decides_at_each_call_and_what_lies_beneath_is_not_recorded():
    plain, model = build(), build()
    seen, pictures = [], []

    def wrap(unet, forward):
        def above(x, *args, **kwargs):
            seen.append(unet)
            return forward(x * (len(seen) % 3), *args, **kwargs)

        unet.forward = above

    with recorded(model) as graphs:
        for one in (model, plain):
            seen.clear()
            wrap(one, one.forward)
            pictures.append([call(one, seed=seed) for seed in range(4)])
            assert len(seen) == 4
        assert same(*pictures)
        assert graphs.backend.recorded == 1 and graphs.backend.replays == 4 and not graphs.plain_calls
        with tome_core.patch(model, KEPT) as handle:  # on top of that wrapper, which so lies beneath
            call(model)
            assert handle.report().merged_anything
            assert graphs.plain_calls == {WRAPPED: 1}


def test_a_hook_of_diffusers_lies_above_a_capture():
    settings = TokenMergingConfig(settings={"ratio": 0.5, "side": "kv", "keep": 100.0})
    plain, model, found = build(), build(), []
    with recorded(model) as graphs:
        for one in (plain, model):
            apply_token_merging(one, settings)
            found.append([call(one, seed=int(time), time=time) for time in TIMES])
        assert same(*found) and not graphs.plain_calls and {"new", "kept"} <= set(kinds(graphs))


def test_a_compiled_wrapper_is_refused_and_so_is_a_limit_that_is_none():
    with pytest.raises(ValueError, match="reduce-overhead"):
        tome_core.capture(torch.compile(build(), backend="eager"))
    for limit in (0, True, 2.0):
        with pytest.raises(ValueError, match="no number of graphs"):
            tome_core.capture(build(), limit=limit)
    with pytest.raises(TypeError):
        tome_core.capture(3)


def test_no_more_graphs_are_held_than_were_asked_for(caplog):
    plain, model = build(), build()
    eager, handle = tome_core.patch(plain, KEPT), tome_core.patch(model, KEPT)
    with recorded(model, limit=2) as graphs:
        for name in ("a", "b"):
            assert same(draw(model, handle, name=name), draw(plain, eager, name=name))
            assert len(graphs.graphs) == 2
        assert graphs.backend.recorded > 3
    assert [one.getMessage()[:40] for one in caplog.records] == ["tome_core.capture: 2 graphs are held, th"]


# --- whether it pays --------------------------------------------------------------------------------------------------


def test_a_card_that_waits_for_its_host_in_eager_calls_merges_in_replayed_ones(monkeypatch):
    monkeypatch.setattr(latch, "is_host_bound", lambda *_: True)
    monkeypatch.setitem(gate._LEAST, "cpu", 1)
    config = MergeConfig(side="kv", ratio=0.75, only_if_it_pays=True, keep=100.0)
    model = build()
    with tome_core.patch(model, config) as handle:
        draw(model, handle)
        assert not handle.report().merged_anything
        with recorded(model):
            draw(model, handle)
            assert handle.report().merged_anything
            handle.set_time()
            with pytest.raises(RuntimeError, match="the UNet is captured"):
                handle.measure(64, 64)
