"""Pictures to choose by and pictures to show have nothing in common."""

import numpy as np
import torch

from benchmarks.subjects import CHOOSE, PURPOSES, SHOW, SceneSubject
from demo import prompt
from demo.training.loss import HELD_OUT_SEED, Scenes


def test_scenes_are_neither_each_others_nor_those_of_a_training():
    """A generator reads 32 bits of its seed, so seeds that differ above them paint the same."""
    held_out = [purpose.scenes for purpose in PURPOSES.values()]
    spans = [(seed, 1000) for seed in held_out] + [(seed, 300_000) for seed in (*range(20), HELD_OUT_SEED)]
    starts = [(Scenes(seed, 8, 128).seed_of(0) % 2**32, steps) for seed, steps in spans]
    for number, (start, steps) in enumerate(starts[:len(held_out)]):
        others = [other for place, other in enumerate(starts) if place != number]
        assert not any((begin - start) % 2**32 < steps or (start - begin) % 2**32 < many for begin, many in others)


def test_no_scene_noise_prompt_or_picture_of_one_is_the_others(tiny_file, monkeypatch):
    pair = [SceneSubject(tiny_file, torch.device("cpu"), PURPOSES[name]) for name in (CHOOSE, SHOW)]
    scenes = [row for subject in pair for part in range(2) for row in subject._scenes(part)[0]]
    noises = [row for subject in pair for part in range(2) for row in subject.add_noise(part, 8, 999).x]
    for many in (scenes, noises):
        assert min((a - b).abs().max() for i, a in enumerate(many) for b in many[:i]) > 0.01
    choose, show = ({tuple(prompt.tokens(text)) for text in subject.purpose.prompts} for subject in pair)
    assert not choose & show
    words = PURPOSES[SHOW].prompts
    monkeypatch.setattr(pair[0], "purpose", pair[0].purpose._replace(prompts=words))  # the seeds are left
    whole = [subject.picture(number, 1) for subject in pair for number in range(2)]
    assert not any(np.array_equal(a, b) for i, a in enumerate(whole) for b in whole[:i])
    assert np.array_equal(pair[0].picture(0, 1), whole[0])
