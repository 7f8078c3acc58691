"""Each variant does what its name says, and partners by lot merge as the engine's do."""

from __future__ import annotations

import functools

import pytest
import torch

import tome_core
from benchmarks import reference, variants
from benchmarks.networks import TRANSFORMER, UNET, Work, at_each_call, kind_of
from benchmarks.reference import Reference
from benchmarks.variants import VARIANTS
from demo import model, transformer
from tests import tiny_scenes
from tome_core.merging.methods import METHODS

SIDE = tiny_scenes.SIDE
KIND = {"sd": UNET, "flux": TRANSFORMER}
of_layouts = pytest.mark.parametrize("layout", KIND)


def rand(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, SIDE * SIDE, 24, generator=rand(seed))


@functools.cache
def small_model(layout: str) -> model.SceneModel:
    """Random weights, and self-attention strong enough that merging matters; 16 tokens a side."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transformer, "SIDE", transformer.TOKEN * SIDE)
        scenes = tiny_scenes.make({"sd": tiny_scenes.UNET, "flux": tiny_scenes.FLUX}[layout])
    for name, weights in scenes.named_parameters():
        if "attn1.to_out" in name:
            torch.nn.init.normal_(weights, std=0.5, generator=rand(2))
    return scenes


@torch.inference_mode()
def predict(time: int = 300, layout: str = "sd") -> torch.Tensor:
    side = SIDE if layout == "sd" else transformer.TOKEN * SIDE
    noise = torch.randn(2, 12, side, side, generator=rand(5))
    return small_model(layout)(noise, torch.full((2,), time), torch.tensor([[0, 5, 9, 12, 15, 20]] * 2))


def early_and_late(layout: str) -> torch.Tensor:
    """Weak strengths leave late steps alone."""
    return torch.stack([predict(800, layout), predict(300, layout)])


def traces(network: torch.nn.Module) -> list:
    """List what a patch could leave on the modules."""
    return [(type(module), len(module._forward_hooks) + len(module._forward_pre_hooks), set(vars(module)))
            for module in network.modules()]  # fmt: skip


@of_layouts
def test_a_variant_is_the_same_each_time_and_leaves_nothing_behind(layout):
    """One variant of each line, the last one."""
    lines = {variant.method: variant for variant in VARIANTS.values() if KIND[layout] in variant.kinds}
    network = small_model(layout).network
    plain, state, keys, before = early_and_late(layout), torch.get_rng_state(), [*network.state_dict()], traces(network)
    for line, variant in lines.items():
        answers = []
        for _ in range(2):
            with variant.put_on(network, 3):
                answers.append(early_and_late(layout))
        assert torch.equal(*answers), line
        assert torch.equal(early_and_late(layout), plain) and torch.equal(torch.get_rng_state(), state), line
        assert [*network.state_dict()] == keys and traces(network) == before, line
        assert torch.equal(answers[0], plain) == (line in ("unmerged", "twice the solver steps")), line


def test_tiles_are_squares_of_the_grid_which_come_together_again_and_keep_apart_what_they_cannot_see():
    grid = torch.arange(SIDE * SIDE, dtype=torch.float32).view(1, -1, 1).repeat(3, 1, 2)
    for tiles in (1, 2, 4):
        cut = reference.in_tiles(grid, tiles)
        assert torch.equal(reference.join(cut, tiles), grid)
        first = grid[0, :, 0].view(SIDE, SIDE)[: SIDE // tiles, : SIDE // tiles]
        assert torch.equal(cut[0, :, 0].view_as(first), first)
    with pytest.raises(ValueError, match="256 tokens are no square grid that cells of 3x3 divide"):
        reference.in_tiles(tokens(), 3)
    unet, half = small_model("sd").unet, SIDE // 2
    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    x = torch.randn(1, SIDE * SIDE, 32, generator=rand(0))
    other = x.clone()
    other[:, 0] += 1
    with Reference(unet, 3, tiles=2), torch.inference_mode():
        changed = (attention(other) - attention(x)).abs().amax((0, 2)).view(SIDE, SIDE) > 0
    assert changed[:half, :half].all() and changed.sum() == half**2


@pytest.mark.parametrize(("name", "early", "late"), [
    ("tomesd-early-and-late-0.75-then-0.35", variants.tomesd(0.75), variants.tomesd(0.35)),
    ("downsample-early-and-late-8x8-then-2x2", variants.reference(coarse=8), VARIANTS["downsample-2x2"].put_on),
])  # fmt: skip
def test_a_schedule_is_its_early_method_down_to_half_time_and_then_its_late_one(name, early, late):
    unet = small_model("sd").unet
    for time, alone in ((999, early), (500, early), (499, late), (0, late)):
        with alone(unet, 3):
            wanted = predict(time)
        with VARIANTS[name].put_on(unet, 3):
            assert torch.equal(predict(time), wanted)


def test_random_partners_are_by_seed_and_block_and_every_group_has_a_token():
    of_one, of_other = (Reference(small_model("sd").unet, seed, ratio=0.6) for seed in (1, 2))
    group = of_one.plan(tokens(0), 0).group
    assert torch.equal(group, of_one.plan(tokens(1), 0).group)
    assert group.unique().tolist() == list(range(SIDE**2 - int(0.6 * SIDE**2)))
    for other in (of_one.plan(tokens(), 1), of_other.plan(tokens(), 0)):
        assert not torch.equal(group, other.group)


@of_layouts
def test_partners_by_lot_merge_as_the_engine_would_merge_them(layout, monkeypatch):
    network = small_model(layout).network
    drawn, draw = Reference(network, 3, ratio=0.6), Reference.plan
    monkeypatch.setattr(drawn, "plan", lambda x, number: draw(drawn, x, 0))
    drawn.timestep = 300.0
    method = METHODS["bipartite"]._replace(match=lambda x, grid, options: draw(drawn, x, 0))
    monkeypatch.setitem(METHODS, "bipartite", method)
    with tome_core.patch(network, use_rand=False, correction=False, ratio=0.6):
        theirs = predict(layout=layout)
    with drawn:
        ours = predict(layout=layout)
    assert (ours - theirs).abs().max() < 1e-5 < 1e-2 < (ours - predict(layout=layout)).abs().max()


def share(kept: float) -> float:
    """Of a sequence of six words and a picture that keeps this share of its tokens."""
    return (6 + kept * SIDE**2) / (6 + SIDE**2)


LEFT = {
    "sd": {"unmerged": 1, "zero-attention": 0, "bfloat16": 1, "tomesd-0.5": 1 / 4, "sized-0.5": 1 / 4,
           "downsample-2x2": 1 / 4, "random-partner-0.75": 1 / 16, "tiles-2x2": 1 / 4, "preset-max": 1 / 64},
    "flux": {"unmerged": 1, "zero-attention": 0, "bfloat16": 1, "sized-0.5": share(1 / 2) ** 2,
             "downsample-2x2": share(1 / 4), "random-partner-0.75": share(1 / 4) ** 2, "preset-max": share(1 / 64)},
}  # fmt: skip


@of_layouts
def test_the_work_left_is_counted_whoever_merges(layout):
    network = small_model(layout).network
    for name, left in LEFT[layout].items():
        with Work(network) as work, VARIANTS[name].put_on(network, 0):
            predict(layout=layout)
        assert work.share() == pytest.approx(left, abs=1e-12), name


def test_a_strength_switches_at_its_timestep_and_keeps_its_matches_through_a_picture(work):
    """Early steps keep a sixty-fourth of the keys, late ones more."""
    network, shares = small_model("flux").network, []
    with VARIANTS["preset-balanced"].put_on(network, 0):
        for time in (900, 890, 100):
            with Work(network) as counted:
                predict(time, "flux")
            shares.append((counted.share(), len(work)))
    (early, matched), (kept, still), (late, _) = shares
    assert early == kept == pytest.approx(share(1 / 64)) and late > 2 * early
    assert matched and still == matched


def test_the_timestep_of_a_transformer_is_in_thousandths():
    seen, network = [], small_model("flux").network
    with at_each_call(network, seen.append):
        early_and_late("flux")
    assert seen == pytest.approx([800, 300]) and kind_of(network) == TRANSFORMER
    assert kind_of(small_model("sd").network) == UNET
