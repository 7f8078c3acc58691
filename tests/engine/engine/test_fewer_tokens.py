"""Whole blocks on merged tokens: what they give, in which levels and steps, and how they are counted."""

import copy
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tome_core
from tests.small_models.families import MODELS
from tests.small_models.unets import SDXL, inputs, note_tokens, sdxl, seeded, unet
from tests.watching.operators import OperatorCounter
from tome_core import MergeConfig, MergePlan, MergeRule
from tome_core.engine import fewer_tokens
from tome_core.engine.decision import BlockInput
from tome_core.engine.fewer_tokens import Place, around
from tome_core.engine.merged_tokens import LazyTokens, MergedTokens, pick_samples
from tome_core.hosting import state_of
from tome_core.merging.grid import Grid, Layout
from tome_core.merging.methods import METHODS, base
from tome_core.models.unet_blocks import find_blocks
from tome_core.reporting.ledger import FEW_TOKENS, NO_GRID

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
    for samples in (None, SAMPLES):
        torch.testing.assert_close(merged(torch.zeros_like, x, plan, samples), x, msg="its own difference")


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
    assert "latent /4: 16 tokens in 5 groups; whole blocks on 5 of 16 tokens" in str(handle.report())
    assert coarse.tokens == ((16, 5, 5),) and coarse.merged["block", 16, 5, 0] == len(later_blocks(model))
    with tome_core.patch(model, MergeConfig(rules=(BLOCKS,), max_timestep=800.0)) as handle:
        assert torch.equal(call(model, 900), plain[0])
        assert not [why for why in handle.report().reasons if why.startswith("block")]
        assert not torch.equal(call(model, 700), plain[1])
    assert all("forward" not in vars(block) for block in later_blocks(model))
    assert torch.equal(call(model, 700), plain[1])


def test_the_halves_of_guidance_share_a_match_and_later_steps_keep_it(monkeypatch):
    model, groups = sdxl(), []
    original = MergedTokens.of

    def note(x, plan, *more):
        groups.append(plan.group)
        return original(x, plan, *more)

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


@torch.no_grad()
def test_all_tokens_are_in_one_place_of_memory_and_autocast_changes_no_bit_of_them():
    tokens, whole = lazy()
    address, storage = tokens.data_ptr(), tokens.untyped_storage()
    assert address == tokens.whole().data_ptr() == storage.data_ptr()
    assert tokens.out is None, "the merged ones are not held any more"
    tokens, whole = lazy()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tokens.whole(), whole)


@torch.no_grad()
def test_a_layer_in_higher_precision_shows_in_the_tokens_dtype():
    x, plan = tokens_in_groups(0.3)
    tokens = MergedTokens.of(x.bfloat16(), plan, SAMPLES)
    out = LazyTokens("a", tokens, tokens.merged.float())
    assert out.dtype == out.whole().dtype == torch.float32


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


# --- the mechanism alone ----------------------------------------------------------------------------------------------

ALL, GRID = torch.randn(2, 256, 6, generator=torch.Generator().manual_seed(3)), Grid(16, 16)
FIRST, SECOND = (Place(f"t.{number}", 0, "block", "t") for number in range(2))
OF_ANOTHER = Place("u.0", 0, "block", "u")
add_half = seeded(lambda: nn.Linear(6, 6))()


def begin(**changes):
    """The record of a call in which whole blocks merge."""
    rule = MergeRule(**{**vars(BLOCKS), "min_downsample": 1, **changes})
    return state_of(MergeConfig(rules=(rule,)), 1).begin(500, ALL)


class Run:
    """A block: it notes its input and how many tokens it gets. result: what it returns of its output if they merge."""

    def __init__(self, x: torch.Tensor, result=lambda out: out) -> None:
        self.x, self.result, self.inputs = x, result, []

    def __call__(self, merge):
        self.inputs.append(self.x * 1 if merge is None else merge(self.x))
        out = self.inputs[-1] + add_half(self.inputs[-1])
        return out if merge is None else self.result(out)

    def at(self, call, place, grid=GRID, why=""):
        return around(call, place, self.x, Layout(grid), self, lambda: why)

    @property
    def counts(self):
        return [x.shape[1] for x in self.inputs]


@pytest.fixture
def matches(monkeypatch):
    made, original = [], fewer_tokens.match
    monkeypatch.setattr(fewer_tokens, "match", lambda *args: made.append(None) or original(*args))
    return made


