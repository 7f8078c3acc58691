"""Training the embedded model: a stop costs nothing."""

from __future__ import annotations

import pytest
import torch

from demo import attention, model, train
from demo.model import LAYOUTS, load, save
from demo.training_loss import MEAN_BANDS, Scenes, composition_loss, noisy_times, squared_errors, stratified_times
from demo.training_state import TrainingState
from tests import tiny_scenes

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training takes torch 2.9's Muon")
TINY = {"sd": tiny_scenes.UNET, "sdxl": tiny_scenes.UNET_XL, "flux": tiny_scenes.FLUX}


def fresh(layout="sd", seed=0):
    torch.manual_seed(seed)
    return TrainingState(model.make(TINY[layout]), 1e-3)


def advance(state, steps):
    scenes = Scenes(0, 2, 32, crop=16)
    return [train.train_step(state, scenes[state.step], seed=0) for _ in range(steps)]


def weights_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("layout", ["sd", "flux"])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path, layout):
    state = fresh(layout)
    advance(state, 2)
    state.seconds = 12.5
    state.save(tmp_path / "state.safetensors")
    resumed = fresh(layout, 99)
    resumed.load(tmp_path / "state.safetensors")
    assert (resumed.step, resumed.seconds) == (2, 12.5)
    assert advance(resumed, 2) == advance(state, 2)
    for module in ("model", "average"):
        ours, theirs = getattr(resumed, module).state_dict(), getattr(state, module).state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.slow
def test_a_whole_run_of_sdxls_layout_ends_with_weights_and_what_they_are_worth(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(LAYOUTS, "sdxl", tiny_scenes.UNET_XL)
    start, output = tmp_path / "start.safetensors", tmp_path / "weights.safetensors"
    save(tiny_scenes.make(), start)
    assert train.main(["--layout", "sdxl", "--minutes", "0.02", "--batch", "2", "--start", str(start),
                       "--state", str(tmp_path / "state.safetensors"), "--output", str(output)]) == 0
    assert load(output).pooled is not None
    said = capsys.readouterr().out
    assert "held-out loss" in said and "level-0 heads" in said and "begin as in the given weights" in said


def test_a_new_run_begins_with_the_tensors_of_other_weights_that_fit(capsys):
    scene_model, other = tiny_scenes.make(tiny_scenes.UNET_XL), load()
    before, theirs = weights_of(scene_model), other.state_dict()
    train.begin_with(scene_model, other)
    after = scene_model.state_dict()
    linear = "unet.down_blocks.1.attentions.0.proj_in.weight"
    assert torch.equal(after[linear], theirs[linear][..., 0, 0])
    block = "unet.up_blocks.1.attentions.1.transformer_blocks.0.ff.net.2.bias"
    for name in ("emb.weight", "unet.conv_in.weight", block):
        assert torch.equal(after[name], theirs[name])
    for name in ("unet.down_blocks.2.resnets.0.conv1.weight", "pooled.weight"):  # another width, and not there at all
        assert torch.equal(after[name], before[name])


@pytest.mark.parametrize("kept", [True, False])
def test_a_new_run_goes_on_with_the_heads_of_a_model_or_draws_half_of_them_anew(tmp_path, monkeypatch, kept):
    monkeypatch.setitem(LAYOUTS, "sd", tiny_scenes.UNET)
    save(first := fresh(seed=7).model, tmp_path / "start.safetensors")
    options = train.parser().parse_args(["--minutes", "1", "--start", str(tmp_path / "start.safetensors"), "--state",
                                         str(tmp_path / "state.safetensors"), *["--keep-heads"] * kept])
    begun, given = (attention.level_0(scene_model) for scene_model in (train.prepare(options).model, first))
    assert len(begun) == len(given) > 0
    assert all(torch.equal(a.to_q.weight, b.to_q.weight.half().float()) == kept
               for a, b in zip(begun, given, strict=True))


def test_a_step_that_goes_wrong_leaves_the_weights_and_what_was_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(LAYOUTS, "sd", tiny_scenes.UNET)
    path = tmp_path / "state.safetensors"
    state = fresh()
    with torch.no_grad():
        state.model.emb.weight.fill_(torch.inf)
    before = weights_of(state.model)
    state.save(path)
    saved = path.read_bytes()
    assert train.main(["--minutes", "1", "--batch", "2", "--state", str(path)]) == 1
    assert "step 0 has loss nan" in capsys.readouterr().err
    assert path.read_bytes() == saved
    with pytest.raises(FloatingPointError):
        advance(state, 1)
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())


