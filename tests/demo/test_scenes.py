"""The demo's scenes and the words that describe them."""

from __future__ import annotations

import pytest
import torch

from demo import model, prompt, scenes
from demo.prompt import NULL_TOKEN
from demo.training_loss import Scenes


def test_equal_seeds_and_steps_give_equal_scenes_and_others_do_not():
    first = Scenes(0, 2, 16)
    assert all(map(torch.equal, first[3], Scenes(0, 2, 16)[3]))
    assert not torch.equal(first[3][0], first[4][0]) and not torch.equal(first[3][0], Scenes(1, 2, 16)[3][0])


def test_a_scene_shows_what_its_attributes_say():
    def paint(words):
        ids = [[scenes.ATTRIBUTES[name].index(word) for name, word in prompt.parse(words).items()]]
        return scenes.render(torch.tensor(ids * 8), torch.Generator().manual_seed(0)).mean((0, 2, 3))

    assert paint("night snow").mean() < paint("day snow").mean() - 0.3
    red, _, blue = paint("red ball") - paint("blue ball")
    assert red > 0.01 > -0.01 > blue
    for attributes in ([[0, 0, 0, 0, 0]], [[5, 0, 0, 0, 0, 0]], [[0, 0, 0, 0, 0, -1]]):
        with pytest.raises(ValueError, match=r"attributes (have shape|run from)"):
            scenes.render(torch.tensor(attributes), torch.Generator().manual_seed(0))


def test_a_part_of_a_scene_comes_with_where_it_was_cut_out_and_some_scenes_without_a_prompt():
    full, part = Scenes(0, 2, 64)[3], Scenes(0, 2, 64, crop=32)[3]
    assert full.sizes.tolist() == [model.whole(64, 64)] * 2
    height, width, top, left, *shown = part.sizes[0].tolist()
    assert (height, width, shown) == (64, 64, [32, 32]) and top > 0
    assert torch.equal(part.pictures, full.pictures[..., top:top + 32, left:left + 32])
    tokens = torch.cat([Scenes(0, 50, 2)[step].tokens for step in range(4)])
    assert 0.03 < (tokens == NULL_TOKEN).all(1).float().mean() < 0.2


def test_words_come_in_any_order_and_case_and_each_has_a_token_of_its_own():
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
