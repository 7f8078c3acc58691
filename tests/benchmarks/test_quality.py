"""The quality benchmark: what it measures on the shipped weights, and that its results are those of its command."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import picture_metrics, quality, quality_report, report, results, subjects
from benchmarks.networks import UNET
from benchmarks.quality_figures import Mean, sections
from benchmarks.quality_rows import Amounts, QualityBench, Row, rows
from benchmarks.subjects import CHOOSE, PURPOSES, SHOW, SceneSubject
from benchmarks.variant_list import ALWAYS, GROUPS, PLAIN, VARIANTS
from demo import model, scene_wall
from tests import tiny_pipeline

ROOT = Path(__file__).parents[2]
CONTROLS = [name for name, variant in VARIANTS.items() if variant.role == "control"]
OF_UNETS = {name: variant for name, variant in VARIANTS.items() if UNET in variant.kinds}
AT_A_RATIO_OF_75 = [name for name, variant in OF_UNETS.items()
                    if variant.setting == "0.75" and variant.role in ("method", "tomesd")]  # fmt: skip
FEW = ("tomesd-0.75", "cluster-0.75", "sized-0.75", "sized-kv-0.75")  # one of each kind, the others are slow


@pytest.fixture(scope="module")
def small(tiny_file) -> list[str]:
    """Arguments of a run of a few seconds."""
    return ["--smallest", "--model", str(tiny_file), "--noised", "10", "--pictures", "5", "--steps", "1"]


def run(arguments: list[str], output: Path) -> results.Record:
    assert quality.main([*arguments, "--output", str(output)]) == 0
    return results.load(output)


@pytest.fixture(scope="module")
def whole_file(small, tmp_path_factory) -> Path:
    """What those arguments give, in one go; copy it before changing it."""
    path = tmp_path_factory.mktemp("whole") / "result.json"
    run(small, path)
    return path


@pytest.fixture
def whole(whole_file) -> results.Record:
    return results.load(whole_file)


@pytest.fixture(scope="module")
def deviation() -> Callable[[str], float]:
    """Gives the dev of a variant of the shipped model on two pictures at one time: enough for differences of this size.

    Each is measured once, and only if somebody asks.
    """
    subject = SceneSubject(model.WEIGHTS, torch.device("cpu"))
    bench = QualityBench(subject, Amounts(noised=2, pictures=0, steps=0, times=(200,)), None, None)

    @functools.cache
    def measured(name: str) -> float:
        return float(np.mean(bench.measure(Row(subject.name, "noised", 0, 0, 2, name))["dev"]))

    measured(PLAIN)  # which the others are compared with
    return measured


@pytest.mark.slow
def test_the_error_of_a_proportional_merge_grows_with_its_ratio(deviation):
    together = [deviation(f"sized-{ratio}") for ratio in (0.25, 0.5, 0.75)]
    keys = [deviation(f"sized-kv-{setting}") for setting in ("0.5", "0.75", "0.9375-cells-4")]
    assert 0 < together[0] < together[1] < together[2]
    assert 0 < keys[0] < keys[1] < keys[2]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW)) for name in
                                  AT_A_RATIO_OF_75])  # fmt: skip
def test_controls_are_worse_than_any_method_at_a_ratio_of_three_quarters(name, deviation):
    assert len(AT_A_RATIO_OF_75) > 10
    best = min(CONTROLS, key=deviation)
    assert deviation(best) > deviation(name), best


@pytest.mark.slow
def test_the_command_at_its_smallest_setting(tmp_path, capsys):
    record = run(["--smallest"], tmp_path / "result.json")
    assert record["missing"] == [] and record["kind"] == "quality"
    (section,) = sections(record)
    for figures in (section.noised, section.pictures):
        assert {*CONTROLS, "bfloat16"} <= figures.keys()
        assert {figures[name].work for name in ("tomesd-0.75", "bipartite-drawn-0.75")} == {1 / 16}
    dev = {name: one.dev.value for name, one in section.noised.items()}
    assert dev["zero-attention"] > dev["random-partner-0.75"] > dev["tomesd-0.75"]
    assert dev["bfloat16"] < dev["sized-kv-0.75"] < dev["tomesd-0.75"]
    tables = capsys.readouterr().out.split("| method ")[1:]
    assert len(tables) == 4
    for table in tables:
        assert all(f"*{VARIANTS[name].method}*" in table for name in ALWAYS if name != PLAIN)
        assert "**tomesd**" in table


def test_a_run_that_ended_within_a_part_goes_on_to_the_same_result(small, whole, tmp_path):
    cut = tmp_path / "cut.json"
    results.save({**whole, "rows": whole["rows"][:5], "created": "before"}, cut)
    resumed = run(small, cut)
    assert resumed["rows"] == whole["rows"] and resumed["created"] == "before"


def test_several_processes_find_what_one_finds(small, whole, tmp_path, monkeypatch):
    output = tmp_path / "shared.json"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert quality.main([*small, "--output", str(output)]) == 0
    assert results.load(output)["rows"] == whole["rows"]
    assert sorted(path.name for path in tmp_path.glob("shared*")) == ["shared.json", "shared.md"]


def test_what_one_of_several_processes_left_is_used_by_a_single_one(small, tmp_path, monkeypatch):
    output = tmp_path / "shared.json"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert quality.main([*small, "--output", str(output)]) == 0
    left = results.load(tmp_path / "shared.json.rank1")["rows"]
    assert left and not output.exists()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    measured = []
    measure = QualityBench.measure
    monkeypatch.setattr(QualityBench, "measure", lambda bench, row: (measured.append(row.key), measure(bench, row))[1])
    record = run(small, output)
    assert not {row["key"] for row in left} & set(measured)
    assert all(row in record["rows"] for row in left)


def test_every_row_is_some_processs_and_parts_stay_together():
    amounts = Amounts(noised=24, pictures=9, steps=2)
    plan = list(rows("a", GROUPS["all"], amounts, True))
    for count in (1, 2, 3, 7):
        shares = [quality.Processes(rank, count).share(plan) for rank in range(count)]
        assert sorted(row.key for share in shares for row in share) == sorted(row.key for row in plan)
        groups = [{row.group for row in share} for share in shares]
        assert sum(map(len, groups)) == len(set.union(*groups))


def test_a_table_and_a_plot_come_from_the_file_alone(whole_file, tmp_path, capsys):
    alone = tmp_path / "alone.json"
    alone.write_bytes(whole_file.read_bytes())
    assert report.main([str(alone)]) == 0
    table = whole_file.with_suffix(".md").read_text(encoding="utf-8")
    assert (tmp_path / "alone.md").read_text(encoding="utf-8") == table == capsys.readouterr().out
    assert (tmp_path / "alone.png").read_bytes().startswith(b"\x89PNG")


def test_the_figures_are_those_of_the_definitions(whole):
    noised = [row for row in whole["rows"] if row["measure"] == "noised"]
    loss, changed, dev = (
        np.concatenate([np.array(row[what]) for row in noised if row["variant"] == name], 1)
        for name, what in ((PLAIN, "loss"), ("tomesd-0.75", "loss"), ("tomesd-0.75", "dev"))
    )
    assert loss.shape == (2, 10)
    (section,) = sections(whole)
    found = section.noised["tomesd-0.75"]
    gap = 100 * (changed - loss) / loss.mean()
    assert found.gap == pytest.approx((gap.mean(), gap.mean(0).std(ddof=1) / math.sqrt(10)))
    assert found.dev_at[1] == pytest.approx(
        (100 * dev[1].mean() / loss.mean(), 100 * dev[1].std(ddof=1) / loss.mean() / math.sqrt(10))
    )
    pictures = [row for row in whole["rows"] if row["measure"] == "pictures" and row["variant"] == "sized-kv-0.75"]
    decibels = [10 * math.log10(255**2 / error) for row in pictures for error in row["squared_error"]]
    assert len(decibels) == 5
    assert section.pictures["sized-kv-0.75"].psnr.value == pytest.approx(np.mean(decibels))


def test_an_unfinished_result_says_so_and_shows_what_is_there(whole):
    kept = [row for row in whole["rows"] if row["part"] == 0 and row["variant"] != "tomesd-0.75"]
    cut = {**whole, "rows": kept, "missing": ["something"]}
    text = quality_report.table([cut])
    assert "Unfinished: 1 rows are missing" in text and "sized kv" in text and "**tomesd** |" not in text


def test_a_mean_of_one_has_no_error_and_equal_pictures_are_called_so():
    assert Mean.of(np.array([2.0])) == (2.0, None)
    assert Mean.of(np.array([1.0, 3.0])) == (2.0, 1.0)
    assert quality_report._mean(Mean(math.inf, None)) == "equal"
    assert quality_report._mean(Mean(1.23456, 0.0123)) == "1.235 ± 0.012"


WRONG = {
    "an unknown variant": (["--variants", "tomesd-0.6", "tomesd-0.5"], "no variant is called tomesd-0.6; --list"),
    "a missing file": (["--model", "nowhere.safetensors"], "nowhere.safetensors does not exist"),
    "a file that is none": (["--model", "README.md", "--prompts", "README.md"], "README.md ends in '.md'"),
    "few pictures for Frechet": (["--frechet", "--pictures", "256"], "give --pictures 1024 or more"),
    "an odd number": (["--noised", "7"], "--noised 7: give an even number"),
    "no pictures": (["--pictures", "0"], "give numbers from 1 up"),
    "a device that is not there": (["--smallest", "--device", "cuda:77"], "--device cuda:77 does not work here"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_measured_is_refused_in_a_sentence(case, tmp_path, capsys, monkeypatch):
    arguments, sentence = WRONG[case]
    monkeypatch.chdir(ROOT)
    assert quality.main([*arguments, "--output", str(tmp_path / "result.json")]) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1 and not list(tmp_path.iterdir())


def test_processes_without_a_common_file_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert quality.main(["--smallest"]) == 2
    assert "several processes need --output" in capsys.readouterr().err


def test_results_of_other_settings_are_not_gone_on_with(small, whole_file, capsys):
    assert quality.main([*small, "--seed", "1", "--output", str(whole_file)]) == 2
    assert "other settings" in capsys.readouterr().err
    assert quality.main([*small, "--output", str(whole_file)]) == 2
    assert "is complete" in capsys.readouterr().err


def test_scenes_that_are_painted_otherwise_are_other_settings(monkeypatch):
    before = subjects.held_out_fingerprint(PURPOSES[SHOW], 32)
    assert subjects.held_out_fingerprint(PURPOSES[SHOW], 32) == before
    assert subjects.held_out_fingerprint(PURPOSES[CHOOSE], 32) != before
    monkeypatch.setattr(scene_wall, "paint", lambda canvas, setting: None)
    assert subjects.held_out_fingerprint(PURPOSES[SHOW], 32) != before


def test_ones_own_checkpoint_is_measured_on_its_prompts(tmp_path, capsys):
    folder = tiny_pipeline.write_folder(tmp_path)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b c\n\nsea\n")
    assert quality.main(["--smallest", "--model", str(folder)]) == 2
    assert "needs --prompts FILE" in capsys.readouterr().err
    arguments = ["--smallest", "--model", str(folder), "--prompts", str(prompts), "--pictures", "2"]
    record = run([*arguments, "--save", str(tmp_path / "kept")], tmp_path / "result.json")
    (section,) = sections(record)
    assert not section.noised and section.pictures["tomesd-0.75"].work == 1 / 16
    assert section.pictures["zero-attention"].psnr.value < section.pictures["sized-kv-0.75"].psnr.value
    assert record["settings"]["prompts"] == ["a b c", "sea"]
    assert "LPIPS is left out" in capsys.readouterr().out
    kept = tmp_path / "kept" / "pipeline" / "sized-kv-0.75"
    assert sorted(path.name for path in kept.iterdir()) == ["00000.png", "00001.png"]


def test_lpips_is_in_the_table_where_it_can_be_had(small, tmp_path, monkeypatch, capsys):
    folder, prompts = tiny_pipeline.write_folder(tmp_path), tmp_path / "prompts.txt"
    prompts.write_text("sea\n")
    stand_in = lambda a, b: float(np.abs(a.astype(float) - b).mean() / 255)  # noqa: E731
    monkeypatch.setattr(picture_metrics, "lpips", lambda: (stand_in, "LPIPS: a stand-in"))
    record = run(["--smallest", "--model", str(folder), "--prompts", str(prompts)], tmp_path / "result.json")
    out = capsys.readouterr().out
    assert "| LPIPS |" in out and "LPIPS: a stand-in" in out
    (section,) = sections(record)
    assert section.pictures["zero-attention"].lpips.value > section.pictures["sized-kv-0.75"].lpips.value > 0


def pictures(count: int, seed: int, blur: int = 0) -> np.ndarray:
    made = np.random.default_rng(seed).integers(0, 256, (count, 64, 64, 3)).astype(np.float64)
    for _ in range(blur):
        made = (made + np.roll(made, 1, 1) + np.roll(made, 1, 2)) / 3
    return np.array([picture_metrics.features(picture) for picture in made.astype(np.uint8)])


def test_the_frechet_distance_sees_blur_and_wants_enough_pictures():
    one, other, blurred = pictures(1024, 0), pictures(1024, 1), pictures(1024, 1, blur=1)
    assert one.shape == (1024, 60)
    assert picture_metrics.frechet(one, one) < 1e-6
    assert picture_metrics.frechet(one, blurred) > 10 * picture_metrics.frechet(one, other)
    with pytest.raises(ValueError, match="1023 pictures separates nothing; it needs 1024"):
        picture_metrics.frechet(one, other[1:])


def test_the_frechet_distance_is_that_of_gaussians():
    generator = np.random.default_rng(0)
    a, b = generator.normal(0, 1, (200_000, 2)), generator.normal([3, 0], [2, 1], (200_000, 2))
    assert picture_metrics.frechet(a, b) == pytest.approx(3**2 + (2 - 1) ** 2, rel=0.02)


def test_frechet_distances_take_the_place_of_the_features(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(picture_metrics, "ENOUGH_FOR_FRECHET", 5)
    record = run([*small, "--frechet"], tmp_path / "result.json")
    assert not any("features" in row for row in record["rows"])
    found = {one["variant"]: one["plain_features"] for one in record["frechet"]}
    assert found[PLAIN] < 1e-6 < found["zero-attention"]
    out = capsys.readouterr().out
    assert "### Frechet distances" in out and "FID is left out: it needs --save DIR" in out


@pytest.mark.parametrize("metric", ["lpips", "inception_distance"])
def test_learned_metrics_need_their_weights_and_fetch_nothing(metric, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(picture_metrics.importlib.util, "find_spec", lambda name: object())
    measure, told = getattr(picture_metrics, metric)()
    assert measure is None and "are not in" in told and "nothing is downloaded" in told
    monkeypatch.setattr(picture_metrics.importlib.util, "find_spec", lambda name: None)
    measure, told = getattr(picture_metrics, metric)()
    assert measure is None and "not installed" in told


def test_the_names_are_listed(capsys):
    assert quality.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == list(VARIANTS)


def test_a_result_says_what_was_measured_where(whole):
    assert whole["versions"]["tomesd"] == "0.1.3" and whole["settings"]["models"].keys() == {"tiny"}
    assert whole["commit"] and whole["device"]["kind"] == "cpu"
    assert {one["name"] for one in whole["settings"]["variants"]} == {row["variant"] for row in whole["rows"]}
