"""The figures of a quality result are as defined, and other methods are compared with strength at equal time."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import quality_report
from benchmarks.quality_figures import Mean, Pictured, Section, at_equal_time, sections
from benchmarks.timing import BESIDE, CallTimes
from benchmarks.variants import PLAIN
from demo import sampler
from demo.metrics import gradient_energy
from demo.training_loss import Scenes


def a_record(**rows: dict[str, Any]) -> dict[str, Any]:
    """A record of one model. rows: each variant's only part of both measures."""
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
    noised, gap = section.noised["x"], 100 * (changed - loss) / loss.mean()
    assert noised.gap == pytest.approx((gap.mean(), gap.mean(0).std(ddof=1) / math.sqrt(10)))
    scale = 100 / loss.mean()
    assert noised.dev_at[1] == pytest.approx((scale * dev[1].mean(), scale * dev[1].std(ddof=1) / math.sqrt(10)))
    assert section.pictures["x"].psnr.value == pytest.approx(np.mean(10 * np.log10(255**2 / errors)))


def test_a_mean_of_one_has_no_error_and_equal_pictures_are_called_so():
    assert Mean.of(np.array([2.0])) == (2.0, None)
    assert quality_report.mean(Mean(math.inf, None)) == "equal"
    assert quality_report.mean(Mean(1.23456, 0.0123)) == "1.235 ± 0.012"


def test_a_picture_has_its_own_detail_a_blurred_one_less_and_a_noisy_one_more():
    picture = sampler.to_bytes(Scenes(0, 1, 64)[0][0])[0]
    rolled = (np.roll(picture.astype(float), shift, (0, 1)) for shift in ((0, 0), (0, 1), (1, 0), (1, 1)))
    blurred = (sum(rolled) / 4).round().astype(np.uint8)
    noise = np.random.default_rng(0).integers(-9, 10, picture.shape)
    noisy = np.clip(picture.astype(int) + noise, 0, 255).astype(np.uint8)
    assert gradient_energy(blurred) < 0.9 * gradient_energy(picture) < 0.9 * gradient_energy(noisy)


def figures(gradient: list[float], seconds: list[list[float]] | None = None, plain: Any = None) -> Pictured:
    """Of pictures with this detail, and calls that took so long; unmerged ones take two seconds each."""

    def row(gradient: list[float], seconds: list[list[float]] | None) -> dict[str, Any]:
        ones = [1.0] * len(gradient)
        timed = {"seconds": seconds, "beside": [2.0] * len(ones)} if seconds else {}
        return {"loss": [ones], "dev": [ones], "squared_error": ones, "ssim": ones, "gradient": gradient, **timed}

    unmerged = seconds and [[2.0, 2.0]] * len(gradient)
    (section,) = sections(a_record(**{PLAIN: row(plain or gradient, unmerged), "x": row(gradient, seconds)}))
    return section.pictures["x"]


def test_detail_is_a_share_of_the_unmerged_pictures_and_its_mean_is_geometric():
    assert figures([4.0, 9.0]).detail == (1.0, 0.0)
    assert figures([1.0, 36.0], plain=[4.0, 9.0]).detail.value == pytest.approx(1)
    assert figures([0.0, 9.0], plain=[4.0, 9.0]).detail.value > 0, "a picture without any is no error"


@pytest.mark.parametrize(("seconds", "share"), [
    ([[2.0, 2.0]] * 3, 1.0), ([[3.0, 1.0], [3.0, 1.0], [99.0, 1.0]], 1.0), ([[2.0] * 4] * 3, 2.0), (None, None),
])  # fmt: skip
def test_time_is_of_all_calls_and_one_disturbed_call_is_none_of_the_medians(seconds, share):
    assert figures([1.0] * 3, seconds).time == share


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
    assert len(times.seconds) == 2 and all(0.02 <= taken < 1 for taken in times.seconds)
    calls = []
    unet.register_forward_hook(lambda module, args, out: calls.append(out))
    assert times.time_unmerged() < 0.01 and calls == [torch.full((1,), 2.0)] * BESIDE
    assert len(times.seconds) == 2


OURS = {"quality": ("preset", 0.8, 50.0), "fast": ("preset", 0.6, 40.0)}


@pytest.mark.parametrize(("more", "row"), [
    ({"it": ("downsample", 0.65, 41.0)}, "| it | 0.65 | 41, 42.5 |"),
    ({"slower than all": ("tiles", 0.95, 60.0)}, "| slower than all | 0.95 | 60, 50 |"),
    ({"faster than all": ("tiles", 0.5, 20.0)}, "| faster than all | 0.50 | 20, n/a |"),
    ({"beaten": ("strength", 0.7, 20.0), "it": ("tiles", 0.7, 1.0)}, "| it | 0.70 | 1, 45 |"),
    ({"untimed": ("tiles", None, 1.0)}, None),
    ({}, None),
])  # fmt: skip
def test_another_methods_row_has_the_psnr_of_strength_at_its_time(more, row):
    """It is on a line between strengths that no other one beats; without others or times there is no table."""
    variants, pictures = {}, {}
    for name, (method, share, psnr) in {**OURS, **more}.items():
        variants[name] = {"method": method, "setting": name, "role": "method", "code": "engine"}
        pictures[name] = Pictured(0.1, Mean(psnr, 1.0), Mean(psnr / 100, 0.0), time=share)
    section = Section("model", 1.0, {}, variants, {}, pictures)
    text = "\n".join(quality_report._at_equal_time(section))
    assert row in text if row else not text
    without = section._replace(pictures={name: figures for name, figures in pictures.items() if name not in OURS})
    assert "beaten" in more or not list(at_equal_time(without))
