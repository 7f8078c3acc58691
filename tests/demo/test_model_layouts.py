"""The embedded models' other layouts: what makes SDXL's SDXL's, where Flux's places its tokens, and who takes them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

import tome_core
from benchmarks.quality_rows import Amounts, QualityBench, Row
from benchmarks.subjects import PURPOSES, SCENE_MODELS, SHOW, SceneSubject, is_scene_model
from benchmarks.variant_list import VARIANTS
from demo import attention, checkpoint, model, prompt, sampler, train
from demo.training_loss import Scenes
from demo.transformer import SceneTransformer
from tests import tiny_scenes

NOISE = torch.randn(2, 12, 16, 16, generator=torch.Generator().manual_seed(0))
WORDS = torch.tensor([prompt.tokens("night sea"), prompt.tokens("day snow red cone")])


@pytest.fixture(scope="module")
def xl() -> model.SceneModel:
    return tiny_scenes.make(tiny_scenes.UNET_XL)


def predicted(made: model.SceneModel, words=WORDS, sizes=None) -> torch.Tensor:
    with torch.inference_mode():
        return made(NOISE, torch.tensor(500), words, None if sizes is None else torch.tensor([sizes]))


def test_sdxls_layout_has_no_attention_at_the_finest_level_and_depth_2_and_10_below(xl):
    unet = xl.unet
    depths = [[len(site.transformer_blocks) for site in getattr(block, "attentions", ())]
              for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks)]  # fmt: skip
    assert depths == [[], [2], [10], [10], [10, 10], [2, 2], []]
    assert all(isinstance(block.attentions[0].proj_in, torch.nn.Linear) for block in unet.down_blocks[1:])
    assert {module.to_q.in_features for module in attention.level_0(xl)} == {64}
    assert len(attention.level_0(xl)) == 6


def test_the_sizes_that_it_is_told_change_what_it_draws(xl):
    plain = predicted(xl)
    assert torch.equal(predicted(xl, sizes=model.whole(32, 32)), plain)
    for sizes in ([64, 64, 0, 0, 32, 32], [32, 32, 16, 0, 32, 32], [32, 32, 0, 16, 32, 32], [32, 32, 0, 0, 64, 32]):
        assert not torch.allclose(predicted(xl, sizes=sizes), plain, atol=1e-4), sizes


def test_its_second_text_input_is_made_of_the_whole_prompt(xl):
    """Told apart from the first by taking that away."""
    def hook(module, args, kwargs):
        return args, {**kwargs, "encoder_hidden_states": torch.zeros_like(kwargs["encoder_hidden_states"])}

    blocks = [module for name, module in xl.unet.named_modules() if name.endswith("attn2")]
    with contextlib.ExitStack() as hooks:
        for module in blocks:
            hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        for word in range(WORDS.shape[1]):
            others = WORDS.clone()
            others[:, word] = prompt.NULL_TOKEN
            assert not torch.allclose(predicted(xl, others), predicted(xl), atol=1e-4), word


def test_stable_diffusions_layout_looks_at_no_sizes():
    made = tiny_scenes.make()
    assert torch.equal(predicted(made, sizes=[64, 64, 16, 0, 32, 32]), predicted(made))


def test_a_part_of_a_scene_comes_with_where_it_was_cut_out():
    full, part = Scenes(0, 2, 64)[3], Scenes(0, 2, 64, crop=32)[3]
    assert full.sizes.tolist() == [model.whole(64, 64)] * 2
    height, width, top, left, *shown = part.sizes[0].tolist()
    assert (height, width, shown) == (64, 64, [32, 32]) and top > 0 and part.sizes.shape == (2, 6)
    assert torch.equal(part.pictures, full.pictures[..., top:top + 32, left:left + 32])


def test_a_new_run_begins_with_what_fits_of_other_weights(capsys):
    made, other = model.SceneModel(model.UNET_XL), model.load()
    before, theirs = {name: value.clone() for name, value in made.state_dict().items()}, other.state_dict()
    train.begin_with(made, other)
    after = made.state_dict()
    linear = "unet.down_blocks.1.attentions.0.proj_in.weight"
    assert torch.equal(after[linear], theirs[linear][..., 0, 0])
    block = "unet.up_blocks.1.attentions.1.transformer_blocks.0.ff.net.2.bias"
    for name in ("emb.weight", "unet.conv_in.weight", block):
        assert torch.equal(after[name], theirs[name])
    for name in ("unet.down_blocks.2.resnets.0.conv1.weight", "pooled.weight"):  # another width, and not there at all
        assert torch.equal(after[name], before[name])
    again = model.make(other.config)
    train.begin_with(again, other)
    assert all(torch.equal(value, theirs[name]) for name, value in again.state_dict().items())


def test_a_saved_model_is_of_the_layout_that_it_was(tmp_path, xl):
    path = tmp_path / "xl.safetensors"
    model.save(xl, path)
    loaded = model.load(path)
    assert loaded.config == xl.config and loaded.pooled is not None
    assert torch.allclose(predicted(loaded), predicted(xl), atol=0.02)
    assert is_scene_model(path) and checkpoint.inspect(path).is_embedded


def test_a_benchmark_takes_it_and_merges_where_it_has_attention(tmp_path, xl):
    path = tmp_path / "xl.safetensors"
    model.save(xl, path)
    subject = SceneSubject(path, torch.device("cpu"), PURPOSES[SHOW])
    bench = QualityBench(subject, Amounts(noised=2, pictures=1, steps=2, times=(400,)))
    rows = [bench.measure(Row(subject.name, "noised", 0, 0, 2, name)) for name in ("unmerged", "preset-max")]
    assert rows[0]["work"] == [1.0] and rows[1]["work"][0] < 0.5 and rows[1]["dev"][0][0] > 0
    drawn = bench.measure(Row(subject.name, "pictures", 0, 0, 1, "unmerged"))
    assert drawn["squared_error"] == [0.0]
    assert subject.picture(0, 1).shape == (32, 32, 3)
    assert _merged(subject, "preset-max") == [((64, 64, 1),), ((16, 16, 1),)]
    assert _merged(subject, "preset-at-the-finest-max") == [((64, 64, 1),), ()]
    with torch.inference_mode(), tome_core.patch(subject.network, ratio=0.5) as merging:
        subject.predict(subject.add_noise(0, 2, 400))
        report = str(merging.report())
    assert "latent /2" in report and "latent /1" not in report


def _merged(subject: SceneSubject, variant: str) -> list[tuple[tuple[int, int, int], ...]]:
    """Tokens, queries and keys of what merges, at the levels of 64 and of 48 channels."""
    with torch.inference_mode(), VARIANTS[variant].put_on(subject.network, 0):
        subject.predict(subject.add_noise(0, 2, 900))
        return [level.tokens for level in tome_core.report(subject.network).levels]


@pytest.mark.parametrize("weights", SCENE_MODELS, ids=lambda path: path.stem)
def test_the_shipped_models_predict_velocity_down_to_no_signal_at_all(weights):
    """Zero terminal signal-to-noise ratio (Lin et al. 2023): a picture starts from what training ended with."""
    loaded = model.load(weights)
    assert loaded.scheduler["prediction_type"] == "v_prediction"
    assert DDPMScheduler(**loaded.scheduler).alphas_cumprod[-1] == 0
    solver = sampler.solver(loaded, 10)
    assert solver.timesteps[0] == 999 and np.isclose(solver.alphas_cumprod[-1], 0, atol=1e-6)


@pytest.fixture(scope="module")
def flux() -> SceneTransformer:
    return tiny_scenes.make(model.LAYOUTS["flux"])


def test_fluxs_layout_attends_jointly_and_then_in_one_sequence(flux):
    assert len(flux.transformer.transformer_blocks) == 2 and len(flux.transformer.single_transformer_blocks) == 5
    assert predicted(flux).shape == NOISE.shape
    assert not torch.allclose(predicted(flux, WORDS.flip(0)), predicted(flux), atol=1e-4)
    assert attention.level_0(flux) == []


def test_a_part_of_a_picture_stands_where_it_was_cut_out_and_half_a_picture_spans_a_whole_one(flux):
    def places(height, width, sizes):
        given = None if sizes is None else torch.tensor([sizes])
        return flux._places(height, width, given, NOISE)[:, 1:].unflatten(0, (height, width))

    whole = places(32, 32, None)
    assert torch.equal(places(32, 32, model.whole(128, 128)), whole)
    assert torch.equal(places(8, 8, [128, 128, 32, 64, 32, 32]), whole[8:16, 16:24])
    half = places(16, 16, model.whole(64, 64))
    assert torch.equal(half, (whole[::2, ::2] + whole[1::2, 1::2]) / 2)


def test_a_saved_transformer_is_one_again_and_merges(tmp_path, flux):
    path = tmp_path / "flux.safetensors"
    model.save(flux, path)
    assert is_scene_model(path) and checkpoint.inspect(path).is_embedded
    subject = SceneSubject(path, torch.device("cpu"), PURPOSES[SHOW])
    plain = predicted(subject.model)
    assert torch.allclose(plain, predicted(flux), atol=0.02)
    with tome_core.patch(subject.network, ratio=0.9, side="kv", metric="keys+values", sx=4, sy=4) as merging:
        merged = predicted(subject.model)
    assert merging.report().work_saved > 0.25
    assert 0 < (merged - plain).norm() < 0.1 * plain.norm()
