"""What makes the embedded models worth measuring on: heads that look at few keys, and a loss that needs them."""

from __future__ import annotations

import pytest
import torch

from demo import attention, model, training_loss
from tests import tiny_scenes


@pytest.fixture
def random_model():
    return tiny_scenes.make()


def uniform(scene_model):
    """The same model with queries of zero: every head averages over all keys."""
    with torch.no_grad():
        for module in attention.level_0(scene_model):
            module.to_q.weight.zero_()
    return scene_model


def test_a_head_that_averages_uses_all_keys_and_a_head_that_looks_up_uses_few(random_model):
    heads = sum(module.heads for module in attention.level_0(random_model))
    with torch.no_grad():
        for module in attention.level_0(random_model):
            module.to_q.weight.mul_(1000)
    assert max(attention.effective_keys(random_model, 1)) < 0.01
    assert attention.effective_keys(uniform(random_model), 1) == pytest.approx([1.0] * heads, abs=0.01)


def test_measuring_leaves_the_model_and_attention_that_gives_nothing_is_worth_nothing(random_model):
    before = training_loss.held_out_loss(random_model, 1)
    attention.effective_keys(random_model, 1)
    assert attention.loss_rise(random_model, 1) != 0
    assert training_loss.held_out_loss(random_model, 1) == before
    assert not any("forward" in vars(module) for module in attention.level_0(random_model))
    with torch.no_grad():
        for module in attention.level_0(random_model):
            module.to_out[0].weight.zero_()
            module.to_out[0].bias.zero_()
    assert attention.loss_rise(random_model, 1) == 0


def test_a_sharp_start_tells_like_tokens_from_unlike_tokens(random_model):
    torch.manual_seed(0)
    attention.start_sharp(random_model)
    module = attention.level_0(random_model)[0]
    x = torch.nn.functional.layer_norm(torch.randn(200, 32), [32])
    broad, sharp = ((module.to_q(x)[:, head] @ module.to_k(x)[:, head].T) for head in (slice(16), slice(16, 32)))
    assert sharp.diagonal().mean() > 3 * sharp.std()
    assert broad.diagonal().mean().abs() < 3 * broad.std()


def test_training_sees_how_broad_the_sharp_heads_are_and_makes_them_sharper_if_there_is_something_to_see(random_model):
    batch = training_loss.Scenes(0, 2, 32)[0]
    with attention.record_breadths(uniform(random_model)) as breadths:
        training_loss.v_loss(random_model, batch, torch.tensor([100, 900]), torch.Generator())
    assert [tuple(breadth.shape) for breadth in breadths] == [(2, 1)] * 3
    torch.testing.assert_close(torch.cat(breadths), torch.zeros(6, 1), atol=1e-3, rtol=0)  # all of the keys
    broad, sharp = torch.zeros(2, 1, requires_grad=True), torch.full((2, 1), -5.0, requires_grad=True)
    attention.broadness([broad, sharp], torch.tensor([100, 900])).backward()
    assert (broad.grad > 0).flatten().tolist() == [True, False]  # less of it at time 100, as it is at 900
    assert not sharp.grad.any()


def test_training_may_look_at_some_keys_alone(random_model):
    seen = slice(3, None, 8)
    module = attention.level_0(random_model)[0]
    x = torch.randn(1, 64, 32)
    with attention.record_breadths(random_model, seen):
        some = module(x)
    torch.testing.assert_close(some, module(x, x[:, seen]))
    assert not torch.allclose(some, module(x))


def test_gates_say_what_was_missed():
    good, bad = attention.Gates((0.1, 0.9, 0.9, 0.9, 0.9), 0.31), attention.Gates((0.21, 0.9), 0.29)
    assert good.passed() and "MISSED" not in str(good)
    assert not bad.passed() and str(bad).count("MISSED") == 2
    assert not attention.Gates((0.1, 0.9, 0.9, 0.9, 0.9), 0.29).passed()
    assert not attention.Gates((0.1, 0.9, 0.9, 0.9, 0.9, 0.9), 0.5).passed()


@pytest.mark.slow
def test_the_shipped_models_pass_their_gates_and_look_at_different_things():
    """On fewer pictures than `gates` takes."""
    first, second = map(model.load, model.CHECKPOINTS)
    for scene_model in (first, second):
        measured = attention.Gates(attention.effective_keys(scene_model, 1), attention.loss_rise(scene_model, 4))
        assert measured.passed(), str(measured)
    pairs = zip(attention.level_0(first), attention.level_0(second), strict=True)
    assert all((a.to_q.weight - b.to_q.weight).abs().mean() > 0.05 for a, b in pairs)
