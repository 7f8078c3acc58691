"""The demo's scenes, the words that describe them, and where in a picture a convolution is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from demo import model, prompt, scene_background, scene_wall, scenes
from demo.places import FEATURES, PlacedConv, features
from demo.prompt import NULL_TOKEN
from demo.scene_canvas import Canvas
from demo.training_loss import Scenes
from tests import tiny_scenes


def test_equal_seeds_paint_equal_scenes_and_others_do_not():
    (first, attributes), (again, same), (other, _) = (scenes.make(6, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and torch.equal(attributes, same) and not torch.equal(first, other)
    steps = Scenes(0, 2, 16)
    assert all(torch.equal(a, b) for a, b in zip(steps[3], steps[3], strict=True))
    assert not torch.equal(steps[3][0], steps[4][0]) and not torch.equal(steps[3][0], Scenes(1, 2, 16)[3][0])


def test_a_scene_shows_what_its_attributes_say():
    def paint(words):
        ids = [[scenes.ATTRIBUTES[name].index(word) for name, word in prompt.parse(words).items()]]
        return scenes.render(torch.tensor(ids * 8), torch.Generator().manual_seed(0)).mean((0, 2, 3))

    day, night = paint("day snow"), paint("night snow")
    assert night.mean() < day.mean() - 0.3
    red, _, blue = paint("red ball") - paint("blue ball")
    assert red > 0.01 > -0.01 > blue
    for attributes in ([[0, 0, 0, 0, 0]], [[5, 0, 0, 0, 0, 0]], [[0, 0, 0, 0, 0, -1]], [0] * 6):
        with pytest.raises(ValueError, match=r"attributes (have shape|run from)"):
            scenes.render(torch.tensor(attributes), torch.Generator().manual_seed(0))


def test_a_wall_shows_a_few_colours_again_and_again():
    canvas = Canvas({"sky": torch.zeros(20, dtype=torch.int64)}, torch.Generator().manual_seed(0), 128)
    scene_wall.paint(canvas, scene_background.Setting(None, torch.ones(1, 1, 1, 3), None))
    colours = [torch.unique(picture.flatten(0, 1), dim=0) for picture in canvas.image]
    with_wall = [len(shades) - 1 for shades in colours if len(shades) > 1]  # one colour is the bare canvas
    assert len(with_wall) in range(2, 14)
    assert all(2 < count <= scene_wall.SHADES for count in with_wall)


def test_a_part_of_a_scene_comes_with_where_it_was_cut_out_and_some_scenes_without_a_prompt():
    full, part = Scenes(0, 2, 64)[3], Scenes(0, 2, 64, crop=32)[3]
    assert full.sizes.tolist() == [model.whole(64, 64)] * 2
    height, width, top, left, *shown = part.sizes[0].tolist()
    assert (height, width, shown) == (64, 64, [32, 32]) and top > 0 and part.sizes.shape == (2, 6)
    assert torch.equal(part.pictures, full.pictures[..., top:top + 32, left:left + 32])
    tokens = torch.cat([Scenes(0, 50, 2)[step][1] for step in range(4)])
    assert 0.03 < (tokens == NULL_TOKEN).all(1).float().mean() < 0.2


# --- words ------------------------------------------------------------------------------------------------------------


def test_words_come_in_any_order_and_case_and_each_has_a_token_of_its_own():
    assert all(len(prompt.tokens(text)) == len(scenes.ATTRIBUTES) for text in prompt.PROMPTS)
    names = list(scenes.ATTRIBUTES)
    tokens = [prompt.tokens(word)[names.index(name)] for word, name in prompt.ATTRIBUTE_OF.items()]
    assert sorted(tokens) == list(range(NULL_TOKEN))
    assert prompt.tokens("Red, ball, SEA sunset") == prompt.tokens("sunset sea red ball")
    assert prompt.parse("green")["shape"] == "ball" and prompt.parse("")["shape"] == "empty"


def test_an_unknown_word_and_two_values_of_one_attribute_are_refused():
    with pytest.raises(ValueError, match="'purple'") as refusal:
        prompt.parse("sunset purple")
    assert all(word in str(refusal.value) for word in prompt.ATTRIBUTE_OF)
    with pytest.raises(ValueError, match=r"colour.*'red'.*'blue'"):
        prompt.parse("red blue ball")


# --- places -----------------------------------------------------------------------------------------------------------


def test_places_differ_a_part_has_the_places_of_that_part_and_an_untrained_convolution_ignores_them():
    places = features(16, 16)[0].flatten(1).T
    apart = torch.cdist(places, places) + 9 * torch.eye(len(places))
    assert places.shape == (256, FEATURES) and apart.min() > 0.1
    torch.testing.assert_close(features(8, 8, (0.25, 0.5, 0.5, 0.5)), features(16, 16)[..., 4:12, 8:])
    conv, x = nn.Conv2d(3, 5, 3, padding=1), torch.randn(2, 3, 8, 8)
    assert torch.equal(PlacedConv(conv)(x), conv(x))


def test_a_model_tells_its_first_convolution_which_part_it_sees():
    scene_model = tiny_scenes.make()
    for part, window in (((32, 32, 8, 16, 16, 16), (0.25, 0.5, 0.5, 0.5)), (None, (0.0, 0.0, 1.0, 1.0))):
        scene_model.unet.conv_in.window = (0.1, 0.1, 0.1, 0.1)
        side = 8 if part else 16
        with torch.inference_mode():
            scene_model(torch.zeros(1, 12, side, side), torch.tensor(500), torch.zeros(1, 6, dtype=torch.long),
                        part and torch.tensor([part]))
        assert scene_model.unet.conv_in.window == window
