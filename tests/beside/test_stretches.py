"""Blocks that run together on merged tokens, and what others do below them, between them and with their lists."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tome_core
from tests.beside.laws import EQUAL, SETTINGS, far, merged, merged_alone, settings_of
from tests.beside.models import STRETCHED, TIMES, Beside
from tests.beside.things_below import PARTS, PROCESSORS, below, blocks_of
from tests.small_models.dits import WORDS
from tests.small_models.unets import merge_with_self
from tests.thoroughness import some_quick
from tome_core import MergeConfig

SDXL, LDM = STRETCHED[:2]
AS_TOMESD = {"ratio": 0.5, "proportional": False, "use_rand": False, "merge_crossattn": True, "merge_mlp": True}
each_model = pytest.mark.parametrize("name", some_quick(STRETCHED))
_QUICK = ("norm1", "attn1", "attn1.to_q", "attn2.to_out.0", "ff.net.2")
each_part = pytest.mark.parametrize("path", some_quick(sorted(PARTS, key=lambda path: path not in _QUICK), len(_QUICK)))
in_each_order = pytest.mark.parametrize("comes_first", some_quick([False, True]), ids=["after us", "before us"])


@contextmanager
def patched(beside: Beside, put_on: Callable[[], Any], comes_first: bool) -> Iterator[Any]:
    """Our patch and a thing on a model; if the thing comes last, a call is between."""
    if comes_first:
        put_on()
    with tome_core.patch(beside.whole, **SETTINGS) as handle:
        if not comes_first:
            beside.draw(TIMES[:1])
            handle.reset_counts()
            put_on()
        yield handle


def reasons_for_blocks(handle: Any) -> list[str]:
    return [why for why in handle.report().reasons if why.startswith("block: ")]


@pytest.mark.parametrize("name", STRETCHED)
def test_later_blocks_of_these_models_merge(name: str):
    beside = Beside(name)
    with tome_core.patch(beside.whole, **SETTINGS) as handle:
        assert merged(beside, handle).few == set(beside.later)
    assert handle.report().levels[-1].block_tokens and not reasons_for_blocks(handle)


# --- below blocks -----------------------------------------------------------------------------------------------------

def assert_runs_as_without_us(beside: Beside, put_on: Callable[[], Any], comes_first: bool, seen: list[int]) -> Any:
    """A thing on all later blocks, which notes numbers of tokens in `seen`, gets all tokens, as often as without us."""
    with patched(beside, put_on, comes_first) as handle:
        with handle.unmerged():
            beside.draw(TIMES[:1])
        expected = seen.copy()
        seen.clear()
        picture = beside.draw(TIMES[:1])
    assert expected and seen == expected, f"{set(seen)} tokens, or other calls"
    assert reasons_for_blocks(handle)
    return picture, handle


@each_model
@each_part
@in_each_order
def test_hooks_below_blocks_see_all_tokens_and_are_named(comes_first: bool, path: str, name: str):
    beside, seen = Beside(name), []

    def put_on() -> None:
        for part in below(path)(beside):
            part.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))

    picture, handle = assert_runs_as_without_us(beside, put_on, comes_first, seen)
    assert far(picture, merged_alone(name, whole=frozenset(beside.later)).pictures[:1]) < EQUAL
    whys = reasons_for_blocks(handle)
    assert any(re.search(rf"(?<!\w){re.escape(path)}(?!\.?\w)", why) for why in whys), whys


@each_model
def test_a_hook_on_one_block_forbids_other_transformers_nothing(name: str):
    beside = Beside(name)
    path, block = next(iter(beside.later.items()))
    block.ff.register_forward_hook(lambda *_: None)
    with tome_core.patch(beside.whole, **SETTINGS) as handle:
        few = merged(beside, handle).few
    siblings = {other for other in beside.later if other.startswith(path.rpartition(".")[0])}
    assert path not in few and set(beside.later) - siblings <= few and reasons_for_blocks(handle)


@pytest.mark.parametrize("name", some_quick([SDXL, "sdxl"]))
@pytest.mark.parametrize("part", some_quick(["attn1", "attn2"]))
@pytest.mark.parametrize("kind", PROCESSORS)
@in_each_order
def test_processors_run_as_often_as_without_us_and_get_all_tokens(comes_first: bool, kind: type, part: str, name: str):
    beside, own = Beside(name), kind()

    def put_on() -> None:
        for attention in below(part)(beside):
            attention.set_processor(own)

    assert_runs_as_without_us(beside, put_on, comes_first, own.seen)


# --- lists of blocks --------------------------------------------------------------------------------------------------

class Between(nn.Module):
    """A block, and what a program does to its tokens by their place."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.block(x, *args, **kwargs) * torch.linspace(0.5, 1.5, x.shape[1])[:, None]


