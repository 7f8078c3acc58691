"""Whole pictures of the quality benchmark: detail, time, the ways they are made, and others beside strength."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from benchmarks import quality, quality_figures, quality_report, results, subjects
from benchmarks.attention_work import BESIDE, CallTimes, one_thread
from benchmarks.quality_figures import Mean, NoiseMeans, PictureMeans, Point, Section, at_equal_time, front_at, sections
from benchmarks.subjects import PURPOSES, SHOW, SceneSubject
from benchmarks.variant_list import PLAIN
from demo import model, prompt, sampler
from demo.metrics import gradient_energy
from demo.training_loss import Scenes
from tests import tiny_pipeline, tiny_scenes

CONFIG = model.SCHEDULER
BOTH = "twice-the-solver-steps"


def scene() -> np.ndarray:
    return sampler.to_bytes(Scenes(0, 1, 64)[0][0])[0]


def blurred(picture: np.ndarray) -> np.ndarray:
    x = picture.astype(np.float64)
    return ((x + np.roll(x, 1, 0) + np.roll(x, 1, 1) + np.roll(x, (1, 1), (0, 1))) / 4).round().astype(np.uint8)


def test_a_picture_has_its_own_detail_a_blurred_one_less_and_a_noisy_one_more():
    one = scene()
    noise = np.random.default_rng(0).integers(-9, 10, one.shape)
    noisy = np.clip(one.astype(int) + noise, 0, 255).astype(np.uint8)
    assert gradient_energy(blurred(one)) < 0.9 * gradient_energy(one) < 0.9 * gradient_energy(noisy)
    assert gradient_energy(np.full_like(one, 7)) == 0
    assert gradient_energy(one) == pytest.approx(gradient_energy(one.transpose(1, 0, 2)))


def test_the_detail_of_a_ramp_is_its_slope_squared():
    ramp = np.broadcast_to((np.arange(32) * 3)[None, :, None], (32, 32, 3)).astype(np.uint8)
    assert gradient_energy(ramp) == pytest.approx(9)


def made(gradient: list[float], seconds: list[list[float]] | None = None, beside: float = 2.0) -> dict[int, dict]:
    """One part with these pictures."""
    count = len(gradient)
    row = {"work": 1.0, "squared_error": [1.0] * count, "ssim": [1.0] * count, "gradient": gradient}
    return {0: {**row, **({"seconds": seconds, "beside": [beside] * count} if seconds else {})}}


def test_detail_is_a_share_of_the_unmerged_pictures_and_its_mean_is_geometric():
    plain = made([4.0, 9.0])
    assert quality_figures._pictures(plain, plain).detail == (1.0, 0.0)
    assert quality_figures._pictures(made([1.0, 36.0]), plain).detail.value == pytest.approx(math.sqrt(1 / 4 * 4))
    assert quality_figures._pictures(made([0.0, 9.0]), plain).detail.value > 0, "a picture without any is no error"


def test_time_is_of_all_calls_and_the_dearest_is_of_one():
    plain = made([1.0] * 3, [[2.0, 2.0]] * 3)
    unmerged = quality_figures._pictures(plain, plain)
    assert (unmerged.time, unmerged.dearest) == (1.0, 1.0)
    found = quality_figures._pictures(made([1.0] * 3, [[3.0, 1.0], [3.0, 1.0], [99.0, 1.0]]), plain)
    assert (found.time, found.dearest) == (1.0, 1.5), "one disturbed call is none of the three's median"
    twice = quality_figures._pictures(made([1.0] * 3, [[2.0] * 4] * 3), plain)
    assert (twice.time, twice.dearest) == (2.0, 1.0)
    without = quality_figures._pictures(made([1.0]), made([1.0]))
    assert (without.time, without.dearest) == (None, None)


def test_the_clock_sees_every_call_and_nothing_of_the_patch_in_unmerged_ones():
    class Slow(torch.nn.Module):
        slow = False

        def forward(self, x, scale):
            end = time.process_time() + (0.02 if self.slow else 0.0)
            while time.process_time() < end:
                pass
            return x * scale

    unet = Slow()
    times = CallTimes(unet)
    with times:
        unet.slow = True
        unet(torch.ones(1), scale=2), unet(torch.ones(1), scale=2)
        unet.slow = False
    assert len(times.seconds) == 2 and all(0.02 <= one < 1 for one in times.seconds)
    calls = []
    hook = unet.register_forward_hook(lambda module, args, out: calls.append(out))
    assert times.time_unmerged() < 0.01 and calls == [torch.full((1,), 2.0)] * BESIDE
    hook.remove()
    assert len(times.seconds) == 2 and not unet._forward_hooks and not unet._forward_pre_hooks


def test_one_thread_is_for_the_clock_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for wanted, inside in ((True, 1), (False, 2)):
            with one_thread(wanted):
                assert torch.get_num_threads() == inside
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_run_with_the_clock_shows_time_and_detail_and_how_the_pictures_were_made(tiny_file, tmp_path, capsys):
    arguments = ["--smallest", "--clock", "--model", str(tiny_file), "--pictures", "2", "--schedule", "karras",
                 "--guidance", "7.5", "--output", str(tmp_path / "result.json")]  # fmt: skip
    assert quality.main(arguments) == 0
    record = results.load(tmp_path / "result.json")
    said = {"for": SHOW, "schedule": "karras", "guidance": 7.5, "clock": True}
    assert said.items() <= record["settings"].items()
    assert record["device"]["threads"] == 1
    (section,) = sections(record)
    assert section.pictures[BOTH].time > 1.3
    assert all(one.detail.value > 0 and one.dearest > 0 for one in section.pictures.values())
    plain = [row for row in record["rows"] if row["variant"] == PLAIN and row["measure"] == "pictures"]
    assert [len(one) for row in plain for one in row["seconds"]] == [2, 2]
    out = capsys.readouterr().out
    assert "| dev % | PSNR dB | SSIM | detail | time | dearest step |" in out
    assert "2 solver steps, karras, guidance 7.5" in out


def test_schedules_run_from_noisy_to_clean_and_end_where_they_say():
    for steps in (4, 8, 20):
        own = sampler.solver(tiny_scenes.make(), steps).timesteps.tolist()
        late = subjects.timesteps("late-half", CONFIG, steps)
        assert subjects.timesteps("uniform", CONFIG, steps) is None
        assert late == sampler.solver(tiny_scenes.make(), 2 * steps).timesteps.tolist()[steps:]
        karras = subjects.timesteps("karras", CONFIG, steps)
        for times in (own, late, karras):
            assert len(times) == steps and times == sorted(set(times), reverse=True)
        assert max(late) < 500 < max(karras)


def test_karras_steps_are_even_in_the_seventh_root_of_sigma():
    kept = sampler.DDPMScheduler(**CONFIG).alphas_cumprod.double()
    times = subjects.timesteps("karras", CONFIG, 20)
    roots = ((1 - kept[times]) / kept[times]).sqrt() ** (1 / 7)
    assert roots[0] ** 7 == pytest.approx(14.6, rel=0.05) and times[-1] == 0
    apart = -roots.diff()
    assert apart.max() < 1.2 * apart.median() and apart.min() > 0.8 * apart.median()


def test_guidance_and_schedule_change_pictures_and_their_defaults_do_not(tiny_file):
    def picture(*manner) -> np.ndarray:
        subject = SceneSubject(tiny_file, torch.device("cpu"), PURPOSES[SHOW], subjects.Manner(*manner))
        return subject.picture(3, 4)

    default = picture()
    tokens = prompt.tokens(PURPOSES[SHOW].prompts[3])
    assert np.array_equal(default, sampler.sample(model.load(tiny_file), tokens, PURPOSES[SHOW].first + 3, steps=4))
    others = [picture("karras"), picture("late-half"), picture("uniform", 7.5)]
    assert all(not np.array_equal(a, b) for i, a in enumerate(others) for b in (default, *others[:i]))


def test_a_solvers_own_timesteps_given_to_it_change_nothing(tiny_file):
    loaded, tokens = model.load(tiny_file), prompt.tokens("day sea")
    own = sampler.solver(loaded, 5).timesteps.tolist()
    assert np.array_equal(sampler.sample(loaded, tokens, 1, steps=5),
                          sampler.sample(loaded, tokens, 1, timesteps=own))  # fmt: skip


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


def test_what_a_users_own_checkpoint_does_not_take_is_refused(tmp_path, capsys):
    folder = tiny_pipeline.write_folder(tmp_path)
    for more in (["--schedule", "karras"], ["--guidance", "3"]):
        assert quality.main(["--smallest", "--model", str(folder), *more]) == 2
        assert "--schedule and --guidance are of the scene models" in capsys.readouterr().err


def section(**times_and_psnr):
    """A model's figures: name -> (method, time, PSNR)."""
    variants, pictures, noised = {}, {}, {}
    for name, (method, share, psnr) in times_and_psnr.items():
        variants[name] = {"method": method, "setting": name, "role": "method", "code": "engine"}
        pictures[name] = PictureMeans(0.1, Mean(psnr, 1.0), Mean(psnr / 100, 0.0), time=share)
        noised[name] = NoiseMeans(0.1, Mean(0, 0), Mean(10 ** (-psnr / 20), 0), (), ())
    return Section("model", 1.0, {}, variants, noised, pictures)


