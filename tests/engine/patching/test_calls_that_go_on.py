"""A call is what it was when it began: who patches meanwhile, or calls the model again, changes later ones.

Nothing here is left to luck: a hook in the middle of a call lets the others act, and waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tome_core
from tests.families import MODELS, Family
from tests.models import on_small
from tests.traces import is_idle
from tome_core import MergeConfig

BALANCED, LESS = on_small("balanced"), MergeConfig(ratio=0.3, max_downsample=8)
TOMESD = MergeConfig(ratio=0.5, merge_mlp=True, proportional=False)
LONG = 60  # nothing takes so long; the thread that acts ends long before
# a place in the first block, after its first attention, and in an attention, of either kind of model
PLACES = {
    "sd15": ("down_blocks.0.attentions.0.transformer_blocks.0.attn2",
             "mid_block.attentions.0.transformer_blocks.0.attn1.to_k"),
    "Flux": ("single_transformer_blocks.0", "single_transformer_blocks.1.attn.to_k"),
}  # fmt: skip

at_every_place = pytest.mark.parametrize(
    ("one", "place"), [(MODELS[name], place) for name, places in PLACES.items() for place in places],
    ids=lambda it: getattr(it, "name", it),
)  # fmt: skip


def merged(one: Family, config: MergeConfig, **call: Any) -> torch.Tensor:
    """The picture of a fresh model with a patch that has seen no other."""
    model = one.build()
    with tome_core.patch(model, config):
        return one.call(model, **call)


def once_in(model: nn.Module, place: str, work: Callable[[], Any]) -> None:
    """At the next call of the module at this place, before it, do some work."""

    def hook(*_: Any) -> None:
        handle.remove()
        work()

    handle = model.get_submodule(place).register_forward_pre_hook(hook)


def meanwhile(model: nn.Module, place: str, work: Callable[[], Any]) -> list[BaseException | None]:
    """The same in another thread, which is waited for. Returns what it raised, None if it did not, once it has run."""
    ended: list[BaseException | None] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    def run() -> None:
        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        thread.join(LONG)

    once_in(model, place, run)
    return ended


@at_every_place
@pytest.mark.parametrize("config", [BALANCED, TOMESD], ids=["balanced", "tomesd"])
def test_a_call_that_began_without_a_patch_ends_without_it(one: Family, place: str, config: MergeConfig):
    model = one.build()
    plain, handles = one.call(model), []
    ended = meanwhile(model, place, lambda: handles.append(tome_core.patch(model, config)))
    assert torch.equal(one.call(model), plain) and ended == [None]
    assert torch.equal(one.call(model), merged(one, config)) and handles[0].report().calls == 1
    handles[0].remove()
    assert torch.equal(one.call(model), plain)


@at_every_place
def test_a_call_keeps_its_settings_while_another_patch_of_the_same_parts_is_put_on(one: Family, place: str):
    model = one.build()
    first = tome_core.patch(model, BALANCED)
    ended = meanwhile(model, place, lambda: tome_core.patch(model, LESS))
    assert torch.equal(one.call(model), merged(one, BALANCED)) and ended == [None]
    assert torch.equal(one.call(model), merged(one, LESS)) and first.report().calls == 1


@at_every_place
@pytest.mark.parametrize("before, after", [(BALANCED, None), (TOMESD, None), (TOMESD, BALANCED), (BALANCED, TOMESD)],
                         ids=["removed", "tomesd's removed", "from tomesd's", "to tomesd's"])  # fmt: skip
def test_a_call_whose_patch_goes_ends_and_the_next_one_is_of_what_is_on(one: Family, place: str, before, after):
    """Nothing waits for it; what it had not reached yet merges no more."""
    model = one.build()
    handle = tome_core.patch(model, before)
    work = handle.uninstall if after is None else lambda: tome_core.patch(model, after)
    ended = meanwhile(model, place, work)
    assert one.call(model).isfinite().all() and ended == [None] and is_idle(handle)
    expected = one.call(one.build()) if after is None else merged(one, after)
    assert torch.equal(one.call(model), expected)


@pytest.mark.parametrize("inner", [{}, {"timestep": 900}], ids=["the same", "at another time"])
@pytest.mark.parametrize("config", [BALANCED, TOMESD], ids=["balanced", "tomesd"])
@at_every_place
def test_a_model_called_again_inside_of_its_own_call_gives_both_pictures(one: Family, place: str, config, inner: dict):
    """As hooks do that look at the same picture once more: reference-only, perturbed guidance."""
    alone = merged(one, config), merged(one, config, **inner)
    model, found = one.build(), []
    with tome_core.patch(model, config):
        once_in(model, place, lambda: found.append(one.call(model, **inner)))
        found.append(one.call(model))
    assert torch.equal(found[1], alone[0]) and torch.equal(found[0], alone[1])
