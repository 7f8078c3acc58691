"""Each variant does what its name says and leaves nothing behind, and the work that it leaves is counted."""

import functools
import itertools

import pytest
import torch

import tome_core
from benchmarks.networks import TRANSFORMER, UNET, Work
from benchmarks.variants import VARIANTS
from demo import model, transformer
from tests.small_models import tiny_scenes

SIDE = tiny_scenes.SIDE
KIND = {"sd": UNET, "flux": TRANSFORMER}
WITHOUT_EFFECT = ("unmerged", "twice the solver steps", "whole blocks")  # the last has one in SDXL's layout alone
of_layouts = pytest.mark.parametrize("layout", KIND)


@functools.cache
def small_model(layout: str) -> model.SceneModel:
    """Random weights, and self-attention strong enough that merging matters; 16 tokens a side."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transformer, "SIDE", transformer.TOKEN * SIDE)
        scenes = tiny_scenes.make({"sd": tiny_scenes.UNET, "flux": tiny_scenes.FLUX}[layout])
    for name, weights in scenes.named_parameters():
        if "attn1.to_out" in name:
            torch.nn.init.normal_(weights, std=0.5, generator=torch.Generator().manual_seed(2))
    return scenes


@torch.inference_mode()
def predict(layout: str, time: int = 300) -> torch.Tensor:
    side = SIDE if layout == "sd" else transformer.TOKEN * SIDE
    noise = torch.randn(2, 12, side, side, generator=torch.Generator().manual_seed(5))
    return small_model(layout)(noise, torch.full((2,), time), torch.tensor([[0, 5, 9, 12, 15, 20]] * 2))


def early_and_late(layout: str) -> torch.Tensor:
    """Weak strengths leave late steps alone."""
    return torch.stack([predict(layout, 800), predict(layout, 300)])


def traces(network: torch.nn.Module) -> list:
    """List all that a patch could leave on the modules and in torch."""
    modules = [(type(module), len(module._forward_hooks) + len(module._forward_pre_hooks), set(vars(module)))
               for module in network.modules()]  # fmt: skip
    return [torch.nn.functional.scaled_dot_product_attention, *modules]


@of_layouts
def test_a_variant_is_the_same_each_time_and_leaves_nothing_behind(layout):
    """One variant of each line, the last one."""
    lines = {variant.method: variant for variant in VARIANTS.values() if KIND[layout] in variant.kinds}
    network = small_model(layout).network
    plain, state, before = early_and_late(layout), torch.get_rng_state(), traces(network)
    for line, variant in lines.items():
        answers = []
        for _ in range(2):
            with variant.put_on(network, 3):
                answers.append(early_and_late(layout))
        assert torch.equal(*answers), line
        assert torch.equal(early_and_late(layout), plain) and torch.equal(torch.get_rng_state(), state), line
        assert traces(network) == before, line
        assert torch.equal(answers[0], plain) == (line in WITHOUT_EFFECT), line


@torch.inference_mode()
def test_whole_blocks_may_begin_with_the_first_and_merge_in_two_stretches():
    scenes = tiny_scenes.make(tiny_scenes.UNET_XL)
    noise = torch.randn(2, 12, SIDE, SIDE, generator=torch.Generator().manual_seed(5))
    usual = "whole-blocks-0.25-below-760"
    answers = []
    for name in (usual, f"{usual}-first-too", f"{usual}-first-two-whole", f"{usual}-two-stretches"):
        with VARIANTS[name].put_on(scenes.network, 0):
            answers += [scenes(noise, torch.full((2,), time), torch.tensor([[0, 5, 9, 12, 15, 20]] * 2))
                        for time in (300, 800)]  # fmt: skip
    late, early = answers[::2], answers[1::2]
    assert all(torch.equal(early[0], other) for other in early), "above the timestep nothing merges"
    assert not any(torch.equal(*pair) for pair in itertools.combinations(late, 2))


def share(kept: float) -> float:
    """The kept share of a sequence of six words and a picture, if the picture keeps this share of its tokens."""
    return (6 + kept * SIDE**2) / (6 + SIDE**2)


LEFT = {"sd": {"unmerged": 1, "zero-attention": 0, "bfloat16": 1, "tomesd-0.5": 1 / 4, "sized-0.5": 1 / 4,
               "downsample-2x2": 1 / 4, "tiles-2x2": 1 / 4, "tomesd-early-and-late-0.75-then-0.35": (167 / 256) ** 2,
               "preset-max": 1 / 64},
        "flux": {"unmerged": 1, "zero-attention": 0, "bfloat16": 1, "sized-0.5": share(1 / 2) ** 2,
                 "downsample-2x2": share(1 / 4)}}  # fmt: skip


@of_layouts
def test_the_work_left_is_counted_whoever_merges(layout):
    network = small_model(layout).network
    for name, left in LEFT[layout].items():
        with Work(network) as work, VARIANTS[name].put_on(network, 0):
            predict(layout)
        assert work.share() == pytest.approx(left, abs=1e-12), name


def test_a_strength_switches_at_its_timestep_and_keeps_its_matches_through_a_picture(work):
    """Early steps keep a sixty-fourth of the keys, late ones more."""
    network, shares = small_model("sd").network, []
    with VARIANTS["preset-balanced"].put_on(network, 0):
        for time in (900, 890, 100):
            with Work(network) as counted:
                predict("sd", time)
            shares.append((counted.share(), len(work)))
    (early, matched), (kept, still), (late, _) = shares
    assert early == kept == pytest.approx(1 / 64) and late > 2 * early
    assert matched and still == matched


def test_attention_alone_merges_as_its_strength_but_no_whole_blocks(monkeypatch):
    """The coarsest level of SDXL's layout has 4x4 tokens here, and a late step merges blocks."""
    handles, patch = [], tome_core.patch

    def keep(*args, **kwargs):
        handles.append(patch(*args, **kwargs))
        return handles[-1]

    monkeypatch.setattr(tome_core, "patch", keep)
    scenes = tiny_scenes.make(tiny_scenes.UNET_XL)
    noise = torch.randn(2, 12, SIDE, SIDE, generator=torch.Generator().manual_seed(5))
    for name in ("preset-max", "attention-alone-max"):
        with VARIANTS[name].put_on(scenes.network, 0), torch.inference_mode():
            scenes(noise, torch.full((2,), 300), torch.tensor([[0, 5, 9, 12, 15, 20]] * 2))
            assert handles[-1].report().levels[0].tokens, name
    whole, alone = (handle.report() for handle in handles)
    assert whole.block_tokens and not alone.block_tokens and whole.levels[0].tokens == alone.levels[0].tokens
