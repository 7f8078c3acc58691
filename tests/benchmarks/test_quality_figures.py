"""From rows of a quality result to its figures: as they are defined, and others beside strength at equal time."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import quality_figures, quality_report
from benchmarks.attention_work import BESIDE, CallTimes, one_thread
from benchmarks.quality_figures import Mean, NoiseMeans, PictureMeans, Point, Section, at_equal_time, front_at, sections
from benchmarks.variant_list import PLAIN
from demo import sampler
from demo.metrics import gradient_energy
from demo.training_loss import Scenes


def a_record(**rows: dict[str, Any]) -> dict[str, Any]:
    """Of one model. rows: of each variant's only part of both measures."""
    described = [{"name": name, "method": name, "setting": "", "role": "method", "code": ""} for name in rows]
    return {"settings": {"models": {"a": ""}, "variants": described}, "rows": [
        {"checkpoint": "a", "measure": measure, "part": 0, "variant": name, "work": 1, **row}
        for name, row in rows.items() for measure in ("noised", "pictures")
    ]}  # fmt: skip


def test_the_figures_are_those_of_the_definitions():
    dice = np.random.default_rng(0)
    loss, changed, dev = (dice.random((2, 10)) for _ in range(3))
    errors = dice.random(10)
    of_pictures = {"gradient": [1.0] * 10, "ssim": [1.0] * 10}
    (section,) = sections(a_record(**{
        PLAIN: {"loss": loss, "dev": 0 * dev, "squared_error": 0 * errors, **of_pictures},
        "x": {"loss": changed, "dev": dev, "squared_error": errors, **of_pictures},
    }))  # fmt: skip
    found, gap = section.noised["x"], 100 * (changed - loss) / loss.mean()
    assert found.gap == pytest.approx((gap.mean(), gap.mean(0).std(ddof=1) / math.sqrt(10)))
    scale = 100 / loss.mean()
    assert found.dev_at[1] == pytest.approx((scale * dev[1].mean(), scale * dev[1].std(ddof=1) / math.sqrt(10)))
    assert section.pictures["x"].psnr.value == pytest.approx(np.mean(10 * np.log10(255**2 / errors)))


def test_a_mean_of_one_has_no_error_and_equal_pictures_are_called_so():
    assert Mean.of(np.array([2.0])) == (2.0, None)
    assert Mean.of(np.array([1.0, 3.0])) == (2.0, 1.0)
    assert quality_report._mean(Mean(math.inf, None)) == "equal"
    assert quality_report._mean(Mean(1.23456, 0.0123)) == "1.235 ± 0.012"


def test_a_picture_has_its_own_detail_a_blurred_one_less_and_a_noisy_one_more():
    picture = sampler.to_bytes(Scenes(0, 1, 64)[0][0])[0]
    rolled = (np.roll(picture.astype(float), shift, (0, 1)) for shift in ((0, 0), (0, 1), (1, 0), (1, 1)))
    blurred = (sum(rolled) / 4).round().astype(np.uint8)
    noise = np.random.default_rng(0).integers(-9, 10, picture.shape)
    noisy = np.clip(picture.astype(int) + noise, 0, 255).astype(np.uint8)
    assert gradient_energy(blurred) < 0.9 * gradient_energy(picture) < 0.9 * gradient_energy(noisy)
    ramp = np.broadcast_to((np.arange(32) * 3)[None, :, None], (32, 32, 3)).astype(np.uint8)
    assert gradient_energy(ramp) == gradient_energy(ramp.transpose(1, 0, 2)) == pytest.approx(9)


def figures(gradient: list[float], seconds: list[list[float]] | None = None, plain: Any = None) -> PictureMeans:
    """Of pictures with this detail, and calls that took so long; unmerged ones take two seconds each."""

    def part(gradient: list[float], seconds: list[list[float]] | None) -> dict[int, dict]:
        count = len(gradient)
        row = {"work": 1.0, "squared_error": [1.0] * count, "ssim": [1.0] * count, "gradient": gradient}
        return {0: {**row, **({"seconds": seconds, "beside": [2.0] * count} if seconds else {})}}

    unmerged = seconds and [[2.0, 2.0]] * len(gradient)
    return quality_figures._pictures(part(gradient, seconds), part(plain or gradient, unmerged))


def test_detail_is_a_share_of_the_unmerged_pictures_and_its_mean_is_geometric():
    assert figures([4.0, 9.0]).detail == (1.0, 0.0)
    assert figures([1.0, 36.0], plain=[4.0, 9.0]).detail.value == pytest.approx(math.sqrt(1 / 4 * 4))
    assert figures([0.0, 9.0], plain=[4.0, 9.0]).detail.value > 0, "a picture without any is no error"


def test_time_is_of_all_calls_and_the_dearest_is_of_one():
    for seconds, whole, dearest in (
        ([[2.0, 2.0]] * 3, 1.0, 1.0),
        ([[3.0, 1.0], [3.0, 1.0], [99.0, 1.0]], 1.0, 1.5),  # one disturbed call is none of the three's median
        ([[2.0] * 4] * 3, 2.0, 1.0),
        (None, None, None),
    ):
        found = figures([1.0] * 3, seconds)
        assert (found.time, found.dearest) == (whole, dearest)


class Slow(torch.nn.Module):
    """Takes a fiftieth of a second while it is slow."""

    slow = True

    def forward(self, x: torch.Tensor, scale: int) -> torch.Tensor:
        end = time.process_time() + (0.02 if self.slow else 0.0)
        while time.process_time() < end:
            pass
        return x * scale


def test_the_clock_sees_every_call_and_nothing_of_the_patch_in_unmerged_ones():
    unet = Slow()
    times = CallTimes(unet)
    with times:
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


def section(**times_and_psnr: tuple[str, float | None, float]) -> Section:
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


def test_the_report_shows_theirs_and_ours_and_no_such_table_without_strengths_or_times():
    (text,) = quality_report._at_equal_time(section(**OURS, other=("tiles", 0.7, 41.0), quick=("tiles", 0.5, 20.0)))
    assert "model: others beside strength at equal time" in text
    assert "| tiles | other | 0.70 | 41, 45 | 0.41, 0.45 |" in text
    assert "| tiles | quick | 0.50 | 20, n/a | 0.2, n/a |" in text
    for without in ({"other": ("tiles", 0.7, 1.0)}, OURS, {**OURS, "other": ("tiles", None, 1.0)}):
        assert not list(quality_report._at_equal_time(section(**without)))
