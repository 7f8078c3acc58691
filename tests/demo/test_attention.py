"""What makes the embedded models worth measuring on: heads that look at few keys, and a loss that needs them."""

from __future__ import annotations

import pytest
import torch

from demo import attention, model, scene_background, scene_wall, training_loss
from demo.scene_canvas import Canvas


def uniform(made):
    """The same model with queries of zero: every head averages over all keys."""
    with torch.no_grad():
        for module in attention.level_0(made):
            module.to_q.weight.zero_()
    return made


def test_a_head_that_averages_uses_all_keys_and_one_that_looks_up_uses_few():
    torch.manual_seed(0)
    assert attention.effective_keys(uniform(model.SceneModel()), 1) == pytest.approx([1.0] * 6, abs=0.01)
    sharp = model.SceneModel()
    with torch.no_grad():
        for module in attention.level_0(sharp):
            module.to_q.weight.mul_(1000)
    assert max(attention.effective_keys(sharp, 1)) < 0.01


def test_attention_that_gives_nothing_is_worth_nothing():
    torch.manual_seed(0)
    made = model.SceneModel()
    with torch.no_grad():
        for module in attention.level_0(made):
            module.to_out[0].weight.zero_()
            module.to_out[0].bias.zero_()
    assert attention.loss_rise(made, 1) == 0


def test_watching_leaves_the_model_as_it_was():
    made = model.load()
    before = training_loss.held_out_loss(made, 1)
    attention.effective_keys(made, 1)
    attention.loss_rise(made, 1)
    assert training_loss.held_out_loss(made, 1) == before
    assert not any("forward" in vars(module) for module in attention.level_0(made))


def test_a_sharp_start_tells_like_tokens_from_unlike_ones():
    torch.manual_seed(0)
    made = model.SceneModel()
    attention.start_sharp(made)
    module = attention.level_0(made)[0]
    x = torch.nn.functional.layer_norm(torch.randn(200, 32), [32])
    broad, sharp = ((module.to_q(x)[:, head] @ module.to_k(x)[:, head].T) for head in (slice(16), slice(16, 32)))
    assert sharp.diagonal().mean() > 3 * sharp.std()
    assert broad.diagonal().mean().abs() < 3 * broad.std()


def test_training_sees_how_broad_the_sharp_heads_are():
    torch.manual_seed(0)
    made = uniform(model.SceneModel())
    with attention.record_breadths(made) as breadths:
        training_loss.v_loss(made, training_loss.Scenes(0, 2, 32)[0], torch.tensor([100, 900]), torch.Generator())
    assert [tuple(breadth.shape) for breadth in breadths] == [(2, 1)] * 3
    torch.testing.assert_close(torch.cat(breadths), torch.zeros(6, 1), atol=1e-3, rtol=0)  # all of the keys


def test_a_head_that_is_broad_where_there_is_something_to_see_is_told_to_be_sharper():
    broad, sharp = torch.zeros(2, 1, requires_grad=True), torch.full((2, 1), -5.0, requires_grad=True)
    attention.broadness([broad, sharp], torch.tensor([100, 900])).backward()
    assert (broad.grad > 0).flatten().tolist() == [True, False]  # less of it at time 100, as it is at 900
    assert not sharp.grad.any()


def test_training_may_look_at_some_keys_alone():
    torch.manual_seed(0)
    made, seen = model.SceneModel(), slice(3, None, 8)
    module = attention.level_0(made)[0]
    x = torch.randn(1, 64, 32)
    with attention.record_breadths(made, seen):
        some = module(x)
    torch.testing.assert_close(some, module(x, x[:, seen]))
    assert not torch.allclose(some, module(x))


def test_gates_say_what_was_missed():
    good, bad = attention.Gates((0.1, 0.9, 0.9, 0.9, 0.9), 0.31), attention.Gates((0.21, 0.9), 0.29)
    assert good.passed() and "MISSED" not in str(good)
    assert not bad.passed() and str(bad).count("MISSED") == 2
    assert not attention.Gates((0.1, 0.9, 0.9, 0.9, 0.9), 0.29).passed()
    assert not attention.Gates((0.1, 0.9, 0.9, 0.9, 0.9, 0.9), 0.5).passed()


def test_a_wall_shows_a_few_colours_again_and_again():
    canvas = Canvas({"sky": torch.zeros(20, dtype=torch.int64)}, torch.Generator().manual_seed(0), 128)
    scene_wall.paint(canvas, scene_background.Setting(None, torch.ones(1, 1, 1, 3), None))
    colours = [torch.unique(picture.flatten(0, 1), dim=0) for picture in canvas.image]
    with_wall = [len(found) - 1 for found in colours if len(found) > 1]  # one colour is the bare canvas
    assert len(with_wall) in range(2, 14)
    assert all(2 < count <= scene_wall.SHADES for count in with_wall)


@pytest.mark.slow
@pytest.mark.parametrize("weights", model.CHECKPOINTS, ids=lambda path: path.stem)
def test_the_shipped_models_pass_their_gates(weights):
    measured = attention.gates(model.load(weights))
    assert measured.passed(), str(measured)


def test_the_two_shipped_models_differ_in_what_their_heads_look_at():
    first, second = (attention.level_0(model.load(weights)) for weights in model.CHECKPOINTS)
    assert all((a.to_q.weight - b.to_q.weight).abs().mean() > 0.05 for a, b in zip(first, second, strict=True))
