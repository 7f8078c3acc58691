"""The benchmark of cases: each draws as its name says, and its rows are what they claim."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import case_pictures, cases, cases_report, results
from benchmarks.case_pictures import CASES, HYPER_TIME, SOLVERS, PictureCase, PictureOrder, draw, enlarge
from demo import model, prompt, sampler
from tests import tiny_scenes
from tome_core import strength
from tome_core.settings.presets import MARKS

WORDS = [prompt.tokens(text) for text in prompt.PROMPTS]
SIDE = tiny_scenes.SIDE


@pytest.fixture(scope="module")
def tiny() -> model.SceneModel:
    return tiny_scenes.make()


def a_scene(seed: int = 0) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    return model.encode(torch.rand(1, 3, 2 * SIDE, 2 * SIDE, generator=dice) * 2 - 1)


def asked(count: int) -> list[PictureOrder]:
    return [PictureOrder(WORDS[seed % len(WORDS)], seed, a_scene(seed)) for seed in range(count)]


def test_the_plain_case_is_the_demos_picture(tiny):
    (picture,) = draw(tiny, PictureCase("as the demo", 4, guidance=sampler.GUIDANCE), asked(1))
    assert np.array_equal(picture, sampler.sample(tiny, WORDS[0], 0, steps=4))


def test_a_case_calls_the_unet_as_it_says(tiny, monkeypatch):
    """As often, on as many latents of that size, in ever less noise, from where in the schedule it begins."""
    seen = []

    def look(self, latents, timestep, tokens):
        assert len(tokens) == len(latents)
        seen.append((float(timestep), tuple(latents.shape)))
        return torch.zeros_like(latents)

    monkeypatch.setattr(type(tiny), "forward", look)
    for name, case in CASES.items():
        seen.clear()
        draw(tiny, case, asked(case.batch))
        steps = round(case.steps * case.denoise) * (4 if case.tiled else 1)
        assert len(seen) == (2 * steps - 1 if case.solver == "EDM" else steps), name
        side = SIDE * case.scale * 5 // 8 if case.tiled else SIDE * case.scale
        rows = case.batch * (1 if case.guidance == 1 else 2)
        assert {shape for _, shape in seen} == {(rows, 12, side, side)}, name
        times = [time for time, _ in seen]
        assert times == sorted(times, reverse=True), name
        assert 750 * case.denoise < times[0] <= 1000 * case.denoise, name


def test_few_step_shapes_begin_where_their_models_do(tiny):
    first = {name: float(SOLVERS[CASES[name].solver](tiny, CASES[name].steps).timesteps[0]) for name in CASES}
    assert first["Turbo's shape, 1 step"] == first["Lightning's shape, 4 steps"] == first["LCM's shape, 4 steps"] == 999
    assert first["Hyper's shape, 1 step"] == HYPER_TIME


@pytest.mark.parametrize("strength", [0, MARKS["balanced"]], ids=["unmerged", "merged"])
def test_a_picture_of_a_batch_is_the_one_alone_but_for_rounding(tiny, strength):
    def pictures(some: list[PictureOrder]) -> np.ndarray:
        with cases.variants.strength(strength)(tiny.unet, 0):
            return draw(tiny, case, some).astype(int)

    for solver, guidance in (("DPM++ 2M", 1), ("ancestral", 1.5), ("LCM", 1.5)):
        case = PictureCase("a batch", 2, solver, guidance=guidance, batch=2)
        together, alone = pictures(asked(2)), [pictures([one])[0] for one in asked(2)]
        assert np.abs(together - alone).max() <= 1 < np.abs(together[0] - together[1]).max(), solver
        assert (together != draw(tiny, case, asked(2))).any() == bool(strength), solver


def test_inpainting_keeps_what_is_not_painted(tiny):
    (before,) = sampler.to_bytes(model.decode(a_scene()))
    for solver in ("DPM++ 2M", "Euler", "ancestral", "SDE", "LCM"):
        case = PictureCase("inpainting", 4, solver, denoise=0.75, inpaint=True)
        (after,) = draw(tiny, case, asked(1))
        assert np.array_equal(after[:, :SIDE], before[:, :SIDE]), solver
        assert (after[:, SIDE:] != before[:, SIDE:]).mean() > 0.5, solver


class Idle:
    """A solver that changes nothing."""

    timesteps = torch.arange(9, -1, -1)

    def set_begin_index(self, index):
        self.begun = index

    def add_noise(self, scene, noise, times):
        assert self.begun == 7 and times.tolist() == [2]
        return scene

    def scale_model_input(self, latent, time):
        return latent

    def step(self, velocity, time, latent):
        return type("Stepped", (), {"prev_sample": latent})


def test_an_image_pass_of_no_noise_is_the_scene_enlarged(tiny, monkeypatch):
    """Its noise left out and the model asked for nothing, what it begins with is what comes out."""
    case = PictureCase("hires", 10, denoise=0.3, scale=2)
    begun = enlarge(tiny, a_scene(), 2)
    assert begun.shape[-1] == 2 * SIDE
    monkeypatch.setattr(case_pictures, "SOLVERS", {case.solver: lambda *_: Idle()})
    (picture,) = draw(tiny, case, asked(1))
    assert np.array_equal(picture, sampler.to_bytes(model.decode(begun))[0])


def test_tiles_cover_the_picture_and_overlaps_are_means():
    latent = torch.rand(1, 1, 16, 16)
    assert torch.allclose(case_pictures._in_tiles(lambda tile: tile, latent), latent)
    number = iter((0.0, 1.0, 2.0, 3.0))
    found = case_pictures._in_tiles(lambda tile: torch.full_like(tile, next(number)), latent)[0, 0]
    assert (found[0, 0], found[0, 15], found[15, 0], found[15, 15]) == (0, 1, 2, 3)
    assert found[0, 8] == 0.5 and found[8, 0] == 1 and found[8, 8] == 1.5


def run(arguments: list[str], output: Path) -> results.Record:
    assert cases.main([*arguments, "--output", str(output)]) == 0
    return results.load(output)


def test_a_resumed_run_is_the_whole_one(tiny_file, tmp_path, monkeypatch):
    small = ["--model", str(tiny_file), "--pictures", "2", "--cases", "1 step", "Turbo's shape, 1 step"]
    whole = run(small, tmp_path / "whole.json")
    assert [row["key"] for row in whole["rows"]] == [
        f"tiny, {case}, {number}, {mark}" for number in range(2) for case in small[5:] for mark in MARKS]  # fmt: skip
    cut = tmp_path / "cut.json"
    results.save({**whole, "rows": whole["rows"][:5]}, cut)
    measured, measure = [], cases.CaseBench.measure
    monkeypatch.setattr(cases.CaseBench, "measure", lambda bench, row: measured.append(row.key) or measure(bench, row))
    resumed = run(small, cut)["rows"]
    assert all(row.pop("seconds")[1] > 0 for row in (*resumed, *whole["rows"]))
    assert resumed == whole["rows"] and measured == [row["key"] for row in whole["rows"][5:]]


def test_the_table_has_the_means_and_says_what_is_missing():
    """Of a case of two pictures, one without any error, one of them with half of its detail."""
    rows = [{"key": mark, "model": "a", "case": "20 steps", "number": 0, "strength": mark, "work": 0.0625,
             "squared_error": [0.0, 4.0], "gradient": [[2.0, 1.0], [1.0, 1.0]], "seconds": [4.0, 3.0]}
            for mark in MARKS]  # fmt: skip
    record = {"rows": rows, "missing": [], "command": "made up", "commit": "none", "device": {"name": "none"},
              "settings": {"strengths": MARKS, "cases": [vars(case) for case in CASES.values()]}}  # fmt: skip
    text = cases_report.table([record])
    work, time, psnr, rms, detail = (" / ".join([one] * 4) for one in ("0.062", "0.75", "inf", "1.00", "0.750"))
    assert f"| 20 steps | 2 | {work} | {time} | {psnr} | {rms} | {detail} |" in text
    assert "Unfinished" not in text and "4 steps |" not in text
    cut = cases_report.table([{**record, "rows": rows[:3], "missing": ["one"]}])
    assert "Unfinished: 1 rows are missing" in cut and "| 20 steps | 0 | 0.062 / 0.062 / 0.062 / - |" in cut
    assert cases_report.expect("balanced") == pytest.approx(0.0625, rel=1e-3)
    assert cases_report.expect("max") == 1 / 64 == 1 - strength(1).rules[0].ratio


def test_the_command_lists_its_cases_and_refuses_what_is_none(tmp_path, capsys):
    assert cases.main(["--list"]) == 0 and capsys.readouterr().out.split("\n")[:-1] == list(CASES)
    assert cases.main(["--model", "nowhere.safetensors", "--output", str(tmp_path / "result.json")]) == 2
    assert "nowhere.safetensors" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert cases.main(["--pictures", "0"]) == 2 and "--pictures 0: give a number" in capsys.readouterr().err