def test_times_cover_the_whole_range_evenly_and_an_eighth_of_noisy_times_is_below_half():
    times = stratified_times(10, torch.Generator().manual_seed(0))
    assert sorted(times.div(100, rounding_mode="floor").tolist()) == list(range(10))
    times = noisy_times(1000, torch.Generator().manual_seed(0))
    assert 0 <= times.min() < 200 and 950 < times.max() < 1000
    assert (times < 500).float().mean() == pytest.approx(0.125, abs=0.01)


def test_composition_counts_an_error_of_the_mean_bands_five_times_as_much_as_an_error_of_details():
    scene_model = tiny_scenes.make()
    batch, times = Scenes(0, 2, 32)[0], torch.tensor([100, 900])
    errors = squared_errors(scene_model, batch, times, torch.Generator().manual_seed(0)).mean((0, 2, 3))
    wanted = (5 * errors[:MEAN_BANDS].sum() + errors[MEAN_BANDS:].sum()) / (5 * 3 + 9)
    loss = composition_loss(scene_model, batch, times, torch.Generator().manual_seed(0))
    torch.testing.assert_close(loss, wanted)


def test_half_size_pictures_teach_composition_parts_details_and_whole_pictures_both():
    state = fresh()
    for scenes, progress, taught in (
        (Scenes(0, 2, 16), 0.1, [True] * 6),
        (Scenes(0, 2, 32, crop=16), 0.4, [False] * 6),
        (Scenes(0, 2, 32), 0.79, [False] + [True] * 5),
        (Scenes(0, 2, 32), 0.8, [False, True] * 3),
    ):
        for state.step, expected in enumerate(taught):
            assert train.teaches_composition(state, scenes, progress) == expected, (progress, state.step)


def test_a_step_moves_every_matrix_whichever_optimizer_it_has_and_the_average_follows():
    state = fresh()
    before = weights_of(state.model)
    advance(state, 1)
    changes = [(module.emb.weight - before["emb.weight"]).abs().max() for module in (state.average, state.model)]
    assert 0 < changes[0] < changes[1]
    advance(state, 1)
    assert not [name for name, value in state.model.state_dict().items() if torch.equal(value, before[name])]
    assert all(flat.data_ptr() == matrix.data_ptr() for flat, matrix in zip(state.flat, state.matrices, strict=True))


def test_the_learning_rate_warms_up_stays_and_falls():
    rates = [train.learning_rate(1.0, *point, 0.25) for point in ((0, 0.0), (100, 0.2), (100, 0.6), (100, 1.0))]
    halfway = rates.pop(2)
    assert rates == [pytest.approx(1 / 40), pytest.approx(1.0), pytest.approx(0.02)]
    assert 0.3 < halfway < 0.8


def test_a_file_that_is_no_training_state_and_wrong_options_are_refused(tmp_path, capsys):
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"nothing")
    assert train.main(["--minutes", "1", "--state", str(path)]) == 2
    assert "is no training state" in capsys.readouterr().err and path.read_bytes() == b"nothing"
    for option in ("--coarse=1", "--batch=0", "--seed=-1", "--keep-heads"):
        assert train.main(["--minutes", "1", "--state", str(tmp_path / "other"), option]) == 2
        assert option.replace("=", " ") in capsys.readouterr().err
