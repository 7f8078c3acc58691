"""The demo's scenes, its prompts and the embedded model."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open

from demo import eight_bits, model, prompt, sampler, scenes, training_loss
from demo.eight_bits import SCALE
from tests.thoroughness import some_quick


def test_equal_seeds_paint_equal_scenes_and_others_do_not():
    first, attributes = scenes.make(6, seed=3)
    again, same_attributes = scenes.make(6, seed=3)
    other, _ = scenes.make(6, seed=4)
    assert torch.equal(first, again) and torch.equal(attributes, same_attributes)
    assert not torch.equal(first, other)


def test_a_scene_shows_what_its_attributes_say():
    def paint(words):
        ids = [[scenes.ATTRIBUTES[name].index(word) for name, word in prompt.parse(words).items()]]
        return scenes.render(torch.tensor(ids * 8), torch.Generator().manual_seed(0)).mean((0, 2, 3))

    day, night = paint("day snow"), paint("night snow")
    assert night.mean() < day.mean() - 0.3
    red, _, blue = paint("red ball") - paint("blue ball")
    assert red > 0.01 > -0.01 > blue


@pytest.mark.parametrize("attributes", [[[0, 0, 0, 0, 0]], [[5, 0, 0, 0, 0, 0]], [[0, 0, 0, 0, 0, -1]], [0] * 6])
def test_attributes_that_do_not_exist_are_refused(attributes):
    with pytest.raises(ValueError, match=r"attributes (have shape|run from)"):
        scenes.render(torch.tensor(attributes), torch.Generator().manual_seed(0))


def test_every_prompt_of_the_demo_is_known():
    assert all(len(prompt.tokens(text)) == len(scenes.ATTRIBUTES) for text in prompt.PROMPTS)


def test_each_word_has_a_token_of_its_own_below_the_null_token():
    names = list(scenes.ATTRIBUTES)
    tokens = [prompt.tokens(word)[names.index(name)] for word, name in prompt.ATTRIBUTE_OF.items()]
    assert sorted(tokens) == list(range(prompt.NULL_TOKEN))


def test_words_may_come_in_any_order_case_and_with_commas():
    assert prompt.tokens("Red, ball, SEA sunset") == prompt.tokens("sunset sea red ball")


def test_an_unknown_word_is_refused_with_all_the_known_ones():
    with pytest.raises(ValueError, match="'purple'") as refusal:
        prompt.parse("sunset purple")
    assert all(word in str(refusal.value) for word in prompt.ATTRIBUTE_OF)


def test_two_values_of_one_attribute_are_refused():
    with pytest.raises(ValueError, match=r"colour.*'red'.*'blue'"):
        prompt.parse("red blue ball")


def test_a_colour_alone_means_a_ball_and_nothing_means_an_empty_scene():
    assert prompt.parse("green")["shape"] == "ball"
    assert prompt.parse("")["shape"] == "empty"


@pytest.mark.parametrize("size", [(2, 2), (6, 10), (64, 64)])
def test_decoding_inverts_encoding(size):
    pictures = torch.rand(2, 3, *size, dtype=torch.float64) * 2 - 1
    latents = model.encode(pictures)
    assert latents.shape == (2, 12, size[0] // 2, size[1] // 2)
    assert torch.allclose(model.decode(latents), pictures, atol=1e-12)


def test_an_odd_picture_has_no_latent():
    with pytest.raises(ValueError, match=r"\(5, 4\)"):
        model.encode(torch.zeros(1, 3, 5, 4))


@pytest.mark.parametrize("weights", model.CHECKPOINTS, ids=lambda path: path.stem)
def test_the_embedded_weights_are_small_and_in_eight_bits(weights):
    assert weights.stat().st_size < 5e6
    with safe_open(weights, "pt") as file:
        names = set(file.keys())
        kinds = {name: file.get_slice(name).get_dtype() for name in names}
    assert set(kinds.values()) == {"I8", "F16"}
    assert {name for name, kind in kinds.items() if kind == "I8"} == {
        name.removesuffix(SCALE) for name in names if name.endswith(SCALE)}  # fmt: skip
    assert "emb.weight" in names and all(name.startswith("unet.") for name in names - {"emb.weight"})


def test_eight_bits_miss_no_weight_by_more_than_half_a_step():
    torch.manual_seed(0)
    rows = torch.tensor([0.0, 1e-9, 1e-3, 1.0, 100.0])[:, None, None, None]
    weights = {"large": torch.randn(5, 64, 4, 4) * rows, "small": torch.randn(3, 5), "bias": torch.randn(5000)}
    packed = eight_bits.pack(weights)
    assert packed["large"].dtype == torch.int8 and set(packed) == {*weights, "large" + SCALE}
    found = eight_bits.unpack(packed)
    step = weights["large"].abs().amax((1, 2, 3), keepdim=True) / 127
    assert ((found["large"] - weights["large"]).abs() <= 0.51 * step.clamp(min=2**-24)).all()
    assert all(torch.equal(found[name], weights[name].half().float()) for name in ("small", "bias"))


def test_packing_a_file_again_changes_no_weight(tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    shutil.copy(model.WEIGHTS, path)
    eight_bits.main([str(path)])
    first, second = (model.load(one) for one in (model.WEIGHTS, path))
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    assert second.config == first.config and "model.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize("weights", some_quick(model.CHECKPOINTS), ids=lambda path: path.stem)
def test_the_embedded_weights_fit_the_scenes_the_latent_and_the_tokens(weights):
    """Random weights score 1 and more; any mix-up of attributes, bands or noise schedule would be far above."""
    assert training_loss.held_out_loss(model.load(weights), pictures=4) < 0.2


def test_saving_and_loading_keeps_the_model(tmp_path):
    first = model.load()
    model.save(first, tmp_path / "weights.safetensors")
    second = model.load(tmp_path / "weights.safetensors")
    kept = second.state_dict()
    assert all(torch.equal(value.half().float(), kept[name]) for name, value in first.state_dict().items())
    assert second.scheduler == first.scheduler and second.haar_gain == first.haar_gain


def test_a_file_that_is_no_scene_model_is_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"other\.safetensors holds no scene model"):
        model.load(path)


def test_a_picture_depends_on_its_seed_and_leaves_the_global_random_state_alone():
    embedded, tokens = model.load(), prompt.tokens("day sea")
    state = torch.get_rng_state()
    first = sampler.sample(embedded, tokens, 1, steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert np.array_equal(sampler.sample(embedded, tokens, 1, steps=2), first)
    assert not np.array_equal(sampler.sample(embedded, tokens, 2, steps=2), first)
