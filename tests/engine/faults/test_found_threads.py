"""A call is what it was when it began: whoever patches meanwhile, or calls the UNet again, changes later ones.

Nothing here is left to luck: a hook in the middle of a call lets the others act, and waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tome_core
from tests.models import BY_NAME, call_case, on_small, small
from tome_core import MergeConfig

BALANCED = on_small("balanced")
TOGETHER = MergeConfig(ratio=0.5, merge_mlp=True)
run = partial(call_case, BY_NAME["sd15"], batch=1, timestep=100)
A_MOMENT = 0.3  # for what may have to wait for the call that it is asked in
DEADLOCK = 15  # nothing else takes so long; a test that ends does not wait for it


def merged(config: MergeConfig, **call: Any) -> torch.Tensor:
    """The picture of a fresh model with a patch that has seen no other."""
    model = small()
    with tome_core.patch(model, config):
        return run(model, **call)


def once_in(model: nn.Module, place: str, work: Callable[[], Any]) -> None:
    """At the next call of the module at this place, before it, do some work."""

    def hook(*_: Any) -> None:
        handle.remove()
        work()

    handle = model.get_submodule(place).register_forward_pre_hook(hook)


def begin(work: Callable[[], Any]) -> tuple[threading.Event, list[BaseException]]:
    """Do it in another thread, which nobody has to wait for; the event says that it is over, the list what it raised.

    Daemons, because where two of them wait for each other for ever, the process has to end nevertheless.
    """
    over, errors = threading.Event(), []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        over.set()

    threading.Thread(target=guarded, daemon=True).start()
    return over, errors


# --- patching a model that another thread calls ----------------------------------------------------------------------

FIRST = "down_blocks.0.attentions.0"
PLACES = {
    "before its first block": FIRST,
    "in a block": f"{FIRST}.transformer_blocks.0.attn2",
    "in an attention": f"{FIRST}.transformer_blocks.0.attn1.to_k",
    "in its middle": "mid_block",
}


class Meanwhile:
    """Something that another thread does at a place in a call, which waits for it no longer than a moment."""

    def __init__(self, model: nn.Module, place: str, work: Callable[[], Any]) -> None:
        self.work = work
        once_in(model, place, self._begin)

    def _begin(self) -> None:
        self.over, self.errors = begin(self.work)
        self.over.wait(A_MOMENT)

    def end(self) -> None:
        """The call is over, so this has to end too."""
        assert self.over.wait(DEADLOCK)
        assert not self.errors


@pytest.mark.parametrize("config", [BALANCED, TOGETHER], ids=["balanced", "together"])
@pytest.mark.parametrize("place", PLACES)
def test_a_call_that_began_without_a_patch_ends_without_it(place: str, config: MergeConfig):
    model = small()
    plain, handles = run(model), []
    patching = Meanwhile(model, PLACES[place], lambda: handles.append(tome_core.patch(model, config)))
    found = run(model)
    patching.end()
    assert torch.equal(found, plain)
    assert torch.equal(run(model), merged(config)) and handles[0].report().calls == 1
    handles[0].remove()
    assert torch.equal(run(model), plain)


def test_a_call_that_began_with_a_patch_ends_with_it():
    model = small()
    with tome_core.patch(model, BALANCED) as handle:
        going = Meanwhile(model, PLACES["in an attention"], handle.uninstall)
        found = run(model)
        going.end()
        assert not handle.is_installed
    assert torch.equal(found, merged(BALANCED))


def test_a_call_that_began_without_a_patch_sees_none_come_and_go():
    model = small()
    plain = run(model)
    coming = Meanwhile(model, FIRST, lambda: tome_core.patch(model, BALANCED))
    going = Meanwhile(model, "up_blocks.1.attentions.1", lambda: tome_core.remove_patch(model))
    found = run(model)
    coming.end()
    going.end()
    assert torch.equal(found, plain)


@pytest.mark.parametrize("patched_before", [False, True], ids=["unpatched", "patched"])
def test_two_threads_that_patch_each_others_model_inside_of_a_call_both_end(patched_before: bool):
    models, pictures = [small(), small()], {}
    both_inside = threading.Barrier(2)
    for model in models:
        if patched_before:
            tome_core.patch(model, TOGETHER)

    def work(mine: int) -> None:
        def patch_the_others() -> None:
            both_inside.wait(DEADLOCK)
            tome_core.patch(models[1 - mine], BALANCED)

        once_in(models[mine], "mid_block", patch_the_others)
        pictures[mine] = run(models[mine], seed=mine)

    started = [begin(lambda mine=mine: work(mine)) for mine in range(2)]
    for over, errors in started:
        assert over.wait(2 * DEADLOCK), "the threads wait for each other"
        assert not errors
    for mine, model in enumerate(models):
        before = merged(TOGETHER, seed=mine) if patched_before else run(small(), seed=mine)
        assert torch.equal(pictures[mine], before)
        assert torch.equal(run(model, seed=mine), merged(BALANCED, seed=mine))


# --- a call within a call --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, place, size, timestep",
    [(TOGETHER, "in a block", 16, 100), (BALANCED, "in a block", 16, 900), (BALANCED, "in an attention", 16, 900),
     (TOGETHER, "in its middle", 24, 900), (BALANCED, "before its first block", 24, 900)],
    ids=["in a block", "in a block at another time", "in an attention", "in its middle", "before its first block"],
)  # fmt: skip
def test_a_unet_called_again_inside_of_its_own_call_gives_both_pictures(config, place: str, size: int, timestep: int):
    """As hooks do that look at the same picture once more: reference-only, perturbed guidance."""
    inner = {"seed": 3, "height": size, "width": size, "timestep": timestep}
    alone = merged(config), merged(config, **inner)
    model, found = small(), []
    with tome_core.patch(model, config):
        once_in(model, PLACES[place], lambda: found.append(run(model, **inner)))
        found.append(run(model))
    assert torch.equal(found[1], alone[0])
    assert torch.equal(found[0], alone[1])


def test_an_ldm_unet_called_again_inside_of_its_own_call_gives_both_pictures():
    case = BY_NAME["ldm_sd1"]
    alone = []
    for seed, timestep in ((0, 100), (3, 900)):
        model = case.build()
        with tome_core.patch(model, BALANCED):
            alone.append(call_case(case, model, 1, timestep=timestep, seed=seed))
    model, found = case.build(), []
    with tome_core.patch(model, BALANCED):
        once_in(model, "middle_block", lambda: found.append(call_case(case, model, 1, timestep=900, seed=3)))
        found.append(call_case(case, model, 1, timestep=100))
    assert torch.equal(found[1], alone[0]) and torch.equal(found[0], alone[1])
