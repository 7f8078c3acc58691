"""A random graph of ComfyUI's: clones, ApplyToMe and RemoveToMe in any order, and its branches sampled in turn."""

from __future__ import annotations

import functools
import random
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from comfy_nodes.nodes import ApplyToMe, RemoveToMe, ToMePreview
from tests.comfy_doubles import Guider, ModelPatcher, Server, apply, checkpoint, least_checkpoint
from tests.random_settings import node_values
from tests.random_stackings.laws import first_difference
from tests.random_stackings.sessions import WRONG, Fault, Thrown
from tests.traces import traces

SIZES = ((8, 8), (8, 8), (8, 12), (4, 4), (16, 16), (2, 6))
GROWTH = ("clone", "apply", "apply", "strength", "wrong", "remove", "wrapper", "preview")
Branch = tuple[ModelPatcher, bool]  # may it merge?


@functools.cache
def _models() -> list[Any]:
    """Two checkpoints that all graphs share, as a process has them."""
    return [least_checkpoint().model, checkpoint().model]


def hold(dice: random.Random, repeats: bool) -> Counter:
    """Build a graph, sample its branches, hold it to the laws; raises Fault."""
    state, generator, pictures = dice.getstate(), torch.get_rng_state(), []
    for _ in range(1 + repeats):
        dice.setstate(state)
        notes: list[str] = []
        try:
            with pytest.MonkeyPatch.context() as patches:
                patches.setitem(sys.modules, "server", Server().module())
                seen, drawn = _run(dice, notes)
            pictures.append(drawn)
            if not all(map(torch.equal, pictures[0], drawn)):
                raise Fault("other bits when it is drawn again")
            if not torch.equal(torch.get_rng_state(), generator):
                raise Fault("the random generator was used")
        except Exception as error:
            raise Fault(f"{type(error).__name__}: {error}\n" + "\n".join(notes)) from error
    return seen


def _run(dice: random.Random, notes: list[str]) -> tuple[Counter, list[torch.Tensor]]:
    before = [traces(model) for model in _models()]
    branches: list[Branch] = [(ModelPatcher(dice.choice(_models())), False)]
    for _ in range(dice.randint(2, 7)):
        branches.append(_grown(dice, dice.choice(branches), notes))
    seen, pictures = Counter(), []
    for _ in range(dice.randint(1, 4)):
        seen[_sample(dice, dice.choice(branches), notes, pictures)] += 1
    for model, left in zip(_models(), before, strict=True):
        if traces(model) != left:
            raise Fault(f"left on the model: {first_difference(left, traces(model))}")
    return seen, pictures


def _grown(dice: random.Random, branch: Branch, notes: list[str]) -> Branch:
    """One more branch."""
    (patcher, merges), kind, values = branch, dice.choice(GROWTH), {}
    if kind == "clone":
        patcher = patcher.clone()
    elif kind == "apply":
        values = node_values(dice) | ({"only_if_it_pays": False} if dice.random() < 0.8 else {})
        patcher, merges = apply(patcher, str(dice.randint(5, 6)), **values), True
    elif kind in ("strength", "wrong"):
        values = {"strength": dice.random() if kind == "strength" else dice.choice(WRONG)}
        patcher, merges = ApplyToMe().apply(patcher, unique_id="5", **values)[0], True
    elif kind == "remove":
        patcher, merges = RemoveToMe().remove(patcher)[0], False
    elif kind == "wrapper":
        patcher = patcher.clone()
        patcher.add_wrapper_with_key(dice.choice(("outer_sample", "apply_model")), "theirs",
                                     lambda executor, *args, **kwargs: executor(*args, **kwargs))  # fmt: skip
    else:
        ToMePreview().preview(patcher, latent={"samples": torch.zeros(1, 4, 8, 8)}, unique_id="9")
    notes.append(f"{kind} {values}")
    return patcher, merges


def _sample(dice: random.Random, branch: Branch, notes: list[str], pictures: list[torch.Tensor]) -> str:
    patcher, merges = branch
    # a merged checkpoint, or one that is loaded anew: another model than the branch was made for
    model = dice.choice(_models()) if dice.random() < 0.1 else patcher.model
    call = {"steps": dice.randint(1, 3), "batch": dice.randint(1, 2), "size": dice.choice(SIZES),
            "seed": dice.randrange(3)}  # fmt: skip
    thrown_at = dice.randrange(3) if dice.random() < 0.1 else None
    notes.append(f"sample {call}, throw at {thrown_at}")

    def stop(step: int) -> None:
        if step == thrown_at:
            raise Thrown

    plain = Guider(ModelPatcher(model)).sample(**call)
    try:
        out = Guider(patcher, model).sample(stop=stop, **call)
    except Thrown:
        return "thrown through"
    pictures.append(out)
    if out.shape != plain.shape or not out.isfinite().all():
        raise Fault(f"a picture of {tuple(out.shape)}, finite {bool(out.isfinite().all())}")
    is_plain = torch.equal(out, plain)
    if not merges and not is_plain:
        raise Fault("a branch without merging draws another picture")
    return "sampling as without merging" if is_plain else "merged sampling"