class Mean(nn.Module):
    """The mean of what blocks return, which run one after the other."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        outs = [x]
        for block in self.blocks:
            outs.append(block(outs[-1], *args, **kwargs))
        return torch.stack(outs).mean(0)


LISTS = {
    "without the last": lambda blocks: blocks[:-1],
    "each twice": lambda blocks: [block for block in blocks for _ in range(2)],
    "in reverse": lambda blocks: blocks[::-1],
    "tokens changed between": lambda blocks: [Between(block) for block in blocks],
    "the mean of all": lambda blocks: [Mean(blocks)],
    "without the second": lambda blocks: blocks[:1] + blocks[2:],
    "the last alone": lambda blocks: blocks[-1:],
    "all twice": lambda blocks: blocks * 2,
    "the second for all": lambda blocks: blocks[1:2] * len(blocks),
}


def exchange(transformer: nn.Module, change: Callable) -> None:
    transformer.transformer_blocks = nn.ModuleList(change(list(transformer.transformer_blocks)))


def replace_forward(transformer: nn.Module, change: Callable) -> None:
    """Another list while the transformer runs."""
    saved = transformer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        blocks = transformer.transformer_blocks
        exchange(transformer, change)
        try:
            return saved(*args, **kwargs)
        finally:
            transformer.transformer_blocks = blocks

    transformer.forward = forward


@each_model
@pytest.mark.parametrize("way", some_quick([exchange, replace_forward]))
@pytest.mark.parametrize("change", some_quick(LISTS, 5))
@in_each_order
def test_tokens_come_back_whatever_list_of_blocks_a_parent_runs(comes_first, change: str, way: Callable, name: str):
    assert_tokens_come_back(Beside(name), change, way, comes_first)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("change", some_quick(["in reverse", "tokens changed between", "the second for all"]))
@in_each_order
def test_tokens_come_back_to_compiled_blocks_and_from_them(comes_first: bool, change: str):
    """A compiler cannot read tokens that come back by their first use."""
    beside = Beside(LDM)
    for block in beside.blocks.values():
        block.compile(backend="eager", fullgraph=True)
    assert_tokens_come_back(beside, change, exchange, comes_first)


def assert_tokens_come_back(beside: Beside, change: str, way: Callable, comes_first: bool) -> None:
    """A parent that runs a changed list of blocks has nearly the picture that it has without us."""
    loss = far(merged_alone(beside.name).pictures, Beside(beside.name).draw())

    def put_on() -> None:
        for transformer in beside.deep[1:]:
            way(transformer, LISTS[change])

    with patched(beside, put_on, comes_first) as handle:
        with handle.unmerged():
            expected = beside.draw(TIMES[:1])
        picture = beside.draw(TIMES[:1])
        with pytest.MonkeyPatch.context() as patches:
            merge_with_self(patches)
            same = beside.draw(TIMES[:1])
    assert far(same, expected) < EQUAL, "every token its own group"
    assert far(picture, expected) < 3 * loss
    assert torch.equal(beside.draw(TIMES[:1]), expected), "we left: other bits"


# --- errors -----------------------------------------------------------------------------------------------------------

class Cancelled(Exception):
    """As ComfyUI's interrupt was until 0.3.66."""


ERRORS = [Cancelled("stop"), *map(RuntimeError, (
    "Could not allocate tensor with 123 bytes. There is not enough GPU video memory available!",
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
    "CUDA out of memory. Tried to allocate 9 MiB.", "HIP out of memory. Tried to allocate 9 MiB.",
    "MPS backend out of memory (MPS allocated: 9 GB)", "XPU out of memory. Tried to allocate 9 MiB.",
    "CUDA error: an illegal memory access was encountered", "CUDA error: device-side assert triggered"))]  # fmt: skip
each_error = pytest.mark.parametrize("error", some_quick(ERRORS, 2), ids=str)


class Once:
    """Raises an error at its first call from `armed` on; counts the calls since then."""

    def __init__(self, error: Exception) -> None:
        self.error, self.calls, self.armed = error, 0, False

    def __call__(self, *_: Any) -> None:
        self.calls += self.armed
        if self.armed and self.calls == 1:
            raise self.error

    def watch(self, patches: pytest.MonkeyPatch, module: nn.Module) -> None:
        """Be called before torch computes a layer: the error is torch's, and nothing on the model is anybody's."""

        def watching(function: Callable, *args: Any, **kwargs: Any) -> Any:
            if any(value is module.weight for value in args):
                self()
            return function(*args, **kwargs)

        for name in ("linear", "layer_norm"):
            patches.setattr(F, name, partial(watching, getattr(F, name)))

    def assert_passes(self, beside: Beside) -> None:
        """The error ends the call, nothing runs again, and the next call is as if it had not been."""
        before = beside.draw(TIMES[:1])
        self.calls, self.armed = 0, True
        with pytest.raises(type(self.error), match=re.escape(str(self.error))):
            beside.draw(TIMES[:1])
        assert self.calls == 1, "it ran again"
        self.armed = False
        assert torch.equal(beside.draw(TIMES[:1]), before), "after an error: other bits"


