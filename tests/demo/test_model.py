"""The embedded models: the latent, their files, their three layouts, and pictures from them."""

from __future__ import annotations

import contextlib
import shutil

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from PIL import Image
from safetensors import safe_open

import tome_core
from benchmarks.subjects import PURPOSES, SCENE_MODELS, SHOW, SceneSubject, is_scene_model
from benchmarks.variant_list import VARIANTS
from demo import attention, checkpoint, eight_bits, model, prompt, sampler, samples, training_loss
from demo.eight_bits import SCALE
from demo.transformer import SceneTransformer
from tests import tiny_scenes

NOISE = torch.randn(2, 12, 16, 16, generator=torch.Generator().manual_seed(0))
WORDS = torch.tensor([prompt.tokens("night sea"), prompt.tokens("day snow red cone")])


@pytest.fixture(scope="module")
def xl() -> model.SceneModel:
    return tiny_scenes.make(tiny_scenes.UNET_XL)


@pytest.fixture(scope="module")
def flux() -> SceneTransformer:
    return tiny_scenes.make(model.LAYOUTS["flux"])


def predicted(scene_model, words=WORDS, sizes=None) -> torch.Tensor:
    with torch.inference_mode():
        return scene_model(NOISE, torch.tensor(500), words, None if sizes is None else torch.tensor([sizes]))


# --- latent and files -------------------------------------------------------------------------------------------------


def test_decoding_inverts_encoding_and_an_odd_picture_has_no_latent():
    for size in ((2, 2), (6, 10)):
        pictures = torch.rand(2, 3, *size, dtype=torch.float64) * 2 - 1
        latents = model.encode(pictures)
        assert latents.shape == (2, 12, size[0] // 2, size[1] // 2)
        assert torch.allclose(model.decode(latents), pictures, atol=1e-12)
    with pytest.raises(ValueError, match=r"\(5, 4\)"):
        model.encode(torch.zeros(1, 3, 5, 4))


def test_eight_bits_miss_no_weight_by_more_than_half_a_step():
    torch.manual_seed(0)
    rows = torch.tensor([0.0, 1e-9, 1e-3, 1.0, 100.0])[:, None, None, None]
    weights = {"large": torch.randn(5, 64, 4, 4) * rows, "small": torch.randn(3, 5), "bias": torch.randn(5000)}
    packed = eight_bits.pack(weights)
    assert packed["large"].dtype == torch.int8 and set(packed) == {*weights, "large" + SCALE}
    unpacked = eight_bits.unpack(packed)
    step = weights["large"].abs().amax((1, 2, 3), keepdim=True) / 127
    assert ((unpacked["large"] - weights["large"]).abs() <= 0.51 * step.clamp(min=2**-24)).all()
    assert all(torch.equal(unpacked[name], weights[name].half().float()) for name in ("small", "bias"))


def test_the_shipped_weights_are_small_and_in_eight_bits_and_packing_them_again_changes_none(tmp_path, capsys):
    for weights in model.CHECKPOINTS:
        assert weights.stat().st_size < 5e6
        with safe_open(weights, "pt") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert set(kinds.values()) == {"I8", "F16"} and "emb.weight" in kinds
        assert {name + SCALE for name, kind in kinds.items() if kind == "I8"} == {
            name for name in kinds if name.endswith(SCALE)}  # fmt: skip
    path = tmp_path / "model.safetensors"
    shutil.copy(model.WEIGHTS, path)
    eight_bits.main([str(path)])
    first, second = (model.load(weights) for weights in (model.WEIGHTS, path))
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    assert second.config == first.config and "model.safetensors" in capsys.readouterr().out


def test_a_saved_model_is_of_the_layout_that_it_was_and_other_files_are_refused(tmp_path, xl, flux):
    for first in (tiny_scenes.make(), xl, flux):
        path = tmp_path / "weights.safetensors"
        model.save(first, path)
        second = model.load(path)
        weights = second.state_dict()
        assert all(torch.equal(value.half().float(), weights[name]) for name, value in first.state_dict().items())
        assert (second.config, second.scheduler, second.haar_gain) == (first.config, first.scheduler, first.haar_gain)
        assert torch.allclose(predicted(second), predicted(first), atol=0.02)
        assert is_scene_model(path) and checkpoint.inspect(path).is_embedded
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"weights\.safetensors holds no scene model"):
        model.load(path)


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_a_shipped_model_fits_the_scenes_the_latent_and_the_tokens():
    """Random weights score 1 and more; any mix-up of attributes, bands or noise schedule would be far above."""
    assert training_loss.held_out_loss(model.load(), pictures=1) < 0.2


def test_the_shipped_models_predict_velocity_down_to_no_signal_at_all():
    """Zero terminal signal-to-noise ratio (Lin et al. 2023): a picture starts from what training ended with."""
    for loaded in map(model.load, SCENE_MODELS):
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


