"""The quality benchmark's command: what it measures, how it goes on, what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import quality, quality_report, report, results, strength
from benchmarks.quality_figures import sections
from benchmarks.subjects import SHOW
from benchmarks.variants import ALWAYS, FRONT, PLAIN, VARIANTS
from tests import tiny_pipeline

ROOT = Path(__file__).parents[2]
CONTROLS = [name for name, variant in VARIANTS.items() if variant.role == "control"]


@pytest.fixture(scope="module")
def small(tiny_file) -> list[str]:
    """Arguments of a run of a few seconds: two parts of noised pictures and two of whole ones."""
    return ["--smallest", "--model", str(tiny_file), "--noised", "10", "--pictures", "5", "--steps", "1",
            "--variants", "tomesd-0.75", "sized-0.5"]  # fmt: skip


def run(arguments: list[str], output: Path) -> results.Record:
    assert quality.main([*arguments, "--output", str(output)]) == 0
    return results.load(output)


@pytest.fixture(scope="module")
def whole_file(small, tmp_path_factory) -> Path:
    """The result of those arguments in one go; copy it before changing it."""
    path = tmp_path_factory.mktemp("whole") / "result.json"
    run(small, path)
    return path


@pytest.fixture
def whole(whole_file) -> results.Record:
    return results.load(whole_file)


@pytest.mark.slow
def test_on_a_trained_model_controls_are_worse_than_any_method_and_more_merging_errs_more(tmp_path, capsys):
    ours = [f"preset-{name}" for name in ("quality", "balanced", "fast", "max")]
    chosen = ("tomesd-0.5", "tomesd-0.75", "sized-0.5", *ours)
    record = run(["--smallest", "--variants", *chosen], tmp_path / "result.json")
    assert record["missing"] == [] and record["kind"] == "quality"
    (section,) = sections(record)
    for figures in (section.noised, section.pictures):
        assert {*CONTROLS, *chosen, "bfloat16"} <= figures.keys()
        assert figures["tomesd-0.5"].work == figures["sized-0.5"].work == 1 / 4
    dev = {name: figures.dev.value for name, figures in section.noised.items()}
    assert max(dev[name] for name in chosen) < min(dev[name] for name in CONTROLS)
    assert dev["zero-attention"] > dev["random-partner-0.75"]
    by_strength = [dev[name] for name in ("bfloat16", *ours, "tomesd-0.5", "tomesd-0.75")]
    assert by_strength == sorted(by_strength) and dev["sized-0.5"] < dev["tomesd-0.5"]
    tables = capsys.readouterr().out.split("| method ")[1:]
    assert len(tables) == 3
    for table in tables:
        assert all(f"*{VARIANTS[name].method}*" in table for name in ALWAYS if name != PLAIN)
        assert "**tomesd**" in table


def test_a_run_that_ended_within_a_part_goes_on_to_the_same_result(small, whole, tmp_path, monkeypatch, capsys):
    cut = tmp_path / "cut.json"
    results.save({**whole, "rows": whole["rows"][:5], "created": "before"}, cut)
    resumed = run(small, cut)
    assert resumed["rows"] == whole["rows"] and resumed["created"] == "before"
    capsys.readouterr()
    assert quality.main([*small, "--steps", "2", "--output", str(cut)]) == 2
    assert "other settings" in capsys.readouterr().err
    monkeypatch.setattr(quality.QualityBench, "measure", None)
    assert run(small, cut) == resumed, "a complete result is shown again"


def test_several_processes_find_what_one_finds_and_go_on_after_a_kill(small, whole, tmp_path, monkeypatch, capsys):
    output, rank = tmp_path / "shared.json", tmp_path / "shared.json.rank1"
    line = [*small, "--output", str(output)]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert quality.main(line) == 0 and not output.exists()
    left = results.load(rank)
    results.save({**left, "rows": left["rows"][:2]}, rank)
    assert quality.main(line) == 0 and results.load(rank)["rows"] == left["rows"]
    assert quality.main(line) == 0, "a process that has all of its rows waits for nothing"
    monkeypatch.setenv("RANK", "0")
    results.save({**left, "settings": {}}, rank)
    assert quality.main(line) == 2 and "rank1 is a run with other settings" in capsys.readouterr().err
    results.save(left, rank)
    assert quality.main(line) == 0
    assert results.load(output)["rows"] == whole["rows"]
    assert sorted(path.name for path in tmp_path.glob("shared*")) == ["shared.json", "shared.md", "shared.png"]
    assert quality.main(line) == 2 and "is complete" in capsys.readouterr().err
    assert quality.main(small) == 2 and "several processes need --output" in capsys.readouterr().err


def test_a_table_and_a_plot_come_from_the_file_alone(whole_file, whole, tmp_path, capsys):
    alone = tmp_path / "alone.json"
    alone.write_bytes(whole_file.read_bytes())
    assert report.main([str(alone)]) == 0
    table = whole_file.with_suffix(".md").read_text(encoding="utf-8")
    assert (tmp_path / "alone.md").read_text(encoding="utf-8") == table == capsys.readouterr().out
    assert (tmp_path / "alone.png").read_bytes().startswith(b"\x89PNG")
    kept = [row for row in whole["rows"] if row["part"] == 0 and row["variant"] != "tomesd-0.75"]
    text = quality_report.table([{**whole, "rows": kept, "missing": ["something"]}])
    assert "Unfinished: 1 rows are missing" in text and "sized" in text and "**tomesd** |" not in text


def test_a_result_says_what_was_measured_and_its_figures_are_of_as_many_pictures_as_a_part_has(whole, capsys):
    assert whole["versions"]["tomesd"] == "0.1.3" and whole["settings"]["models"].keys() == {"tiny"}
    assert whole["commit"] and whole["device"]["kind"] == "cpu"
    assert {variant["name"] for variant in whole["settings"]["variants"]} == {row["variant"] for row in whole["rows"]}
    counts = {(row["measure"], row["part"]): np.shape(row["loss" if row["measure"] == "noised" else "ssim"])
              for row in whole["rows"]}  # fmt: skip
    assert counts == {("noised", 0): (2, 8), ("noised", 1): (2, 2), ("pictures", 0): (4,), ("pictures", 1): (1,)}
    assert quality.main(["--list"]) == 0 and capsys.readouterr().out.split() == list(VARIANTS)


WRONG = {
    "no variant is called tomesd-0.6; --list": ["--variants", "tomesd-0.6", "tomesd-0.5"],
    "nowhere.safetensors does not exist": ["--model", "nowhere.safetensors"],
    "README.md ends in '.md'": ["--model", "README.md", "--prompts", "README.md"],
    "--noised 7: give an even number": ["--smallest", "--noised", "7"],
    "give 1 step or more": ["--smallest", "--steps", "0"],
    "--device cuda:77 does not work here": ["--smallest", "--device", "cuda:77"],
    "tomesd-0.5 needs a unet": ["--variants", "tomesd-0.5", "--model", "{flux}"],
    "needs --prompts FILE": ["--smallest", "--model", "{own}"],
    "--guidance is for the scene models; ": ["--model", "{own}", "--guidance", "3"],
}


def test_what_cannot_be_measured_is_refused_in_a_sentence(tmp_path, tiny_folder, flux_file, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for sentence, arguments in WRONG.items():
        line = [argument.format(own=tiny_folder, flux=flux_file) for argument in arguments]
        assert quality.main([*line, "--output", str(tmp_path / "result.json")]) == 2
        errors = capsys.readouterr().err
        assert sentence in errors and errors.count("\n") == 1 and not list(tmp_path.iterdir()), sentence


def test_ones_own_checkpoint_is_measured_on_its_prompts(tmp_path):
    folder = tiny_pipeline.write_folder(tmp_path)
    (tmp_path / "prompts.txt").write_text("a b c\n\nsea\n")
    record = run(["--smallest", "--model", str(folder), "--prompts", str(tmp_path / "prompts.txt"), "--pictures", "2"],
                 tmp_path / "result.json")  # fmt: skip
    (section,) = sections(record)
    assert not section.noised and section.pictures["tomesd-0.75"].work == 1 / 16
    assert section.pictures["zero-attention"].psnr.value < section.pictures["preset-balanced"].psnr.value
    assert record["settings"]["prompts"] == ["a b c", "sea"]


def test_a_run_with_the_clock_shows_time_and_detail_and_how_the_pictures_were_made(tiny_file, tmp_path, capsys):
    record = run(["--smallest", "--clock", "--model", str(tiny_file), "--pictures", "2", "--guidance", "7.5"],
                 tmp_path / "result.json")  # fmt: skip
    assert {"for": SHOW, "guidance": 7.5, "clock": True}.items() <= record["settings"].items()
    assert record["device"]["threads"] == 1
    (section,) = sections(record)
    assert section.pictures["twice-the-solver-steps"].time > 1.3
    assert all(figures.detail.value > 0 and figures.time > 0 for figures in section.pictures.values())
    plain = [row for row in record["rows"] if row["variant"] == PLAIN and row["measure"] == "pictures"]
    assert [len(calls) for row in plain for calls in row["seconds"]] == [2, 2]
    out = capsys.readouterr().out
    assert "| dev % | PSNR dB | SSIM | detail | time |" in out
    assert "2 solver steps, guidance 7.5" in out


def test_the_command_judges_a_transformer(flux_file, tmp_path, capsys):
    chosen = ("preset-balanced", "downsample-2x2")
    record = run(["--model", str(flux_file), "--noised", "2", "--pictures", "1", "--steps", "2", "--no-clock",
                  "--variants", *chosen], tmp_path / "result.json")  # fmt: skip
    (section,) = sections(record)
    assert record["missing"] == [] and {*chosen, *CONTROLS} <= section.noised.keys() & section.pictures.keys()
    dev = {name: figures.dev.value for name, figures in section.noised.items()}
    assert dev["preset-balanced"] < dev["random-partner-0.75"] and dev["bfloat16"] > 0
    assert "downsample" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_of_a_transformer_to_choose_by_has_what_a_curve_needs(flux_file, tmp_path, capsys):
    path = tmp_path / "front.json"
    record = run(["--for", "choose", "--model", str(flux_file), "--noised", "2"], path)
    assert {row["measure"] for row in record["rows"]} == {"noised"}
    capsys.readouterr()
    assert strength.main([str(path)]) == 0
    assert capsys.readouterr().out.count("\n") == strength.KNOTS + 1 + 1
    assert len(FRONT) >= len(strength.front([record]).by_share) > 1