@each_model
@each_part
@pytest.mark.parametrize("number", some_quick([-1, 1]))
def test_an_error_below_a_block_passes(number: int, path: str, name: str, monkeypatch):
    beside = Beside(name)
    part = blocks_of(beside.deep[:1])[number].get_submodule(path)
    with tome_core.patch(beside.whole, **SETTINGS):
        if hasattr(part, "weight"):
            once = Once(Cancelled(path))
            once.watch(monkeypatch, part)
            once.assert_passes(beside)
        once = Once(Cancelled(path))
        part.register_forward_hook(once)
        once.assert_passes(beside)


@each_error
@pytest.mark.parametrize("name, settings, path", [
    (SDXL, SETTINGS, "attn1.to_q"), (SDXL, SETTINGS, "ff.net.2"), ("sd15", AS_TOMESD, "attn1.to_out.0"),
    ("sd15", AS_TOMESD, "attn2.to_q"), ("sd15", AS_TOMESD, "ff.net.2"), ("Wan", settings_of("Wan"), "attn1.to_q"),
    ("Wan", settings_of("Wan"), "ffn.net.2")])  # fmt: skip
def test_an_error_of_a_card_passes_out_of_what_gets_merged_tokens(name, settings, path, error, monkeypatch):
    beside, once = Beside(name), Once(error)
    once.watch(monkeypatch, [*(beside.later or beside.blocks).values()][-1].get_submodule(path))
    with tome_core.patch(beside.whole, **settings):
        once.assert_passes(beside)


@each_error
@pytest.mark.parametrize("name", ["sd15", "Wan"])
def test_an_error_of_a_card_passes_out_of_attention_to_merged_keys(name: str, error: Exception, monkeypatch):
    beside, once, function = Beside(name), Once(error), F.scaled_dot_product_attention

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if key.shape[2] < query.shape[2] and key.shape[2] not in (7, WORDS):  # those are of text
            once()
        return function(query, key, value, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    with tome_core.patch(beside.whole, **settings_of(beside.name)):
        once.assert_passes(beside)


# --- training ---------------------------------------------------------------------------------------------------------

def no_checkpoints(beside: Beside) -> None:
    pass


def checkpoints(beside: Beside) -> None:
    beside.model.train().enable_gradient_checkpointing()


def reentrant_checkpoints(beside: Beside) -> None:
    """Their forward pass has gradients off; they need an input that has one."""
    beside.model.train().enable_gradient_checkpointing(partial(checkpoint, use_reentrant=True))
    beside.model.conv_in.requires_grad_(True)


def ldms_checkpoints(beside: Beside) -> None:
    """Their forward pass has gradients off, and all of a block's parameters have to be trained."""
    for transformer in beside.deep:
        transformer.transformer_blocks[-1].requires_grad_(True).checkpoint = True


@pytest.mark.filterwarnings("ignore:.*autocast.* is deprecated")
@pytest.mark.parametrize("way, name", [
    (no_checkpoints, SDXL), (checkpoints, SDXL), (reentrant_checkpoints, SDXL), (no_checkpoints, LDM),
    (ldms_checkpoints, LDM)])  # fmt: skip
@pytest.mark.parametrize("path", some_quick(["ff.net.2", "attn2.to_v"]))
def test_training_parts_of_later_blocks_runs_them_whole(path: str, name: str, way: Callable):
    beside = Beside(name)
    beside.model.requires_grad_(False)
    for transformer in beside.deep:
        transformer.transformer_blocks[-1].get_submodule(path).requires_grad_(True)
    way(beside)
    trained = [weight for weight in beside.model.parameters() if weight.requires_grad]

    def gradients() -> list[torch.Tensor]:
        beside.model.zero_grad(set_to_none=True)
        beside.call(TIMES[0]).square().mean().backward()
        return [weight.grad for weight in trained]

    expected = gradients()
    rules = tome_core.patch(beside.whole, **SETTINGS).config.rules
    with tome_core.patch(beside.whole, MergeConfig(rules=[rule for rule in rules if rule.merge_blocks])) as handle:
        assert max(map(far, gradients(), expected)) < EQUAL
        assert not handle.report().block_tokens and reasons_for_blocks(handle)
        beside.draw(TIMES[:1])
        assert handle.report().block_tokens, "blocks merge again when nobody trains"
