"""Parts and blocks by their wraps: with which arguments they get merged tokens."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.small_models.unets import ldm_sd1, sd15
from tome_core import MergeConfig, MergeRule
from tome_core.engine.decision import BlockInput, ModelCall
from tome_core.engine.fewer_tokens import Place
from tome_core.hosting import state_of
from tome_core.merging.grid import Grid, Layout
from tome_core.models.every_token import ModulesBelow
from tome_core.models.fewer_tokens import BlockAttentionSite, BlockInputSite, PartSite, WholeBlockSite, run_block
from tome_core.models.unet_blocks import find_blocks
from tome_core.reporting.ledger import PARTS_COMPILED

X, GRID = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(0)), Grid(8, 8)
TEXT, LONG_TEXT = torch.ones(2, 7, 8), torch.ones(2, 64, 8)
PARTS = ("attn", "crossattn", "mlp")


class Part(nn.Module):
    """Notes what it gets, and returns its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append((args, kwargs))
        return args[0] if args else next(iter(kwargs.values()))

    def counts(self) -> list[int]:
        """How many tokens each tensor of the only call has."""
        ((args, kwargs),) = self.calls
        return [value.shape[1] for value in (*args, *kwargs.values()) if torch.is_tensor(value) and value.dim() == 3]


def begin(**settings: Any) -> ModelCall:
    """A record of a call in which all parts merge tomesd's way, unless the settings say otherwise."""
    rule = {"ratio": 0.5, "proportional": False, "use_rand": False, "merge_crossattn": True, "merge_mlp": True}
    call = state_of(MergeConfig(rules=(MergeRule(**{**rule, **settings}),)), 1).begin(500, X)
    call.block, call.layouts = BlockInput(X, GRID, {}), {0: Layout(GRID)}
    return call


def on(part: str, call: ModelCall | None) -> Part:
    """A part with its wrap, in a call."""
    module = Part()
    root = nn.Module()
    root.b = Part()
    wraps = SimpleNamespace(calls=SimpleNamespace(current=call), call_outside_forward=lambda: None, regain_top=id,
                            wraps=[SimpleNamespace(target=root)])  # fmt: skip
    if part == "attn":
        site = BlockAttentionSite(module, wraps, "b.attn1", 0)
    elif part == "block":
        site = WholeBlockSite(module, wraps, "b.1", 0)
    else:
        site = PartSite(module, wraps, "b.part", 0, part, "")
    site.install()
    return module


