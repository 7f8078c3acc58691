"""Random graphs of ComfyUI's: clones, ApplyToMe and RemoveToMe in any order, and the branches sampled in turn.

A branch that does not merge draws the model's own picture, nothing of ours is on the model afterwards, and a graph that
is drawn again gives the same bits.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from comfy_nodes.nodes import ApplyToMe, RemoveToMe, ToMePreview
from tests.comfy_doubles import Guider, ModelPatcher, apply, checkpoint, least_checkpoint
from tests.random_settings import WRONG, node_values
from tests.thoroughness import THOROUGH
from tests.traces import traces

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("server")]
SEED = 1  # of all graphs: another one gives others
SIZES = ((8, 8), (8, 8), (8, 12), (4, 4), (16, 16), (2, 6))
GROWTH = ("clone", "apply", "apply", "strength", "wrong", "remove", "wrapper", "preview")
Branch = tuple[ModelPatcher, bool]  # may it merge?


@pytest.fixture(scope="module")
def loaded() -> list[Any]:
    """Two models that all graphs share, as in a process."""
    return [least_checkpoint().model, checkpoint().model]


def grown(dice: random.Random, branch: Branch) -> Branch:
    """One more branch."""
    (patcher, merges), kind = branch, dice.choice(GROWTH)
    print(kind)
    if kind == "clone":
        return patcher.clone(), merges
    if kind == "apply":
        values = node_values(dice) | ({"only_if_it_pays": False} if dice.random() < 0.8 else {})
        return apply(patcher, str(dice.randint(5, 6)), **values), True
    if kind in ("strength", "wrong"):
        strength = dice.random() if kind == "strength" else dice.choice(WRONG)
        return ApplyToMe().apply(patcher, strength=strength, unique_id="5")[0], True
    if kind == "remove":
        return RemoveToMe().remove(patcher)[0], False
    if kind == "wrapper":
        patcher = patcher.clone()
        patcher.add_wrapper_with_key(dice.choice(("outer_sample", "apply_model")), "theirs",
                                     lambda executor, *args, **kwargs: executor(*args, **kwargs))  # fmt: skip
    else:
        ToMePreview().preview(patcher, latent={"samples": torch.zeros(1, 4, 8, 8)}, unique_id="9")
    return patcher, merges


def sample(dice: random.Random, branch: Branch, loaded: list[Any]) -> list[torch.Tensor]:
    """One picture; none if the sampling is stopped in the middle."""
    patcher, merges = branch
    # a merged checkpoint, or one that is loaded anew: another model than the branch was made for
    model = dice.choice(loaded) if dice.random() < 0.1 else patcher.model
    call = {"steps": dice.randint(1, 3), "batch": dice.randint(1, 2), "size": dice.choice(SIZES),
            "seed": dice.randrange(3)}  # fmt: skip
    stopped_at = dice.randrange(3) if dice.random() < 0.1 else None
    print(f"sample {call}, stop at {stopped_at}")

    def stop(step: int) -> None:
        if step == stopped_at:
            raise InterruptedError

    plain = Guider(ModelPatcher(model)).sample(**call)
    try:
        out = Guider(patcher, model).sample(stop=stop, **call)
    except InterruptedError:
        return []
    assert out.shape == plain.shape and out.isfinite().all()
    assert merges or torch.equal(out, plain), "a branch without merging draws another picture"
    return [out]


def drawn(dice: random.Random, loaded: list[Any]) -> list[torch.Tensor]:
    """The pictures of a graph."""
    branches: list[Branch] = [(ModelPatcher(dice.choice(loaded)), False)]
    for _ in range(dice.randint(2, 7)):
        branches.append(grown(dice, dice.choice(branches)))
    return [picture for _ in range(dice.randint(1, 4)) for picture in sample(dice, dice.choice(branches), loaded)]


@pytest.mark.parametrize("number", range(1000 if THOROUGH else 20))
def test_branches_of_a_graph_keep_apart_and_leave_nothing(number: int, loaded: list[Any]):
    before, generator = [traces(model) for model in loaded], torch.get_rng_state()
    pictures = [drawn(random.Random(f"{SEED} {number}"), loaded) for _ in range(2)]
    assert all(map(torch.equal, *pictures)) and torch.equal(torch.get_rng_state(), generator)
    assert [traces(model) for model in loaded] == before
