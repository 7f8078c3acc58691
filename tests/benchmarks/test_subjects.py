"""Pictures to choose by and pictures to show: they share nothing, and neither stands in for the other."""

from __future__ import annotations

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

FRONT = results.FOLDER / "front-cpu-2026-11-25.json"
MANY = range(1000)


@pytest.fixture(scope="module")
def pair(tiny_file) -> list[SceneSubject]:
    """One model, on the pictures to choose by and on those to show."""
    return [SceneSubject(tiny_file, torch.device("cpu"), PURPOSES[name]) for name in (CHOOSE, SHOW)]


def test_the_two_draw_from_other_seeds_and_say_other_prompts():
    choose, show = PURPOSES[CHOOSE], PURPOSES[SHOW]
    assert not {choose.first + number for number in MANY} & {show.first + number for number in MANY}
    noise = [{(purpose.noise + time) * 1000 + part for time in TIMES for part in MANY} for purpose in (choose, show)]
    assert not noise[0] & noise[1]
    tokens = [{tuple(prompt.tokens(text)) for text in purpose.prompts} for purpose in (choose, show)]
    assert len(tokens[1]) == len(show.prompts) and not tokens[0] & tokens[1]


def test_scenes_are_neither_each_others_nor_those_of_a_training():
    """A generator reads 32 bits of its seed, so seeds that differ above them paint the same."""
    held_out = [purpose.scenes for purpose in PURPOSES.values()]
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
        scenes, others = (Scenes(PURPOSES[SHOW].scenes, 8, 128, walls=painted)[3][0] for painted in (walls, not walls))
        latents, _ = SceneSubject(path, torch.device("cpu"))._scenes(3)
        assert torch.equal(latents, model.encode(scenes, 5.0)) and not torch.equal(scenes, others)


def test_guidance_changes_pictures_and_its_default_is_the_demos(tiny_file):
    loaded, purpose = model.load(tiny_file), PURPOSES[SHOW]
    default, other = (SceneSubject(tiny_file, torch.device("cpu"), purpose, *more).picture(3, 2)
                      for more in ((), (7.5,)))  # fmt: skip
    demos = sampler.sample(loaded, prompt.tokens(purpose.prompts[3]), purpose.first + 3, steps=2)
    assert np.array_equal(default, demos)
    assert not np.array_equal(default, other)
