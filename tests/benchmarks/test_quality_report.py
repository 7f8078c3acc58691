"""The figures of a quality result are as defined, and other methods are compared with strength at equal time."""

import math
import time
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.quality_report import Mean, Pictured, Section, at_equal_time, sections
from benchmarks.timing import UNMERGED_CALLS, CallTimes
from benchmarks.variants import PLAIN
from demo import sampler
from demo.metrics import gradient_energy
from demo.training.loss import Scenes


def section_of(**rows: dict[str, Any]) -> Section:
    """The figures of one model. rows: for each variant the only part of both measures."""
    described = [{"name": name, "method": name, "setting": "", "role": "method", "code": ""} for name in rows]
    (section,) = sections({"settings": {"models": {"a": ""}, "variants": described}, "rows": [
        {"checkpoint": "a", "measure": measure, "part": 0, "variant": name, "work": 1, **row}
        for name, row in rows.items() for measure in ("noised", "pictures")
    ]})  # fmt: skip
    return section


def test_the_figures_are_those_of_the_definitions():
    dice = np.random.default_rng(0)
    loss, dev, errors = dice.random((2, 10)), dice.random((2, 10)), dice.random(10)
    rows = {PLAIN: {"loss": loss, "dev": 0 * dev, "squared_error": 0 * errors},
            "x": {"loss": loss, "dev": dev, "squared_error": errors}}  # fmt: skip
    section = section_of(**{name: {**row, "gradient": [1.0] * 10} for name, row in rows.items()})
    noised, percent = section.noised["x"], 100 * dev / loss.mean()
    assert noised.dev == pytest.approx((percent.mean(), percent.mean(0).std(ddof=1) / math.sqrt(10)))
    assert noised.dev_at[1] == pytest.approx((percent[1].mean(), percent[1].std(ddof=1) / math.sqrt(10)))
    assert section.pictures["x"].psnr.value == pytest.approx(np.mean(10 * np.log10(255**2 / errors)))


def test_a_picture_has_its_own_detail_a_blurred_one_less_and_a_noisy_one_more():
    picture = sampler.to_bytes(Scenes(0, 1, 64)[0][0])[0].astype(float)
    blurred = sum(np.roll(picture, shift, (0, 1)) for shift in ((0, 0), (0, 1), (1, 0), (1, 1))) / 4
    noisy = (picture + np.random.default_rng(0).integers(-9, 10, picture.shape)).clip(0, 255)
    assert gradient_energy(blurred) < 0.9 * gradient_energy(picture) < 0.9 * gradient_energy(noisy)


def figures(gradient: list[float], seconds: list[list[float]], plain: list[float]) -> Pictured:
    """Figures of pictures with this detail and calls of these seconds; an unmerged call takes two seconds."""
    def row(gradient: list[float], seconds: list[list[float]]) -> dict[str, Any]:
        ones = [1.0] * len(gradient)
        return {"loss": [ones], "dev": [ones], "squared_error": ones, "gradient": gradient, "seconds": seconds,
                "beside": [2.0] * len(ones)}  # fmt: skip

    rows = {PLAIN: row(plain, [[2.0, 2.0]] * len(plain)), "x": row(gradient, seconds)}
    return section_of(**rows).pictures["x"]


def test_detail_is_a_share_of_the_unmerged_pictures_and_its_mean_is_geometric():
    for gradient, plain, detail in (([4.0, 9.0], [4.0, 9.0], 1), ([1.0, 36.0], [4.0, 9.0], 1), ([8.0], [2.0], 4)):
        assert figures(gradient, [[2.0]] * len(gradient), plain).detail.value == pytest.approx(detail)


@pytest.mark.parametrize(("seconds", "share"), [([[2.0, 2.0]] * 3, 1.0), ([[3.0, 1.0], [3.0, 1.0], [99.0, 1.0]], 1.0),
                                                ([[2.0] * 4] * 3, 2.0)])  # fmt: skip
def test_time_is_of_all_calls_and_one_disturbed_call_is_none_of_the_medians(seconds, share):
    assert figures([1.0] * 3, seconds, [1.0] * 3).time == share


class Slow(torch.nn.Module):
    """A model whose call takes a fiftieth of a second while `slow` is set, like a patched one."""

    slow = True

    def forward(self, x: torch.Tensor, scale: int) -> torch.Tensor:
        end = time.process_time() + 0.02 * self.slow
        while time.process_time() < end:
            pass
        return x * scale


def test_the_clock_sees_every_call_and_repeats_the_latest_one_unmerged():
    network, answers = Slow(), []
    network.register_forward_hook(lambda module, args, out: answers.append(out))
    times = CallTimes(network)
    with times:
        network(torch.ones(1), scale=1), network(torch.ones(1), scale=2)
        network.slow = False
    assert times.time_unmerged() < 0.01 and answers[2:] == [torch.full((1,), 2.0)] * UNMERGED_CALLS
    assert len(times.seconds) == 2 and all(0.02 <= taken < 1 for taken in times.seconds)


OURS = {"quality": ("preset", 0.8, 50.0), "fast": ("preset", 0.6, 40.0)}


@pytest.mark.parametrize(("more", "beside"), [
    ({"it": ("downsample", 0.65, 41.0)}, ("it", 0.65, 41, 42.5)),
    ({"faster than all": ("tiles", 0.5, 20.0)}, ("faster than all", 0.5, 20, None)),
    ({"beaten": ("strength", 0.7, 20.0), "it": ("tiles", 0.7, 1.0)}, ("it", 0.7, 1, 45))])  # fmt: skip
def test_another_method_is_compared_with_the_psnr_of_strength_at_its_time(more, beside):
    """The PSNR lies on a line between strengths that no other strength beats."""
    both = {**OURS, **more}
    variants = {name: {"method": method, "role": "method"} for name, (method, *_) in both.items()}
    pictures = {name: Pictured(0.1, Mean(psnr, 1.0), time=share) for name, (_, share, psnr) in both.items()}
    (rival,) = at_equal_time(Section("model", 1.0, {}, variants, {}, pictures))
    assert (*rival[:3], rival.ours and round(rival.ours, 6)) == beside
