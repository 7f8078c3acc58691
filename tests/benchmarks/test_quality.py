"""The quality benchmark's command: what it measures, how it resumes, what it refuses."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import quality, quality_report, report, results
from benchmarks.quality_report import sections
from benchmarks.variants import ALWAYS, PLAIN, VARIANTS
from tests.small_models import sd_pipelines

ROOT = Path(__file__).parents[2]
CONTROL = "zero-attention"


@pytest.fixture(scope="module")
def small(tiny_file) -> list[str]:
    """Arguments of a run of a few seconds: two parts of noised pictures and two of whole ones."""
    return ["--smallest", "--model", str(tiny_file), "--noised", "10", "--pictures", "5", "--steps", "1",
            "--guidance", "7.5", "--variants", "tomesd-0.75", "sized-0.5"]  # fmt: skip


def run(arguments: list[str], output: Path) -> results.Record:
    with pytest.MonkeyPatch.context() as patched:  # plots have a test of their own
        patched.delattr(quality_report, "plot")
        assert quality.main([*arguments, "--output", str(output)]) == 0
    return results.load(output)


@pytest.fixture(scope="module")
def whole_file(small, tmp_path_factory) -> Path:
    """The result of a run with the arguments of `small`; copy it before changing it."""
    path = tmp_path_factory.mktemp("whole") / "result.json"
    run(small, path)
    return path


@pytest.fixture
def whole(whole_file) -> results.Record:
    return results.load(whole_file)


@pytest.mark.slow
def test_on_a_trained_model_the_control_is_worse_than_any_method_and_more_merging_errs_more(tmp_path):
    ours = [f"preset-{name}" for name in ("quality", "balanced", "fast", "max")]
    chosen = ("tomesd-0.5", "tomesd-0.75", "sized-0.5", *ours)
    record = run(["--smallest", "--variants", *chosen], tmp_path / "result.json")
    (section,) = sections(record)
    assert record["missing"] == [] and {CONTROL, *chosen, "bfloat16"} <= section.pictures.keys()
    dev = {name: figures.dev.value for name, figures in section.noised.items()}
    assert max(dev[name] for name in chosen) < dev[CONTROL]
    by_strength = [dev[name] for name in ("bfloat16", *ours, "tomesd-0.5", "tomesd-0.75")]
    assert by_strength == sorted(by_strength) and dev["sized-0.5"] < dev["tomesd-0.5"]


def test_a_run_that_ended_within_a_part_goes_on_to_the_same_result(small, whole, tmp_path, monkeypatch, capsys):
    cut = tmp_path / "cut.json"
    results.save({**whole, "rows": whole["rows"][:5], "created": "before"}, cut)
    resumed = run(small, cut)
    once, twice = ([row for row in record["rows"] if row["measure"] == "noised"] for record in (whole, resumed))
    assert once == twice and resumed["missing"] == [] and resumed["created"] == "before"
    capsys.readouterr()
    assert quality.main([*small, "--steps", "2", "--output", str(cut)]) == 2
    assert "other settings" in capsys.readouterr().err
    monkeypatch.setattr(quality.QualityBench, "measure", None)
    assert run(small, cut) == resumed, "a complete result is shown again"


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


def test_a_result_says_what_was_measured_and_has_the_figures_of_all_pictures_and_calls(whole):
    assert whole["versions"]["tomesd"] == "0.1.3" and whole["settings"]["models"].keys() == {"tiny"}
    assert {"for": "show", "guidance": 7.5}.items() <= whole["settings"].items() and whole["device"]["threads"] == 1
    assert {variant["name"] for variant in whole["settings"]["variants"]} == {row["variant"] for row in whole["rows"]}
    counts = {(row["measure"], row["part"]): np.shape(row["loss" if row["measure"] == "noised" else "squared_error"])
              for row in whole["rows"]}  # fmt: skip
    assert counts == {("noised", 0): (2, 8), ("noised", 1): (2, 2), ("pictures", 0): (4,), ("pictures", 1): (1,)}
    assert all(len(calls) == 1 for row in whole["rows"] if row["variant"] == PLAIN for calls in row.get("seconds", ()))
    (section,) = sections(whole)
    assert section.pictures["twice-the-solver-steps"].time > 1.3
    assert all(figures.detail.value > 0 and figures.time > 0 for figures in section.pictures.values())
    text = quality_report.table([whole])
    assert "5 whole pictures, 1 solver steps, guidance 7.5" in text and "| dev % | PSNR dB | detail | time |" in text
    assert all(f"*{VARIANTS[name].method}*" in text for name in ALWAYS if name != PLAIN)


WRONG = {"no variant is called tomesd-0.6; --list": ["--variants", "tomesd-0.6", "tomesd-0.5"],
         "nowhere.safetensors does not exist": ["--model", "nowhere.safetensors"],
         "--device cuda:77 does not work here": ["--smallest", "--device", "cuda:77"],
         "tomesd-0.5 needs a unet": ["--variants", "tomesd-0.5", "--model", "{flux}"],
         "needs --prompts FILE": ["--smallest", "--model", "{own}"]}  # fmt: skip


def test_what_cannot_be_measured_is_refused_in_a_sentence(tmp_path, tiny_folder, flux_file, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for sentence, arguments in WRONG.items():
        line = [argument.format(own=tiny_folder, flux=flux_file) for argument in arguments]
        assert quality.main([*line, "--output", str(tmp_path / "result.json")]) == 2
        errors = capsys.readouterr().err
        assert sentence in errors and errors.count("\n") == 1 and not list(tmp_path.iterdir()), sentence


@pytest.mark.slow
def test_ones_own_checkpoint_is_measured_on_its_prompts(tmp_path):
    folder = sd_pipelines.write_folder(tmp_path)
    (tmp_path / "prompts.txt").write_text("a b c\n\nsea\n")
    record = run(["--smallest", "--model", str(folder), "--prompts", str(tmp_path / "prompts.txt"), "--pictures", "2"],
                 tmp_path / "result.json")  # fmt: skip
    (section,) = sections(record)
    assert not section.noised and section.pictures["tomesd-0.75"].work == 1 / 16
    assert section.pictures[CONTROL].psnr.value < section.pictures["preset-balanced"].psnr.value
    assert record["settings"]["prompts"] == ["a b c", "sea"]


def test_the_command_judges_a_transformer(flux_file, tmp_path):
    chosen = ("preset-balanced", "downsample-2x2")
    record = run(["--model", str(flux_file), "--noised", "2", "--pictures", "1", "--steps", "2",
                  "--variants", *chosen], tmp_path / "result.json")  # fmt: skip
    (section,) = sections(record)
    assert record["missing"] == [] and {*chosen, CONTROL} <= section.noised.keys() & section.pictures.keys()
    dev = {name: figures.dev.value for name, figures in section.noised.items()}
    assert dev["preset-balanced"] < dev[CONTROL] and dev["bfloat16"] > 0