OURS = {"quality": ("preset", 0.8, 50.0), "fast": ("preset", 0.6, 40.0)}


def test_between_two_strengths_a_line_is_drawn_over_time():
    (one,) = at_equal_time(section(**OURS, other=("downsample", 0.65, 41.0)))
    assert one.name == "other" and one.theirs == Point(0.65, 41.0, 0.41, pytest.approx(10**-2.05))
    assert one.ours.psnr == pytest.approx(42.5) and one.ours.ssim == pytest.approx(0.425)
    assert one.ours.dev == pytest.approx(10 ** (-42.5 / 20))


def test_a_slower_method_meets_the_slowest_strength_and_a_faster_one_meets_none():
    slow, quick = at_equal_time(section(**OURS, slow=("tiles", 0.95, 60.0), quick=("tiles", 0.5, 20.0)))
    assert slow.ours.psnr == 50.0 and slow.ours.time == 0.8
    assert quick.ours is None


def test_a_strength_that_another_beats_in_time_and_psnr_is_not_on_the_front():
    (one,) = at_equal_time(section(**OURS, bad=("strength", 0.7, 20.0), other=("tiles", 0.7, 1.0)))
    assert one.ours.psnr == pytest.approx(45.0)
    assert front_at([Point(0.5, 30.0, 0.9, None)], 0.5).psnr == 30.0


def test_controls_and_results_without_strengths_or_times_have_no_such_table():
    assert not list(at_equal_time(section(other=("tiles", 0.7, 1.0))))
    assert not list(at_equal_time(section(**OURS)))
    untimed = section(**OURS, other=("tiles", None, 1.0))
    assert not list(at_equal_time(untimed))


def test_the_report_shows_theirs_and_ours():
    (text,) = quality_report._at_equal_time(section(**OURS, other=("tiles", 0.7, 41.0), quick=("tiles", 0.5, 20.0)))
    assert "model: others beside strength at equal time" in text
    assert "| tiles | other | 0.70 | 41, 45 | 0.41, 0.45 |" in text
    assert "| tiles | quick | 0.50 | 20, n/a | 0.2, n/a |" in text
    assert not list(quality_report._at_equal_time(section(**OURS)))
