"""The table of less work is what the engine expects of the real UNets, and what is timed is what is counted."""

import re
from types import SimpleNamespace

import diffusers
import pytest
import torch

import tome_core
from benchmarks import models, results, work
from tome_core.hosting import expected_share
from tome_core.measuring.pays import is_host_bound
from tome_core.models.unet_blocks import find_blocks
from tome_core.patching import curve_of

pytestmark = pytest.mark.pays
# the configurations that Stable Diffusion 1.5 and XL are published with, as far as they differ from diffusers' own
PUBLISHED = {
    "sd15": {"cross_attention_dim": 768},
    "sdxl": {"block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048, "attention_head_dim": (5, 10, 20),
             "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
             "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
             "transformer_layers_per_block": (1, 2, 10), "use_linear_projection": True, "addition_embed_type":
             "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816},
}  # fmt: skip
GAIN = re.compile(r"(\d+)% \((\d\.\d\d)\)")


def published(name):
    with torch.device("meta"):
        return diffusers.UNet2DConditionModel(sample_size=64, **PUBLISHED[name])


def rows():
    """Cells of the table by UNet and strength, one a size."""
    lines = [line.strip("| ").split(" | ") for line in work.shares_table().splitlines()[2:]]
    return {(label, strength.strip("`")): cells for label, strength, *cells in lines}


@pytest.mark.parametrize("name", work.LABELS)
def test_a_cell_is_what_the_engine_expects_of_the_published_unet(name):
    unet = published(name)
    for strength in work.STRENGTHS:
        config = tome_core.preset(strength, curve_of(unet))
        for pixels, cell in zip(work.PIXELS, rows()[work.LABELS[name], strength], strict=True):
            expected = expected_share(unet, config, pixels, pixels)
            assert work.share(name, strength, pixels) == pytest.approx(expected, abs=0.002)
            if expected:
                share, gain = map(float, GAIN.fullmatch(cell).groups())
                assert share == pytest.approx(100 * expected, abs=0.8)
                assert gain == pytest.approx(1 / (1 - expected), rel=0.01)
            assert expected or cell == work.NOTHING


@pytest.mark.parametrize("name", work.LABELS)
def test_less_work_is_left_the_stronger_and_the_larger(name):
    shares = [[work.share(name, strength, pixels) for pixels in work.PIXELS] for strength in tome_core.PRESETS]
    for by_size in shares:
        assert by_size == sorted(by_size)
    for by_strength in zip(*shares, strict=True):
        assert list(by_strength) == sorted(by_strength)
    assert shares[0][-1] < shares[-1][-1] < 1


@pytest.mark.parametrize("size", [(1024, 1024), (1152, 896), (1216, 832), (832, 1216), (1344, 768), (1536, 640),
                                  (704, 1344)], ids=str)  # fmt: skip
def test_every_size_of_a_megapixel_that_sdxl_was_trained_for_saves_about_as_much(size):
    unet = work.unet_of("sdxl")
    share = expected_share(unet, work.config_of("sdxl", "balanced"), *size)
    assert share == pytest.approx(work.share("sdxl", "balanced", 1024), abs=0.03)


def test_whole_blocks_and_a_cpu_s_smaller_levels_leave_out_more():
    assert work.share("sdxl", "balanced", 1024, blocks=False) < work.share("sdxl", "balanced", 1024)
    assert work.share("sdxl", "balanced", 768) == 0 < work.share("sdxl", "balanced", 768, "cpu")


def test_layouts_have_as_many_weights_as_the_published_unets_and_sdxl_s_is_the_one_of_the_table_by_size():
    sizes = [sum(weight.numel() for weight in work.layout_of(label).parameters()) / 1e9 for label in work.LAYOUTS]
    assert [round(size, 2) for size in sizes] == [2.57, 1.33, 1.16, 0.78, 0.75, 2.26, 0.87]
    first, *_ = work.layouts_table().splitlines()[2:]
    assert first.endswith(f" {work.share('sdxl', 'balanced', 1024):.0%} |")


@pytest.mark.parametrize("card, merges", [((8, 6, 28), True), ((8, 9, 24), True), ((8, 6, 68), False),
                                          ((8, 9, 46), False), ((8, 9, 128), False)])  # fmt: skip
def test_at_512_px_the_cards_merge_that_the_readme_names_and_all_do_at_1024_px(card, merges, monkeypatch):
    """Capability and multiprocessors of an RTX 3060, 4060, 3080, 4070 and 4090."""
    card = SimpleNamespace(**dict(zip(("major", "minor", "multi_processor_count"), card, strict=True)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    blocks = [(2**place.halvings, place.block.attn1.to_q.in_features) for place in find_blocks(published("sd15"))]
    for pixels, expected in ((512, merges), (1024, True)):
        assert is_host_bound(blocks, 2, (pixels // 8) ** 2, torch.float16, torch.device("cuda")) != expected


def test_a_timed_picture_has_a_time_for_each_step_and_the_work_that_was_counted_for_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    path = tmp_path / "work.json"
    assert work.main(["--time", "sd15", "--pixels", "2048", "--steps", "2", "--tiny", "--output", str(path)]) == 0
    (row,) = results.load(path)["rows"]
    unet = models.make("sd15", "cpu", torch.float32, tiny=True)
    side = 2048 // models.TINY["sd15"].shrink
    expected = expected_share(unet, tome_core.preset("balanced"), side, side, steps=2)
    assert len(row["unmerged"]) == len(row["merged"]) == 2 and min(row["unmerged"] + row["merged"]) > 0
    assert row["work_saved"] == pytest.approx(expected, abs=0.01) and row["work_saved"] > 0.01
    assert f"| sd15, 2048 px, balanced | {expected:.0%} | {work.gain(expected)} |" in capsys.readouterr().out
