"""Whole blocks on merged tokens: what they give, in which levels and steps, and how they are counted."""

import pytest
import torch
from torch import nn

import tome_core
from tests.families import MODELS
from tests.models import inputs, note_tokens, sdxl, seeded
from tome_core import MergeConfig, MergePlan, MergeRule
from tome_core.engine.merged_tokens import MergedTokens, pick_samples
from tome_core.merging.grid import Grid
from tome_core.models.unet_blocks import find_blocks

SAMPLES = pick_samples(Grid(32, 32), torch.device("cpu"))[0]
BLOCKS = MergeRule(merge_attn=False, merge_blocks=True, ratio=0.75, use_rand=False, side="kv", min_downsample=4)


@seeded
def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))


def merged(function, x, plan, samples):
    """What a block that adds ``function(x)`` to each token gives on merged tokens."""
    tokens = MergedTokens.of(x, plan, samples)
    return tokens.unmerge(tokens.merged + function(tokens.merged))


def tokens_in_groups(spread: float) -> tuple[torch.Tensor, MergePlan]:
    """1,024 tokens around 256 means, four at each, and their plan."""
    dice = torch.Generator().manual_seed(1)
    means = torch.randn(2, 256, 6, generator=dice).repeat_interleave(4, 1)
    return means + spread * torch.randn(2, 1024, 6, generator=dice), MergePlan(torch.arange(1024)[None] // 4, 256)


@torch.no_grad()
def test_equal_tokens_lose_nothing_and_samples_are_exact():
    function = layer()
    x, plan = tokens_in_groups(0.0)
    for samples in (None, SAMPLES):
        torch.testing.assert_close(merged(function, x, plan, samples), x + function(x), rtol=1e-4, atol=1e-5)
    x, plan = tokens_in_groups(0.3)
    torch.testing.assert_close(merged(function, x, plan, SAMPLES)[:, SAMPLES], (x + function(x))[:, SAMPLES])
    torch.testing.assert_close(merged(torch.zeros_like, x, plan, SAMPLES), x, msg="a token keeps its own difference")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_correction_finds_a_linear_map_and_lessens_the_error_of_others(dtype):
    x, plan = tokens_in_groups(0.3)
    x = x.to(dtype)
    for function, most in ((layer()[0], 0.15), (layer(), 0.9)):
        function = nn.Sequential(function, nn.Linear(24, 6)) if most < 0.5 else function
        function = function.to(dtype)
        errors = [(merged(function, x, plan, samples) - x - function(x)).float().norm() for samples in (None, SAMPLES)]
        assert 0 < errors[1] < most * errors[0]


@torch.no_grad()
def test_half_precision_gives_what_single_precision_gives():
    x, plan = tokens_in_groups(0.3)
    x = torch.cat([x, torch.zeros(2, 1024, 400)], 2) * 60  # products of 60**2 * 6 channels are near float16's limit
    function = seeded(lambda: nn.Linear(406, 406))()
    expected = merged(function, x, plan, SAMPLES)
    half = merged(lambda y: function(y.float()).half(), x.half(), plan, SAMPLES)
    assert half.dtype == torch.float16 and (half - expected).norm() < 0.01 * expected.norm()


def call(model, timestep: float):
    return MODELS["sdxl"].call(model, 2, 16, 16, timestep=timestep)


def later_blocks(model) -> list[nn.Module]:
    """The blocks of the coarsest level that may merge: the second of two in each transformer."""
    return [place.block for place in find_blocks(model) if place.halvings == 2][1::2]


def test_only_later_blocks_of_the_coarsest_level_merge_below_their_timestep_and_nothing_stays():
    model, counts = sdxl(), []
    config = MergeConfig(rules=(MergeRule(ratio=0.5), MergeRule(**{**vars(BLOCKS), "max_timestep": 800.0})))
    plain = [call(model, timestep) for timestep in (900, 700)]
    for block in (place.block for place in find_blocks(model) if place.halvings == 2):
        note_tokens(block.ff, counts)
    with tome_core.patch(model, config) as handle:
        call(model, 900)
        fine, coarse = handle.report().levels
        assert fine.calls_merged and not coarse.calls_merged and set(counts) == {16}
        counts.clear()
        call(model, 700)
        fine, coarse = handle.report().levels
    assert counts == [16, 5] * len(later_blocks(model)), "four groups and a sample"
    assert "latent /4: 16 tokens -> 5; whole blocks 16 tokens -> 5, 23% left out" in str(handle.report())
    assert coarse.tokens == ((16, 5, 5),) and coarse.merged["block", 16, 5, 0] == len(later_blocks(model))
    with tome_core.patch(model, MergeConfig(rules=(BLOCKS,), max_timestep=800.0)):
        assert torch.equal(call(model, 900), plain[0]) and not torch.equal(call(model, 700), plain[1])
    assert all("forward" not in vars(block) for block in later_blocks(model))
    assert torch.equal(call(model, 700), plain[1])


def test_the_halves_of_guidance_share_a_match_and_later_steps_keep_it(monkeypatch):
    model, groups = sdxl(), []
    original = MergedTokens.of

    def note(x, plan, samples):
        groups.append(plan.group)
        return original(x, plan, samples)

    monkeypatch.setattr("tome_core.engine.merged_tokens.MergedTokens.of", note)
    x, (_, text) = inputs(4, 1, 16, 16)[0].repeat(2, 1, 1, 1), inputs(4, 2, 16, 16)
    with tome_core.patch(model, MergeConfig(rules=(BLOCKS,), keep=100.0)) as handle, torch.no_grad():
        for timestep, pictures in ((500, 1), (450, 1), (300, 1), (300, None)):
            handle.set_time(timestep=timestep, sampling=str(pictures), pictures=pictures)
            MODELS["sdxl"].forward(model, x, timestep, text)
    steps = [groups[number : number + len(groups) // 4] for number in range(0, len(groups), len(groups) // 4)]
    assert all(torch.equal(group[0], group[-1]) for step in steps[:3] for group in step)
    assert not all(torch.equal(group[0], group[-1]) for group in steps[3])
    assert all(map(torch.equal, *steps[:2])) and not all(map(torch.equal, *steps[1:3]))


def refuse(block):
    block.set_chunk_feed_forward(8, 1)  # fails unless the tokens are a multiple


def replace_forward(block):
    original = block.forward
    block.forward = lambda *args, **kwargs: original(*args, **kwargs)


class OwnProcessor:
    def __init__(self, processor):
        self.processor = processor

    def __call__(self, *args, **kwargs):
        return self.processor(*args, **kwargs)


@pytest.mark.parametrize("change, why", [
    (refuse, "it fails with merged tokens (ValueError"), (replace_forward, "another program runs in its place, at"),
    (lambda block: block.attn2.set_processor(OwnProcessor(block.attn2.processor)), "OwnProcessor at attn2 may need")])
@pytest.mark.parametrize("is_patched", [False, True])
def test_blocks_that_may_need_every_token_are_left_alone_and_named(change, why, is_patched):
    model = sdxl()
    plain = call(model, 500)
    with tome_core.patch(model, MergeConfig(rules=(BLOCKS,))) if is_patched else torch.no_grad():
        for block in later_blocks(model):
            change(block)
        with tome_core.patch(model, MergeConfig(rules=(BLOCKS,))) as handle:
            torch.testing.assert_close(call(model, 500), plain, rtol=1e-4, atol=1e-5)
    reasons = {reason: count for reason, count in handle.report().levels[1].reasons.items() if why in reason}
    assert sum(reasons.values()) == len(later_blocks(model))


def test_a_model_that_is_trained_runs_whole():
    model, (x, text) = sdxl(), inputs(4, 2, 16, 16)
    plain = MODELS["sdxl"].forward(model, x, 500, text)
    with tome_core.patch(model, MergeConfig(rules=(BLOCKS,))) as handle:
        assert torch.equal(MODELS["sdxl"].forward(model, x, 500, text), plain)
    assert any("gradients" in reason for reason in handle.report().reasons)
