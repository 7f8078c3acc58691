"""Whole blocks on merged tokens: what they give, in which levels and steps, and how they are counted."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tome_core
from tests.families import MODELS
from tests.models import SDXL, inputs, note_tokens, sdxl, seeded, unet
from tome_core import MergeConfig, MergePlan, MergeRule
from tome_core.engine import fewer_tokens
from tome_core.engine.merged_tokens import LazyTokens, MergedTokens, pick_samples
from tome_core.merging.grid import Grid
from tome_core.models.unet_blocks import find_blocks

SAMPLES = pick_samples(Grid(32, 32), torch.device("cpu"))[0]
BLOCKS = MergeRule(merge_attn=False, merge_blocks=True, ratio=0.75, use_rand=False, side="kv", min_downsample=4)


deep_sdxl = seeded(unet, **{**SDXL, "transformer_layers_per_block": (1, 1, 4)})


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


# --- tokens that come back by their first use -------------------------------------------------------------------------

def lazy(spread: float = 0.3) -> tuple[LazyTokens, torch.Tensor]:
    """The output of a merged layer, and the same for all tokens."""
    x, plan = tokens_in_groups(spread)
    tokens, function = MergedTokens.of(x, plan, SAMPLES), layer()
    out = tokens.merged + function(tokens.merged)
    return LazyTokens("a", tokens, out), tokens.unmerge(out)


USES = {
    "a layer": lambda x: F.linear(x, torch.ones(3, 6)), "a sum": lambda x: x + 1, "a view": lambda x: x.mT,
    "a part": lambda x: x[:, 3:5], "a norm": lambda x: F.layer_norm(x, (6,)), "rows": lambda x: x[0],
    "together": lambda x: torch.cat([x, x], 1), "a list": lambda x: torch.stack([x, x]), "bytes": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy().tobytes(), "an array": lambda x: np.asarray(x).tobytes(),
    "half": lambda x: x.half(), "contiguous": lambda x: x.contiguous().clone(), "a copy": copy.deepcopy,
    "a pickle": lambda x: pickle.loads(pickle.dumps(x)), "a number": lambda x: x.sum().item(),
    "another's memory": lambda x: torch.zeros(2, 1024, 6).copy_(x), "autocast": lambda x: autocast(x),
}  # fmt: skip


def autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, torch.ones(3, 6))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_whatever_uses_the_tokens_of_a_merged_block_gets_all_of_them(use, mode):
    with mode():
        tokens, whole = lazy()
        assert (tokens.shape, tokens.dtype, tokens.device) == (whole.shape, whole.dtype, whole.device)
        assert tokens.tokens is not None, "to ask for the shape computes nothing"
        result, expected = USES[use](tokens), USES[use](whole)
        assert type(result) is type(expected) and tokens.tokens is None, "the stretch has ended"
        if torch.is_tensor(expected):
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
        else:
            assert result == expected


@torch.no_grad()
def test_what_is_added_in_place_stays():
    tokens, whole = lazy()
    tokens += 1
    assert torch.equal(tokens * 1, whole + 1) and torch.equal(tokens.whole(), whole + 1)


# --- blocks -----------------------------------------------------------------------------------------------------------

def test_a_refusal_is_remembered():
    model, counts = sdxl(), []
    for block in later_blocks(model):
        note_tokens(block.norm3, counts)
        refuse(block)
    with tome_core.patch(model, MergeConfig(rules=(BLOCKS,))) as handle:
        call(model, 500)
        assert counts == [5, 16] * len(later_blocks(model)), "tried once"
        counts.clear()
        call(model, 490)
    assert counts == [16] * len(later_blocks(model))
    assert sum(handle.report().levels[1].reasons.values()) >= 2 * len(later_blocks(model)), "named each time"


def test_a_block_that_fails_with_all_tokens_too_raises_its_error():
    model = sdxl()
    for block in later_blocks(model):
        block.norm3.weight.data = torch.ones(3)
    with tome_core.patch(model, MergeConfig(rules=(BLOCKS,))) as handle, pytest.raises(RuntimeError, match="shape"):
        call(model, 500)
    assert not [why for why in handle.report().reasons if "it fails" in why]


def test_blocks_of_one_stretch_share_one_match_and_a_foreign_one_among_them_splits_it():
    deep, matches = deep_sdxl(), []
    with pytest.MonkeyPatch.context() as patches:
        original = fewer_tokens.match
        patches.setattr(fewer_tokens, "match", lambda *args: matches.append(None) or original(*args))
        with tome_core.patch(deep, MergeConfig(rules=(BLOCKS,))) as handle:
            call(deep, 500)
            stretches = len(matches)
            assert handle.report().levels[1].merged["block", 16, 5, 0] == 3 * stretches > 0
            places = [place for place in find_blocks(deep) if place.path.endswith("blocks.2") and place.halvings == 2]
            for place in places:
                place.block.ff.register_forward_hook(lambda *_: None)
            matches.clear()
            handle.reset_counts()
            call(deep, 500)
            assert len(matches) == 2 * stretches == 2 * len(places), "before the foreign block, and after it"
            assert handle.report().levels[1].merged["block", 16, 5, 0] == 2 * stretches


def test_a_block_that_adds_to_its_input_in_place_gives_the_same():
    """Blocks of ComfyUI before 2025 do."""
    pictures = []
    for in_place in (False, True):
        model = deep_sdxl()
        for place in find_blocks(model):
            kind = type(place.block)
            own = type(kind.__name__, (kind,), {"forward": adding(kind.forward) if in_place else kind.forward})
            own.__module__ = own.forward.__module__ = kind.__module__
            place.block.__class__ = own
        with tome_core.patch(model, MergeConfig(rules=(BLOCKS,))) as handle:
            pictures.append(call(model, 500))
        assert handle.report().levels[1].block_tokens
    assert torch.equal(*pictures)


def adding(forward):
    def in_place(self, x, *args, **kwargs):
        out = forward(self, x, *args, **kwargs)
        if type(x) is torch.Tensor:
            x.add_(out - x)
        return out

    return in_place
