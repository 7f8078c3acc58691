"""The quality benchmark on a scene transformer: its rows, and what a curve is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import quality, report, results, strength
from benchmarks.quality_figures import sections
from benchmarks.quality_rows import TIMES
from benchmarks.variant_list import FRONT, VARIANTS
from demo import model, transformer
from tests import tiny_scenes


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A scene transformer with random weights, 256 tokens."""
    path = tmp_path_factory.mktemp("flux") / "flux.safetensors"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transformer, "SIDE", transformer.TOKEN * 16)
        model.save(tiny_scenes.make(tiny_scenes.FLUX), path)
        yield path


def run(weights: Path, output: Path, *more: str) -> results.Record:
    few = ("--noised", "2", "--pictures", "1")
    assert quality.main(["--model", str(weights), "--output", str(output), *few, *more]) == 0
    return results.load(output)


def test_the_command_judges_a_transformer(weights, tmp_path, capsys):
    chosen = ("preset-balanced", "downsample-2x2", "ToMA-0.5", "first-block-cache-0.2")
    record = run(weights, tmp_path / "result.json", "--steps", "2", "--no-clock", "--variants", *chosen)
    (section,) = sections(record)
    assert record["missing"] == []
    assert set(chosen) <= section.pictures.keys() and set(chosen) - {"first-block-cache-0.2"} <= section.noised.keys()
    assert section.pictures["first-block-cache-0.2"].work <= 1
    dev = {name: one.dev.value for name, one in section.noised.items()}
    assert dev["preset-balanced"] < dev["random-partner-kv-0.9375"] and dev["bfloat16"] > 0
    table = capsys.readouterr().out
    assert "ToMA" in table and "tomesd |" not in table
    assert report.main([str(tmp_path / "result.json")]) == 0
    assert quality.main(["--model", str(weights), "--variants", "tomesd-0.5"]) == 2
    assert "tomesd-0.5 needs a unet, and" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_a_transformer_to_choose_by_has_what_a_curve_needs(weights, tmp_path, capsys):
    path = tmp_path / "front.json"
    front = [name for name, variant in VARIANTS.items() if variant.method == "merged keys"]
    record = run(weights, path, "--for", "choose", "--steps", "1", "--variants", *front)
    assert not any(one["method"] == "keys below" for one in record["settings"]["variants"])
    capsys.readouterr()
    assert strength.main([str(path)]) == 2 and "keys below" in capsys.readouterr().err
    assert strength.main([str(path), "--compare"]) == 0
    assert capsys.readouterr().out.count("\n") == strength.KNOTS + 1 + 2
    loss = strength.front([record])
    assert len(FRONT) >= len(loss.by_share) > 1 and len(TIMES) == len(next(iter(loss.by_share.values())))
