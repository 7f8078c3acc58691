"""The embedded models: the latent, their files, their three layouts, and pictures from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from safetensors import safe_open

import tome_core
from benchmarks.subjects import is_scene_model
from demo import checkpoint, model, prompt, sampler
from demo.model import FEATURES, SCALE, features
from demo.training_loss import held_out_loss
from tests import tiny_scenes

NOISE = torch.randn(2, 12, 16, 16, generator=torch.Generator().manual_seed(0))
WORDS = torch.tensor([prompt.tokens("night sea"), prompt.tokens("day snow red cone")])
LAYOUTS = {"sd": tiny_scenes.UNET, "sdxl": tiny_scenes.UNET_XL, "flux": model.LAYOUTS["flux"]}


def predicted(scene_model, words=WORDS, sizes=None) -> torch.Tensor:
    with torch.inference_mode():
        return scene_model(NOISE, torch.tensor(500), words, None if sizes is None else torch.tensor([sizes]))


def test_decoding_inverts_encoding_and_an_odd_picture_has_no_latent():
    pictures = torch.rand(2, 3, 6, 10, dtype=torch.float64) * 2 - 1
    latents = model.encode(pictures)
    assert latents.shape == (2, 12, 3, 5)
    torch.testing.assert_close(model.decode(latents), pictures)
    with pytest.raises(ValueError, match=r"\(5, 4\)"):
        model.encode(torch.zeros(1, 3, 5, 4))


def test_eight_bits_miss_no_weight_by_more_than_half_a_step():
    torch.manual_seed(0)
    rows = torch.tensor([0.0, 1e-9, 1e-3, 1.0, 100.0])[:, None, None, None]
    weights = {"large": torch.randn(5, 64, 4, 4) * rows, "small": torch.randn(3, 5), "bias": torch.randn(5000)}
    packed = model.pack(weights)
    assert packed["large"].dtype == torch.int8 and set(packed) == {*weights, "large" + SCALE}
    unpacked = model.unpack(packed)
    step = weights["large"].abs().amax((1, 2, 3), keepdim=True) / 127
    assert ((unpacked["large"] - weights["large"]).abs() <= 0.51 * step.clamp(min=2**-24)).all()
    assert all(torch.equal(unpacked[name], weights[name].half().float()) for name in ("small", "bias"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saved_model_is_of_the_layout_that_it_was_and_saving_it_again_changes_no_weight(tmp_path, layout):
    first, path = tiny_scenes.make(LAYOUTS[layout]), tmp_path / "weights.safetensors"
    model.save(first, path)
    second = model.load(path)
    assert (second.config, second.scheduler, second.haar_gain) == (first.config, first.scheduler, first.haar_gain)
    assert torch.allclose(predicted(second), predicted(first), atol=0.05)
    assert is_scene_model(path) and checkpoint.inspect(path).is_embedded
    model.save(second, path)
    weights = model.load(path).state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in second.state_dict().items())
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"weights\.safetensors holds no scene model"):
        model.load(path)


@pytest.mark.parametrize("weights", model.CHECKPOINTS, ids=lambda path: path.stem)
def test_a_shipped_model_is_small_and_fits_the_scenes_the_latent_and_the_tokens(weights):
    """Random weights score 1 and more; any mix-up of attributes, bands or noise schedule would be far above.

    Zero terminal signal-to-noise ratio (Lin et al. 2023): a picture starts from what training ended with.
    """
    assert weights.stat().st_size < 5e6
    with safe_open(weights, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"I8", "F16"}  # noqa: SIM118
    loaded = model.load(weights)
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


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_sdxls_layout_has_no_attention_at_the_finest_level_and_depth_2_and_10_below():
    unet = tiny_scenes.make(tiny_scenes.UNET_XL).unet
    depths = [[len(site.transformer_blocks) for site in getattr(block, "attentions", ())]
              for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks)]  # fmt: skip
    assert depths == [[], [2], [10], [10], [10, 10], [2, 2], []]


def test_sdxls_layout_alone_looks_at_the_sizes_that_it_is_told():
    xl, other = tiny_scenes.make(tiny_scenes.UNET_XL), tiny_scenes.make()
    plain = predicted(xl)
    assert torch.equal(predicted(xl, sizes=model.whole(32, 32)), plain)
    for sizes in ([64, 64, 0, 0, 32, 32], [32, 32, 16, 0, 32, 32], [32, 32, 0, 16, 32, 32], [32, 32, 0, 0, 64, 32]):
        assert not torch.allclose(predicted(xl, sizes=sizes), plain, atol=1e-4), sizes
    assert torch.equal(predicted(other, sizes=[64, 64, 16, 0, 32, 32]), predicted(other))


def test_a_transformer_of_fluxs_layout_merges():
    flux = tiny_scenes.make(LAYOUTS["flux"])
    plain = predicted(flux)
    assert plain.shape == NOISE.shape and not torch.allclose(predicted(flux, WORDS.flip(0)), plain, atol=1e-4)
    with tome_core.patch(flux.network, ratio=0.9, side="kv", metric="keys+values", sx=4, sy=4) as merging:
        merged = predicted(flux)
    assert merging.report().work_saved > 0.25 and 0 < (merged - plain).norm() < 0.1 * plain.norm()


# --- where a part of a picture is -------------------------------------------------------------------------------------


def test_a_part_of_a_picture_has_the_places_of_that_part():
    places = features(16, 16)[0].flatten(1).T
    apart = torch.cdist(places, places) + 9 * torch.eye(len(places))
    assert places.shape == (256, FEATURES) and apart.min() > 0.1
    torch.testing.assert_close(features(8, 8, (0.25, 0.5, 0.5, 0.5)), features(16, 16)[..., 4:12, 8:])


def test_a_unet_tells_its_first_convolution_which_part_it_sees():
    scene_model = tiny_scenes.make()
    for part, window in (([32, 32, 8, 16, 16, 16], (0.25, 0.5, 0.5, 0.5)), (None, (0.0, 0.0, 1.0, 1.0))):
        predicted(scene_model, sizes=part)
        assert scene_model.unet.conv_in.window == window


def test_a_transformer_places_a_part_where_it_was_cut_out_and_half_a_picture_over_a_whole_picture():
    flux = tiny_scenes.make(LAYOUTS["flux"])

    def places(height, width, sizes):
        return flux._places(height, width, torch.tensor([sizes]), NOISE)[:, 1:].unflatten(0, (height, width))

    whole = places(32, 32, model.whole(128, 128))
    assert torch.equal(places(8, 8, [128, 128, 32, 64, 32, 32]), whole[8:16, 16:24])
    assert torch.equal(places(16, 16, model.whole(64, 64)), (whole[::2, ::2] + whole[1::2, 1::2]) / 2)