def test_the_sheet_of_samples_has_a_row_for_each_model_and_a_column_for_each_prompt(tmp_path, capsys):
    paths = [tmp_path / f"{side}.safetensors" for side in (8, 16)]
    for side, path in zip((8, 16), paths, strict=True):
        model.save(tiny_scenes.make({**tiny_scenes.UNET, "sample_size": side}), path)
    sheet = tmp_path / "sheet.png"
    options = ["--steps", "1", "--output", str(sheet)]
    assert samples.main([*map(str, paths), *options]) == 2 and not sheet.exists()
    assert "different sizes" in capsys.readouterr().err
    assert samples.main([str(paths[0]), str(paths[0]), *options]) == 0 and str(sheet) in capsys.readouterr().out
    assert Image.open(sheet).size == (16 * len(prompt.PROMPTS + samples.MORE_PROMPTS), 32)


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_sdxls_layout_has_no_attention_at_the_finest_level_and_depth_2_and_10_below(xl):
    unet = xl.unet
    depths = [[len(site.transformer_blocks) for site in getattr(block, "attentions", ())]
              for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks)]  # fmt: skip
    assert depths == [[], [2], [10], [10], [10, 10], [2, 2], []]
    assert all(isinstance(block.attentions[0].proj_in, torch.nn.Linear) for block in unet.down_blocks[1:])
    assert [module.to_q.in_features for module in attention.level_0(xl)] == [64] * 6


def test_the_sizes_that_sdxls_layout_is_told_change_what_it_draws_and_no_other_layout_looks_at_them(xl):
    plain, other = predicted(xl), tiny_scenes.make()
    assert torch.equal(predicted(xl, sizes=model.whole(32, 32)), plain)
    for sizes in ([64, 64, 0, 0, 32, 32], [32, 32, 16, 0, 32, 32], [32, 32, 0, 16, 32, 32], [32, 32, 0, 0, 64, 32]):
        assert not torch.allclose(predicted(xl, sizes=sizes), plain, atol=1e-4), sizes
    assert torch.equal(predicted(other, sizes=[64, 64, 16, 0, 32, 32]), predicted(other))


def test_its_second_text_input_is_made_of_the_whole_prompt(xl):
    """Told apart from the first by taking that away."""
    def hook(module, args, kwargs):
        return args, {**kwargs, "encoder_hidden_states": torch.zeros_like(kwargs["encoder_hidden_states"])}

    blocks = [module for name, module in xl.unet.named_modules() if name.endswith("attn2")]
    with contextlib.ExitStack() as hooks:
        for module in blocks:
            hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        plain = predicted(xl)
        for word in range(WORDS.shape[1]):
            others = WORDS.clone()
            others[:, word] = prompt.NULL_TOKEN
            assert not torch.allclose(predicted(xl, others), plain, atol=1e-4), word


def test_a_benchmark_takes_sdxls_layout_and_merges_at_the_levels_that_have_attention(tmp_path, xl):
    path = tmp_path / "xl.safetensors"
    model.save(xl, path)
    subject = SceneSubject(path, torch.device("cpu"), PURPOSES[SHOW])
    with torch.inference_mode(), VARIANTS["preset-max"].put_on(subject.network, 0):
        subject.predict(subject.add_noise(0, 2, 900))
        report = tome_core.report(subject.network)
    # tokens, queries and keys of what merges, at the levels of 64 and of 48 channels
    assert [level.tokens for level in report.levels] == [((64, 64, 1),), ((16, 16, 1),)]
    assert "latent /2" in str(report) and "latent /1" not in str(report)


def test_fluxs_layout_attends_jointly_and_then_in_one_sequence_and_merges(flux):
    assert len(flux.transformer.transformer_blocks) == 2 and len(flux.transformer.single_transformer_blocks) == 5
    plain = predicted(flux)
    assert plain.shape == NOISE.shape and not torch.allclose(predicted(flux, WORDS.flip(0)), plain, atol=1e-4)
    assert attention.level_0(flux) == []
    with tome_core.patch(flux.network, ratio=0.9, side="kv", metric="keys+values", sx=4, sy=4) as merging:
        merged = predicted(flux)
    assert merging.report().work_saved > 0.25
    assert 0 < (merged - plain).norm() < 0.1 * plain.norm()


def test_a_part_of_a_picture_stands_where_it_was_cut_out_and_half_a_picture_spans_a_whole_picture(flux):
    def places(height, width, sizes):
        given = None if sizes is None else torch.tensor([sizes])
        return flux._places(height, width, given, NOISE)[:, 1:].unflatten(0, (height, width))

    whole = places(32, 32, None)
    assert torch.equal(places(32, 32, model.whole(128, 128)), whole)
    assert torch.equal(places(8, 8, [128, 128, 32, 64, 32, 32]), whole[8:16, 16:24])
    half = places(16, 16, model.whole(64, 64))
    assert torch.equal(half, (whole[::2, ::2] + whole[1::2, 1::2]) / 2)
