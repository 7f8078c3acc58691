"""The benchmark of transformers' whole blocks: what its ways draw, and what they are compared by."""

import pytest
import torch

from benchmarks import pooled, results, transformers
from benchmarks.pooled import PLAIN, Bench, Row, Way
from demo import model, prompt, sampler
from demo.sampler import solver
from tests.small_models import tiny_scenes

pytestmark = pytest.mark.pays  # for the runs that tests share, which begin before a test does
DEEP = {**tiny_scenes.FLUX, "num_single_layers": 3, "num_attention_heads": 1}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model file with random weights."""
    path = tmp_path_factory.mktemp("models") / "tiny.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.save(model.make(DEEP), path)
    return path


@pytest.fixture(scope="module")
def bench(path):
    """A bench that has drawn the unmerged picture of four steps."""
    bench = Bench({"tiny": path})
    assert bench.measure(Row("tiny", 4, 0, PLAIN))["squared_error"] == 0
    return bench


def test_the_unmerged_picture_is_the_demos(bench):
    purpose = pooled.subjects.PURPOSES[pooled.subjects.SHOW]
    expected = sampler.sample(bench.model, prompt.tokens(purpose.prompts[0]), purpose.first, steps=4)
    assert (bench._plain[0] * 255).round().byte().permute(1, 2, 0).numpy().tolist() == expected.tolist()


@pytest.mark.parametrize("way, work", [
    (Way("strength", ("balanced",)), (0.5, 0.99)), (Way("merged", ("fours", 0.0, 0.2, 0.2)), (0.3, 0.7)),
    (Way("merged", ("pairs", 0.99, 0.2, 0.2)), (0.8, 0.95)), (Way("steps", (3,)), (0.75, 0.75)),
    (Way("extrapolated", (3,)), (0.75, 0.75)), (Way("half the pixels", (0.95,)), (0.8125, 0.8125)),
    (Way("half the pixels", (2.0,)), (1.0, 1.0))], ids=lambda part: getattr(part, "name", None))
def test_each_way_leaves_its_share_of_the_work_and_changes_the_picture(bench, way, work):
    row = bench.measure(Row("tiny", 4, 0, way))
    assert work[0] <= row["work"] <= work[1] and row["time"] > 0
    assert (row["squared_error"] > 0) == (row["work"] < 1)


def test_a_noise_level_is_that_of_a_flow_of_equal_signal_to_noise(bench):
    levels = [bench.sigma(timestep) for timestep in solver(bench.model, 1000).timesteps]
    assert levels == sorted(levels, reverse=True) and levels[0] > 0.999 and levels[-1] < 0.1
    assert bench.sigma(torch.tensor(500)) == pytest.approx(0.64, abs=0.01)


def test_a_run_keeps_all_ways_and_shows_them(path, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(pooled, "ways", lambda steps: [PLAIN, Way("steps", (3,))])
    output = tmp_path / "result.json"
    assert pooled.main(["--model", str(path), "--pictures", "2", "--steps", "4", "--output", str(output)]) == 0
    assert len(results.load(output)["rows"]) == 4
    assert "### tiny, 4 steps" in (text := output.with_suffix(".md").read_text(encoding="utf-8"))
    assert "| steps 3 | 0.75 |" in text and "| unmerged |" not in text


def test_every_way_is_of_a_known_kind_and_named_once():
    for steps in pooled.STEPS:
        names = [way.name for way in pooled.ways(steps)]
        assert len(names) == len(set(names)) and all(way.kind in pooled._KINDS for way in pooled.ways(steps))


def test_work_of_shapes_falls_with_strength_and_rises_with_steps(capsys):
    flux = transformers.SHAPES[0]._replace(text=0)
    assert transformers.sigmas(4, 1.0) == [1, 0.75, 0.5, 0.25] and transformers.sigmas(2, 3.0) == [1, 0.75]
    # of 57 blocks 30 run on half of the tokens in two of four steps
    halved = (2048 * 12 * 3072 + 2 * 2048**2) / (4096 * 12 * 3072 + 2 * 4096**2)
    assert transformers.share(flux, "balanced", 4) == pytest.approx(30 / 57 * (1 - halved) / 2)
    assert transformers.share(flux, "max", 4) > transformers.share(flux, "balanced", 4)
    assert transformers.main([]) == 0 and "| Flux schnell, 1024 px | 4 |" in capsys.readouterr().out
