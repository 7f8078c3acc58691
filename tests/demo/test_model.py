"""The embedded models: the latent, their files, their layouts, their words, and pictures from them."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from safetensors import safe_open

from benchmarks.subjects import is_scene_model
from demo import checkpoint, model, prompt, sampler
from demo.training.loss import held_out_loss
from tests.small_models import tiny_scenes

NOISE = torch.randn(2, 12, 16, 16, generator=torch.Generator().manual_seed(0))
WORDS = torch.tensor([prompt.tokens("night sea"), prompt.tokens("day snow red cone")])
LAYOUTS = {"sd": tiny_scenes.UNET, "sdxl": tiny_scenes.UNET_XL, "flux": model.LAYOUTS["flux"]}


@torch.inference_mode()
def predicted(scene_model, words=WORDS) -> torch.Tensor:
    return scene_model(NOISE, torch.tensor(500), words, None)


def test_decoding_inverts_encoding():
    pictures = torch.rand(2, 3, 6, 10, dtype=torch.float64) * 2 - 1
    latents = model.encode(pictures)
    assert latents.shape == (2, 12, 3, 5)
    torch.testing.assert_close(model.decode(latents), pictures)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saved_model_is_of_the_layout_that_it_was_and_saving_it_again_changes_no_weight(tmp_path, layout):
    first, path = tiny_scenes.make(LAYOUTS[layout]), tmp_path / "weights.safetensors"
    model.save(first, path)
    second = model.load(path)
    assert (second.config, second.scheduler, second.haar_gain) == (first.config, first.scheduler, first.haar_gain)
    assert torch.allclose(predicted(second), predicted(first), atol=0.05)
    assert not torch.allclose(predicted(second, WORDS.flip(0)), predicted(second), atol=1e-4), "words change nothing"
    assert is_scene_model(path) and checkpoint.inspect(path).kind == "scenes"
    model.save(second, path)
    weights = model.load(path).state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in second.state_dict().items())
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"weights\.safetensors holds no scene model"):
        model.load(path)


def test_the_shipped_model_is_small_and_fits_the_scenes_the_latent_and_the_tokens():
    """Random weights score 1 and more. A zero terminal signal-to-noise ratio: a picture starts where training ended."""
    assert model.WEIGHTS.stat().st_size < 5e6
    with safe_open(model.WEIGHTS, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"I8", "F16"}  # noqa: SIM118
    loaded = model.load()
    assert held_out_loss(loaded, pictures=1) < 0.2
    assert loaded.scheduler["prediction_type"] == "v_prediction"
    assert DDPMScheduler(**loaded.scheduler).alphas_cumprod[-1] == 0
    solver = sampler.solver(loaded, 10)
    assert solver.timesteps[0] == 999 and np.isclose(solver.alphas_cumprod[-1], 0, atol=1e-6)


def test_a_picture_depends_on_its_seed_and_leaves_the_global_random_state_alone():
    scene_model, tokens = tiny_scenes.make(), prompt.tokens("day sea")
    state = torch.get_rng_state()
    first = sampler.sample(scene_model, tokens, 1, steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert np.array_equal(sampler.sample(scene_model, tokens, 1, steps=2), first)
    assert not np.array_equal(sampler.sample(scene_model, tokens, 2, steps=2), first)


def test_words_come_in_any_order_and_case_and_each_has_a_token_of_its_own():
    names = list(prompt.ATTRIBUTES)
    tokens = [prompt.tokens(word)[names.index(name)] for word, name in prompt.ATTRIBUTE_OF.items()]
    assert sorted(tokens) == list(range(prompt.NULL_TOKEN))
    assert prompt.tokens("Red, ball, SEA sunset") == prompt.tokens("sunset sea red ball")
    assert prompt.parse("green")["shape"] == "ball" and prompt.parse("")["shape"] == "empty"
    with pytest.raises(ValueError, match=r"colour.*'red'.*'blue'"):
        prompt.parse("red blue ball")
