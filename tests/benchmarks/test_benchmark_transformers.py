"""The quality benchmark on a scene transformer: its rows, the work that is counted, and its rivals in plain code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import attention_work, quality, report, results, strength, variants
from benchmarks.networks import TRANSFORMER, UNET, kind_of, timestep_of
from benchmarks.quality_figures import sections
from benchmarks.quality_rows import TIMES
from benchmarks.reference import Toma, representatives
from benchmarks.variant_list import FRONT, VARIANTS
from demo import model, transformer
from tests import tiny_scenes

SIDE, WORDS = 16, 6  # in tokens
LATENT = transformer.TOKEN * SIDE


@pytest.fixture(scope="module")
def small():
    """Random weights, 256 tokens."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transformer, "SIDE", LATENT)
        yield tiny_scenes.make(tiny_scenes.FLUX)


@pytest.fixture(scope="module")
def weights(small, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("flux") / "flux.safetensors"
    model.save(small, path)
    return path


@torch.inference_mode()
def predict(small, *times: int) -> torch.Tensor:
    """Of two pictures, at each of the times in turn."""
    noise = torch.randn(2, 12, LATENT, LATENT, generator=torch.Generator().manual_seed(5))
    words = torch.tensor([[0, 5, 9, 12, 15, 20]] * 2)
    return torch.stack([small(noise, torch.full((2,), time), words) for time in times or (800, 300)])


def share(kept: float) -> float:
    """Of a sequence whose picture keeps this share of its tokens."""
    return (WORDS + kept * SIDE**2) / (WORDS + SIDE**2)


def test_a_block_that_is_skipped_leaves_nothing(small):
    """Of three blocks the first runs at each step, the others at the first step alone."""
    with attention_work.counting(small.network) as work, variants.first_block_cache(1e9)(small.network, 0):
        predict(small, 800, 750, 700, 650)
    assert work.share() == pytest.approx((3 + 1 + 1 + 1) / 12)


def test_representatives_are_the_greedy_choice():
    alike = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(0))
    alike = (alike + alike.transpose(1, 2)) / 2
    alike.diagonal(dim1=1, dim2=2).fill_(1)
    found = representatives(alike, 4)
    for likeness, chosen in zip(alike, found.tolist(), strict=True):
        slow: list[int] = []
        for _ in range(4):
            slow.append(max((one for one in range(9) if one not in slow),
                            key=lambda one: likeness[[*slow, one]].max(0).values.sum()))  # fmt: skip
        assert chosen == slow


def test_tokens_of_one_kind_survive_toma():
    tokens = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))[:, torch.arange(SIDE**2) % 2]
    merge = Toma(tokens, 0.5)
    assert merge.chosen.shape == (2, SIDE**2 // 2) and all(len(set(row)) == len(row) for row in merge.chosen.tolist())
    constant = torch.full_like(tokens, 0.25)
    torch.testing.assert_close(merge.unmerge(merge.merge(constant)), constant)
    torch.testing.assert_close(merge.unmerge(merge.merge(tokens)), tokens, atol=0.05, rtol=0)


def test_a_transformer_is_told_its_timestep_in_thousandths(small):
    seen = []
    hook = small.network.register_forward_pre_hook(
        lambda network, args, kwargs: seen.append(timestep_of(network, args, kwargs)), with_kwargs=True
    )
    predict(small, 800, 300)
    hook.remove()
    assert seen == pytest.approx([800, 300]) and kind_of(small.network) == TRANSFORMER
    assert kind_of(tiny_scenes.make().network) == UNET


def test_strength_switches_at_its_timestep(small):
    """Early steps keep a sixty-fourth of the keys, late ones more."""
    works = []
    for time in (900, 100):
        with attention_work.counting(small.network) as work, VARIANTS["preset-balanced"].put_on(small.network, 0):
            predict(small, time)
        works.append(work.share())
    assert works[0] == pytest.approx(share(1 / 64)) and works[1] > 2 * works[0]


def run(weights: Path, output: Path, *more: str) -> results.Record:
    assert quality.main(["--model", str(weights), "--output", str(output), *more]) == 0
    return results.load(output)


def test_the_command_judges_a_transformer(weights, tmp_path, capsys):
    chosen = ("preset-balanced", "downsample-2x2", "ToMA-0.5", "first-block-cache-0.2")
    record = run(weights, tmp_path / "result.json", "--noised", "2", "--pictures", "1", "--steps", "2", "--no-clock",
                 "--variants", *chosen)  # fmt: skip
    (section,) = sections(record)
    assert record["missing"] == []
    assert set(chosen) <= section.pictures.keys() and set(chosen) - {"first-block-cache-0.2"} <= section.noised.keys()
    assert section.pictures["first-block-cache-0.2"].work <= 1
    dev = {name: one.dev.value for name, one in section.noised.items()}
    assert dev["preset-balanced"] < dev["random-partner-kv-0.9375"] and dev["bfloat16"] > 0
    table = capsys.readouterr().out
    assert "ToMA" in table and "tomesd |" not in table
    assert report.main([str(tmp_path / "result.json")]) == 0


def test_what_needs_a_unet_is_refused_in_a_sentence(weights, tmp_path, capsys):
    arguments = ["--model", str(weights), "--output", str(tmp_path / "result.json")]
    assert quality.main([*arguments, "--variants", "tomesd-0.5"]) == 2
    assert "tomesd-0.5 needs a unet, and" in capsys.readouterr().err
    assert quality.main(["--variants", "ToMA-0.5"]) == 2
    assert "ToMA-0.5 needs a transformer" in capsys.readouterr().err


def test_a_run_of_a_transformer_to_choose_by_has_what_a_curve_needs(weights, tmp_path, capsys):
    path = tmp_path / "front.json"
    front = [name for name, variant in VARIANTS.items() if variant.method == "merged keys"]
    record = run(weights, path, "--for", "choose", "--noised", "2", "--pictures", "1", "--steps", "1",
                 "--variants", *front)  # fmt: skip
    assert not any(one["method"] == "keys below" for one in record["settings"]["variants"])
    capsys.readouterr()
    assert strength.main([str(path)]) == 2 and "keys below" in capsys.readouterr().err
    assert strength.main([str(path), "--compare"]) == 0
    assert capsys.readouterr().out.count("\n") == strength.KNOTS + 1 + 2
    loss = strength.front([record])
    assert len(FRONT) >= len(loss.by_share) > 1 and len(TIMES) == len(next(iter(loss.by_share.values())))