@torch.no_grad()
def test_a_block_of_a_stretch_gets_what_the_one_before_gave(matches):
    call = begin()
    first = Run(ALL)
    out = first.at(call, FIRST)
    given = out.out.clone()
    second = Run(out)
    second.at(call, SECOND)
    assert torch.equal(second.inputs[0], given) and not torch.equal(given, first.inputs[0]) and len(matches) == 1


@torch.no_grad()
@pytest.mark.parametrize("way", ["after another use", "in another call", "in another transformer"])
def test_a_stretch_ends_with_another_use_and_with_its_call_and_transformer(way, matches):
    call = begin()
    out = Run(ALL).at(call, FIRST)
    if way == "after another use":
        out.sum()
    later = call.state.begin(400, ALL) if way == "in another call" else call
    second = Run(out)
    result = second.at(later, OF_ANOTHER if way == "in another transformer" else SECOND)
    assert len(matches) == 2 and second.counts[0] < 256 and result.shape == ALL.shape
    assert type(result.tokens.x) is torch.Tensor and torch.equal(result.tokens.x, out * 1)


@torch.no_grad()
def test_a_refusal_amid_a_stretch_is_remembered_too():
    call = begin()
    for tries in (1, 0):
        first = Run(ALL)
        refusing = Run(first.at(call, FIRST), lambda out: None)
        refusing.at(call, SECOND)
        assert refusing.counts == first.counts * tries + [256]


RESULTS = {"nothing": lambda out: None, "a tuple": lambda out: (out,), "a row": lambda out: out[0],
           "a number for each token": lambda out: out[..., 0], "another batch": lambda out: out[:1],
           "other tokens": lambda out: out[:, 1:]}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("part", ["block", "mlp"])
def test_what_cannot_be_unmerged_is_computed_again_from_all_tokens(part, result):
    call = begin(merge_blocks=part == "block", merge_mlp=part == "mlp")
    call.block, run = BlockInput(ALL, GRID, {}), Run(ALL, RESULTS[result])
    out = run.at(call, Place("t.0", 0, part, "t" if part == "block" else ""))
    assert torch.equal(out, ALL + add_half(ALL)) and len(run.counts) == 2 and run.counts[1] == 256
    assert list(call.state.report().reasons) == [f"{part}: what it returned cannot be unmerged"]


@torch.no_grad()
def test_a_block_that_returns_other_channels_than_it_gets_runs_on_all_tokens():
    call, run = begin(merge_blocks=True), Run(ALL, lambda out: torch.cat([out, out], 2) if out.shape[1] < 256 else out)
    out = run.at(call, Place("t.0", 0, "block", "t"))
    assert torch.equal(out, ALL + add_half(ALL)) and run.counts[-1] == 256


class Failure(Exception):
    """Of another program."""


@torch.no_grad()
@pytest.mark.parametrize("error", [None, Failure, ValueError])
def test_what_runs_inside_is_told_so_and_afterwards_all_is_as_before(error):
    call, told = begin(), []

    def note(out):
        told.append(call.inside)
        if error is not None:
            raise error
        return out

    call.inside = before = 1, 2, 3
    run = Run(ALL, note)
    with pytest.raises(Failure) if error is Failure else nullcontext():
        run.at(call, FIRST)
    assert told == [(2, 256, run.counts[0])] and call.inside == before
    assert len(run.counts) == (2 if error is ValueError else 1)


@torch.no_grad()
@pytest.mark.parametrize("x, grid", [
    (ALL, None), (ALL, Grid(8, 16)), (ALL[:, :200], GRID), (ALL[0], GRID), (ALL[..., None], GRID), (ALL[0, 0], GRID),
    (None, GRID)])
def test_what_is_not_the_pictures_grid_runs_as_it_is_and_is_said(x, grid):
    call, calls = begin(), []
    assert around(call, FIRST, x, grid and Layout(grid), lambda merge: calls.append(merge) or x, str) is x
    assert calls == [None] and list(call.state.report().reasons) == [f"block: {NO_GRID}"]


