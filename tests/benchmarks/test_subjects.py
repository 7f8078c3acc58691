"""Pictures to choose by and pictures to show: they share nothing, and neither stands in for the other; how they are
made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks import quality_report, results, strength, subjects
from benchmarks.quality_rows import TIMES, Amounts, QualityBench, Row
from benchmarks.subjects import CHOOSE, PURPOSES, SHOW, SceneSubject
from benchmarks.variants import VARIANTS
from demo import model, prompt, sampler
from demo.training_loss import HELD_OUT_SEED, Scenes
from tests import tiny_scenes

FRONT = Path(__file__).parents[2] / "benchmarks/results/front-cpu-2026-11-25.json"
MANY = range(1000)


@pytest.fixture(scope="module")
def pair(tiny_file) -> list[SceneSubject]:
    """One model, on the pictures to choose by and on those to show."""
    return [SceneSubject(tiny_file, torch.device("cpu"), PURPOSES[name]) for name in (CHOOSE, SHOW)]


def test_the_two_draw_from_other_seeds_and_say_other_prompts():
    choose, show = PURPOSES[CHOOSE], PURPOSES[SHOW]
    assert not {choose.first + number for number in MANY} & {show.first + number for number in MANY}
    noise = [{(one.noise + time) * 1000 + part for time in TIMES for part in MANY} for one in (choose, show)]
    assert not noise[0] & noise[1]
    tokens = [{tuple(prompt.tokens(text)) for text in one.prompts} for one in (choose, show)]
    assert len(tokens[1]) == len(show.prompts) and not tokens[0] & tokens[1]


def test_scenes_are_neither_each_others_nor_those_of_a_training():
    """A generator reads 32 bits of its seed, so seeds that differ above them paint the same."""
    held_out = [one.scenes + more for one in PURPOSES.values() for more in (0, 1)]
    spans = [(seed, 1000) for seed in held_out] + [(seed, 300_000) for seed in (*range(20), HELD_OUT_SEED)]
    starts = [(Scenes(seed, 8, 128).seed_of(0) % 2**32, steps) for seed, steps in spans]
    for number, (start, steps) in enumerate(starts[:len(held_out)]):
        others = [other for place, other in enumerate(starts) if place != number]
        assert not any((begin - start) % 2**32 < steps or (start - begin) % 2**32 < many for begin, many in others)


def test_no_scene_noise_or_picture_of_one_is_the_others(pair, monkeypatch):
    scenes = [row for subject in pair for part in range(2) for row in subject._scenes(part)[0]]
    noises = [row for subject in pair for part in range(2) for row in subject.add_noise(part, 8, 999).x]
    for many in (scenes, noises):
        assert min((a - b).abs().max() for i, a in enumerate(many) for b in many[:i]) > 0.01
    words = PURPOSES[SHOW].prompts
    monkeypatch.setattr(pair[0], "purpose", pair[0].purpose._replace(prompts=words))  # what is left are the seeds
    whole = [subject.picture(number, 1) for subject in pair for number in range(2)]
    assert not any(np.array_equal(a, b) for i, a in enumerate(whole) for b in whole[:i])
    assert np.array_equal(pair[0].picture(0, 1), whole[0])


def test_methods_draw_otherwise_on_the_two(pair, monkeypatch):
    seeds = []
    drawing = VARIANTS["tomesd-0.5"]
    monkeypatch.setitem(VARIANTS, "tomesd-0.5", type(drawing)(
        drawing.method, drawing.setting, lambda unet, seed: seeds.append(seed) or drawing.put_on(unet, seed)
    ))  # fmt: skip
    for subject in pair:
        bench = QualityBench(subject, Amounts(noised=2, pictures=1, steps=1, times=(200,)))
        bench.measure(Row(subject.name, "noised", 0, 0, 2, "tomesd-0.5"))
        bench.measure(Row(subject.name, "pictures", 0, 0, 1, "tomesd-0.5"))
    assert len(seeds) == 4 and not set(seeds[:2]) & set(seeds[2:])


def said(purpose: str | None) -> results.Record:
    record = results.load(FRONT)
    silent = {name: value for name, value in record["settings"].items() if name != "for"}
    record["settings"] = {**silent, **({"for": purpose} if purpose else {})}
    return record


def test_strength_refuses_a_result_to_show_and_one_from_before_there_were_two_passes_as_either(tmp_path, capsys):
    results.save(said(SHOW), tmp_path / "result.json")
    assert strength.main([str(tmp_path / "result.json")]) == 2
    assert "result.json was measured on the pictures for 'show'; give" in capsys.readouterr().err
    for wanted in PURPOSES:
        for purpose in (None, wanted):
            subjects.check_purpose(said(purpose), wanted, "a.json")
    assert "**Pictures to choose by**" in quality_report.table([said(CHOOSE)])
    assert "to choose by" not in quality_report.table([said(SHOW)])


def test_a_model_that_never_saw_walls_is_judged_without_them(tmp_path):
    weights = subjects.SCENE_MODELS[0]
    with safe_open(weights, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, tmp_path / "smooth.safetensors", file.metadata() | {"walls": "none"})
    for path, walls in ((weights, True), (tmp_path / "smooth.safetensors", False)):
        purpose = PURPOSES[SHOW]
        painted = Scenes(purpose.scenes + 1, 1, 128, walls=walls)[3][0]
        latent, _ = SceneSubject(path, torch.device("cpu"), purpose)._latents(purpose.scenes + 1, 1, 3)
        assert torch.equal(latent, model.encode(painted, 5.0))
        assert not torch.equal(painted, Scenes(purpose.scenes + 1, 1, 128, walls=not walls)[3][0])


def test_schedules_run_from_noisy_to_clean_and_end_where_they_say():
    made, config = tiny_scenes.make(), model.SCHEDULER
    for steps in (4, 20):
        late = subjects.timesteps("late-half", config, steps)
        assert subjects.timesteps("uniform", config, steps) is None
        assert late == sampler.solver(made, 2 * steps).timesteps.tolist()[steps:]
        for times in (late, subjects.timesteps("karras", config, steps)):
            assert len(times) == steps and times == sorted(set(times), reverse=True)
        assert max(late) < 500 < max(times)
    kept = sampler.DDPMScheduler(**config).alphas_cumprod.double()
    times = subjects.timesteps("karras", config, 20)
    roots = ((1 - kept[times]) / kept[times]).sqrt() ** (1 / 7)  # in which Karras' steps are even
    assert roots[0] ** 7 == pytest.approx(14.6, rel=0.05) and times[-1] == 0
    apart = -roots.diff()
    assert apart.max() < 1.2 * apart.median() and apart.min() > 0.8 * apart.median()


def test_guidance_and_schedule_change_pictures_and_their_defaults_do_not(tiny_file):
    loaded, tokens = model.load(tiny_file), prompt.tokens(PURPOSES[SHOW].prompts[3])

    def picture(*manner) -> np.ndarray:
        subject = SceneSubject(tiny_file, torch.device("cpu"), PURPOSES[SHOW], subjects.Manner(*manner))
        return subject.picture(3, 2)

    default, seed = picture(), PURPOSES[SHOW].first + 3
    assert np.array_equal(default, sampler.sample(loaded, tokens, seed, steps=2))
    own = sampler.solver(loaded, 2).timesteps.tolist()  # which change nothing if they are given to it
    assert np.array_equal(default, sampler.sample(loaded, tokens, seed, timesteps=own))
    others = [picture("karras"), picture("late-half"), picture("uniform", 7.5)]
    assert all(not np.array_equal(a, b) for i, a in enumerate(others) for b in (default, *others[:i]))


def test_a_picture_started_from_one_stays_as_near_to_it_as_the_steps_are_late():
    loaded = model.load()
    pictures, tokens, _ = Scenes(0, 1, 128)[1]
    start, words = model.encode(pictures), tokens[0].tolist()
    apart = []
    for first in (19, 499):
        times = np.linspace(first, 9, 2).astype(int).tolist()
        ended = sampler.sample(loaded, words, 1, timesteps=times, start=start)
        apart.append(np.abs(ended.astype(float) - sampler.to_bytes(pictures)[0]).mean())
    assert apart[0] < 5 < apart[1]