MERGE = {
    "the input alone": ("mlp", (X,), {}, [1]), "a text": ("crossattn", (X, TEXT), {}, [1, 0]),
    "a text by name": ("crossattn", (X,), {"context": TEXT}, [1, 0]),
    "a text as long as the picture": ("crossattn", (X, LONG_TEXT), {"value": LONG_TEXT}, [1, 0, 0]),
    "itself": ("attn", (X, X), {}, [1, 1]), "itself by name": ("attn", (X,), {"context": X, "value": X}, [1, 1, 1]),
    "no context": ("attn", (X,), {"encoder_hidden_states": None, "mask": None}, [1]),
    "a mask of a text": ("crossattn", (X, TEXT), {"mask": torch.ones(2, 1, 7)}, [1, 0, 0]),
    "a mask of a text, by number": ("crossattn", (X, TEXT), {"attention_mask": torch.ones(64, 7)}, [1, 0]),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("case", MERGE)
def test_the_tokens_of_the_picture_merge_and_no_others(case: str):
    part, args, kwargs, merges = MERGE[case]
    module = on(part, call := begin())
    given = [value.shape[1] for value in (*args, *kwargs.values()) if torch.is_tensor(value) and value.dim() == 3]
    out = module(*args, **kwargs)
    counts = module.counts()
    assert out.shape == X.shape and counts[0] < 64 and not call.state.report().reasons
    assert counts == [counts[0] if is_merged else count for is_merged, count in zip(merges, given, strict=True)]
    keys = {"attn": counts[0], "crossattn": args[1].shape[1] if len(args) > 1 else 7, "mlp": 0}[part]
    (level,) = call.state.report().levels
    assert level.merged == {(part, 64, counts[0], keys): 1}


MASKED, ARGUMENTS, NO_GRID = "an attention mask is on", "unsupported arguments", "not those of the whole"
WHOLE = {
    "no input": ("attn", (), {"x": X}, ARGUMENTS), "three arguments": ("attn", (X, X, X), {}, ARGUMENTS),
    "no tokens": ("mlp", (X[0],), {}, ARGUMENTS), "another batch": ("mlp", (X[:1],), {}, NO_GRID),
    "other tokens": ("crossattn", (X[:, 1:], TEXT), {}, NO_GRID),
    "a mask": ("attn", (X,), {"mask": TEXT}, MASKED), "an attention mask": ("attn", (X,), {"attn_mask": TEXT}, MASKED),
    "a mask in diffusers": ("attn", (X,), {"attention_mask": TEXT}, MASKED),
    "frames": ("attn", (X,), {"n_times_crossframe_attn_in_self": 2}, "cross-frame attention"),
    "keys of others": ("attn", (X,), {"context": LONG_TEXT[:, 1:]}, "other tokens than the picture's"),
    "a mask for each query": ("crossattn", (X, TEXT), {"mask": torch.ones(2, 64, 7)}, "has a mask that differs"),
    "an adapter's mask": ("crossattn", (X, TEXT), {"ip_adapter_masks": [1]}, "an adapter's mask"),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("case", WHOLE)
def test_what_needs_every_token_gets_them_as_they_are_and_says_why(case: str):
    part, args, kwargs, why = WHOLE[case]
    module = on(part, call := begin())
    module(*args, **kwargs)
    ((given, more),) = module.calls
    assert all(one is other for one, other in zip((*given, *more.values()), (*args, *kwargs.values()), strict=True))
    (reason,) = call.state.report().reasons
    assert reason.startswith(f"{part}: ") and why in reason


class Watching(TorchFunctionMode):
    """Another program's view of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("part", [*PARTS, "block"])
@pytest.mark.parametrize("what", ["a function mode", "a hook", "torch's device", "nothing"])
def test_beside_a_function_mode_and_a_hook_of_others_all_run_whole(what: str, part: str):
    call = begin(**{"merge_attn": False, "merge_blocks": True} if part == "block" else {})
    module = on(part, call)
    if what == "a hook":
        module.register_forward_hook(lambda *_: None)
    with {"a function mode": Watching(), "torch's device": torch.device("cpu")}.get(what, nullcontext()):
        module(X)
    is_whole = what in ("a function mode", "a hook")
    assert (module.counts()[0] == 64) == is_whole == bool(call.state.report().reasons)


@torch.no_grad()
@pytest.mark.parametrize("part", [*PARTS, "block"])
@pytest.mark.parametrize("why", ["no call", "no rule"])
def test_where_nothing_is_to_merge_a_part_is_only_called(why: str, part: str, caplog):
    call = begin(**{"merge_attn": False, "merge_mlp": False, "merge_crossattn": False, "ratio": 0.0}
                 if why == "no rule" else {})  # fmt: skip
    module = on(part, None if why == "no call" else call)
    assert module(X) is X and module.counts() == [64] and not caplog.records
    assert part == "attn" or not call.state.report().reasons


def own_forward(*_: Any) -> None:
    """Another program's, in place of a block's."""


@torch.no_grad()
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("case", ["a reason", "compiled", "replaced", "replaced within", "not called"])
def test_without_its_blocks_input_a_part_runs_whole_and_says_why(case: str, part: str):
    call = begin()
    call.block = ARGUMENTS if case == "a reason" else None
    module = on(part, call)
    block = vars(module)["forward"].__self__.wraps.wraps[0].target.b
    if case == "compiled":
        call.state.ledger.note_traced(0, PARTS_COMPILED)
    elif case == "replaced":
        block.forward = own_forward
    elif case == "replaced within":  # LDM's
        block.__class__ = type("Inner", (Part,), {"_forward": Part.forward})
        block._forward = own_forward
    assert module(X, TEXT[:, :0]) is X and module.counts() == [64, 0]
    (reason,) = call.state.report().reasons
    replaced = "another program runs in its place"
    assert reason == f"{part}: " + {"a reason": ARGUMENTS, "compiled": PARTS_COMPILED, "not called": replaced}.get(
        case, f"{replaced}: {__name__}.own_forward")
    (level,) = call.state.report().levels
    assert level.skipped == {reason: 1} and not level.merged


@torch.no_grad()
def test_with_a_rule_that_merges_keys_and_values_an_attention_gets_all_tokens():
    module = on("attn", begin(proportional=True))
    assert module(X) is X and module.counts() == [64]


@torch.no_grad()
@pytest.mark.parametrize("name", ["x", "sample", "hidden_states"])
def test_a_block_merges_an_input_by_name(name: str):
    call, module = begin(merge_attn=False, merge_blocks=True, merge_mlp=False, merge_crossattn=False), Part()
    place = Place("b.1", 0, "block", "b")
    out = run_block(call, place, Layout(GRID), ModulesBelow(module), module, (), {name: X, "context": TEXT})
    ((args, kwargs),) = module.calls
    assert not args and kwargs[name].shape[1] < 64 and kwargs["context"] is TEXT and out.shape == X.shape


a_part, a_block = partial(PartSite, place="b.ff", part="mlp", package=""), partial(WholeBlockSite, path="b.1")


@pytest.mark.parametrize("kind, of_rule, is_noted", [
    (a_part, {"merge_mlp": True}, True), (a_part, {"proportional": False}, False),
    (a_block, {"merge_blocks": True}, True), (BlockInputSite, {"proportional": False}, True),
    (BlockInputSite, {"merge_mlp": True}, False),
    (BlockInputSite, {"merge_mlp": True, "merge_attn": False, "proportional": False}, False)])
def test_what_a_compiler_traces_runs_whole_and_is_noted_if_a_rule_merges_it(kind, of_rule, is_noted):
    rules = MergeRule(max_timestep=500.0), MergeRule(**of_rule)
    state, module = state_of(MergeConfig(rules=rules), 1), Part()
    for patch in (None, state):
        assert kind(module, SimpleNamespace(patch=patch), level=0).trace(X) is X
    assert state.report().levels[0].traced == ({PARTS_COMPILED} if is_noted else set())


def test_of_ldms_blocks_the_inner_method_is_wrapped():
    """LDM's gradient checkpoint calls it."""
    names = [WholeBlockSite(find_blocks(build())[0].block, None, "b.1", 0).name for build in (ldm_sd1, sd15)]
    assert names == ["_forward", "forward"]


def block_in(call: ModelCall, forward: Any = None) -> Part:
    """A block with its wrap, in a call. forward: what it runs."""
    block = Part()
    if forward is not None:
        block.forward = forward
    wraps = SimpleNamespace(calls=SimpleNamespace(current=call), call_outside_forward=lambda: None)
    BlockInputSite(block, wraps, 0).install()
    return block


@torch.no_grad()
@pytest.mark.parametrize("args, kwargs, why", [
    ((X,), {}, ""), ((), {"hidden_states": X}, ""), ((X[:, 1:],), {}, NO_GRID), ((X[0],), {}, ARGUMENTS),
    ((None,), {}, ARGUMENTS)])
def test_parts_merge_by_their_blocks_input_while_it_runs(args, kwargs, why):
    call = begin()
    outer, inside = call.block, []
    block_in(call, lambda *args, **kwargs: inside.append(call.block))(*args, **kwargs)
    (seen,) = inside
    assert why in seen if why else (seen.x is X and seen is not outer)
    assert call.block is outer and not call.state.report().reasons, "its parts say so"


class Cancelled(Exception):
    """Another program's interrupt."""


@torch.no_grad()
def test_an_error_of_others_while_a_blocks_input_is_read_passes(monkeypatch):
    monkeypatch.setattr(BlockInputSite, "_input_of", Mock(side_effect=Cancelled))
    with pytest.raises(Cancelled):
        block_in(begin())(X)