@torch.no_grad()
def test_parts_of_a_block_share_the_match_of_their_rule(monkeypatch):
    call, made = begin(merge_blocks=False, merge_mlp=True, merge_crossattn=True), []
    method = METHODS[BLOCKS.method]
    noting = method._replace(match=lambda *args: made.append(None) or method.match(*args))
    monkeypatch.setitem(METHODS, BLOCKS.method, noting)
    for number in range(2):
        call.block = BlockInput(ALL, GRID, {})
        for part in ("crossattn", "mlp"):
            Run(ALL).at(call, Place(f"t.{number}", 0, part))
        assert len(made) == number + 1


@torch.no_grad()
def test_a_block_input_in_another_order_of_memory_is_copied_once_for_a_match(monkeypatch):
    """diffusers' blocks get such an input, and queries are taken from it slice by slice."""
    monkeypatch.setitem(base._SCORE_BYTES, "cpu", 4 * 2 * 64 * 16)
    clones, pictures = [], []
    for x in (ALL, ALL.mT.contiguous().mT):
        call, run = begin(merge_blocks=False, merge_mlp=True), Run(ALL)
        call.block = BlockInput(x, GRID, {})
        with OperatorCounter() as counter:
            pictures.append(around(call, Place("t.0", 0, "mlp"), x, Layout(GRID), run, str))
        clones.append(counter.by_name["clone"])
    assert torch.equal(*pictures) and clones[1] == clones[0] + 1


@torch.no_grad()
@pytest.mark.parametrize("place", [FIRST, OF_ANOTHER], ids=["the same block again", "another block"])
def test_each_run_of_each_block_keeps_a_plan_of_its_own(place, matches):
    state, groups = begin(keep=100.0).state, []
    for timestep in (500, 490):
        state.set_time(timestep=timestep, sampling="a", pictures=2)
        call = state.begin(timestep, ALL)
        groups += [Run(x).at(call, where).tokens.plan.group for x, where in ((ALL, FIRST), (ALL.flip(1), place))]
    assert len(matches) == 2 and all(map(torch.equal, groups[:2], groups[2:])) and not torch.equal(*groups[:2])


@torch.no_grad()
def test_a_kept_plan_is_of_one_grid(matches):
    state = begin(keep=100.0).state
    for timestep, grid in ((500, GRID), (490, GRID), (480, Grid(8, 32))):
        state.set_time(timestep=timestep, sampling="a", pictures=2)
        Run(ALL).at(state.begin(timestep, ALL), FIRST, grid)
    assert len(matches) == 2


@torch.no_grad()
@pytest.mark.parametrize("part", ["block", "mlp"])
def test_random_destinations_are_drawn_anew_at_another_timestep(part):
    state, inputs = begin(merge_blocks=part == "block", merge_mlp=part == "mlp", use_rand=True).state, []
    for timestep in (500, 500, 400):
        call, run = state.begin(timestep, ALL), Run(ALL)
        call.block = BlockInput(ALL, GRID, {})
        run.at(call, Place("t.0", 0, part, "t"))
        inputs += run.inputs
    assert torch.equal(*inputs[:2]) and not torch.equal(*inputs[1:])


@torch.no_grad()
def test_tokens_are_compared_without_their_own_means_and_there_are_no_samples_without_a_correction():
    shifts = 5 * torch.randn(2, 256, 1, generator=torch.Generator().manual_seed(4))
    of_shifted, of_plain = (Run(x).at(begin(correction=False), FIRST).tokens for x in (ALL + shifts, ALL))
    assert torch.equal(of_shifted.plan.group, of_plain.plan.group)
    assert of_plain.samples is None and Run(ALL).at(begin(), FIRST).tokens.samples is not None


@torch.no_grad()
@pytest.mark.parametrize("part", ["block", "mlp"])
def test_a_map_is_kept_for_display(part):
    call = begin(merge_blocks=part == "block", merge_mlp=part == "mlp")
    call.state.keep_maps()
    call.block = BlockInput(ALL, GRID, {})
    out = Run(ALL).at(call, Place("t.0", 0, part, "t"))
    assert call.state.maps()[0].group.shape[1] == 256 and out.shape == ALL.shape


def test_why_a_rule_does_not_merge_now_is_said():
    call = begin(only_if_it_pays=True)
    call.gate = "it costs more than it saves"
    Run(ALL).at(call, FIRST)
    call.gate = None
    Run(ALL).at(call, SECOND)
    assert list(call.state.report().reasons) == ["block: it costs more than it saves", f"block: {FEW_TOKENS}"]
