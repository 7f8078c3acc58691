"""Parts of blocks on merged tokens, as in tomesd, and others' processors and classes in them: these get all tokens."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tome_core
from tests.beside.models import Beside
from tests.beside.things import another_class, hook
from tests.beside.things_below import PROCESSORS, KeysOfTheFirst, Masking, Own
from tests.thoroughness import some_quick

ALL = {"max_downsample": 8, "use_rand": False, "merge_crossattn": True, "merge_mlp": True}
ATTENTIONS = {"attn1": ("attn", "merge_attn"), "attn2": ("crossattn", "merge_crossattn")}
PARTS = ATTENTIONS | {"ff": ("mlp", "merge_mlp")}
in_each_order = pytest.mark.parametrize("comes_first", some_quick([False, True]), ids=["after us", "before us"])


def draw_merged(beside: Beside, between: Callable[[], Any] = list, **off: bool) -> tuple[torch.Tensor, Any]:
    """Draw with all parts merged tomesd's way, but for what is `off`; `between` runs after the patch was put on."""
    tome_core.apply_patch(beside.whole, **ALL | off)
    between()
    try:
        return beside.draw(), tome_core.report(beside.whole)
    finally:
        tome_core.remove_patch(beside.whole)


def assert_runs_whole(beside: Beside, path: str, put_on: Callable[[nn.Module], Any], comes_first: bool) -> Any:
    """A thing on this part of all blocks: the part runs on all tokens, the thing's effect stays, the others merge."""
    part, setting = PARTS[path]
    plain, merged = beside.draw(), draw_merged(beside, **{setting: False})[0]

    def on_all() -> None:
        for block in beside.blocks.values():
            put_on(block.get_submodule(path))

    if comes_first:
        on_all()
    picture, report = draw_merged(beside, list if comes_first else on_all)
    assert torch.equal(picture, draw_merged(beside, **{setting: False})[0]), "as if its part did not merge"
    effect, left = ((its - without).norm() / without.norm() for its, without in (
        (beside.draw(), plain), (picture, merged)))  # fmt: skip
    assert left > effect / 2 > 0.01, "it works on; the parts that merge change it a little"
    assert {kind for level in report.levels for kind, *_ in level.merged} == {"attn", "crossattn", "mlp"} - {part}
    assert sum(report.reasons.values()) == sum(level.blocks for level in report.levels) * len(plain)
    return report


@pytest.mark.parametrize("name", some_quick(["sd15", "sdxl", "sd2"]))
@pytest.mark.parametrize("path", ATTENTIONS)
@pytest.mark.parametrize("kind", some_quick(sorted(PROCESSORS, key=(Masking, KeysOfTheFirst).__contains__)[::-1], 2))
@in_each_order
def test_a_processor_of_others_gets_all_tokens_and_is_named(comes_first: bool, kind: type[Own], path: str, name: str):
    """One that looks its mask up by the number of tokens, one that shares keys over the batch, and others."""
    beside, own = Beside(name), kind()
    report = assert_runs_whole(beside, path, lambda part: part.set_processor(own), comes_first)
    own.seen, expected = [], own.seen[: len(own.seen) // 3]
    beside.draw()
    assert own.seen == expected, "as many tokens, as often as without us"
    assert list(report.reasons) == [f"{PARTS[path][0]}: {kind.__module__}.{kind.__name__} at {path} may need every "
                                    "token; it merges without that"]  # fmt: skip


@pytest.mark.parametrize("name", some_quick(["ldm", "sd15", "sdxl"], 2))
@pytest.mark.parametrize("path", PARTS)
@in_each_order
def test_a_part_of_a_class_of_others_gets_all_tokens_and_is_named(comes_first: bool, path: str, name: str):
    """The class of a block tells which code is known, not the class of the part."""
    report = assert_runs_whole(Beside(name), path, another_class, comes_first)
    (why,) = report.reasons
    assert re.fullmatch(rf"\w+: tests\.beside\.things\.Another\w+ at {path} may need every token; it .*", why)


@pytest.mark.parametrize("name", some_quick(["ldm", "sd15"]))
@pytest.mark.parametrize("path", PARTS)
@in_each_order
def test_a_hook_on_a_part_sees_all_tokens_and_is_named_with_its_place(comes_first: bool, path: str, name: str):
    report = assert_runs_whole(Beside(name), path, hook, comes_first)
    (why,) = report.reasons
    assert f": a hook on {path} may need every token" in why and why.endswith("it merges without that")
