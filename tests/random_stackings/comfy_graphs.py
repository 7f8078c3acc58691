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
from tests.random_stackings.drawing import WRONG
from tests.random_stackings.laws import hold_in_host, hold_to_be_as_before
from tests.random_stackings.sessions import Fault, Thrown
from tests.traces import traces

SIZES = ((8, 8), (8, 8), (8, 12), (4, 4), (16, 16), (2, 6))


def hold(dice: random.Random, repeats: bool) -> Counter:
    """Build a graph, sample its branches, hold it to the laws; raises Fault."""
    return hold_in_host(dice, repeats, lambda *given: _Graph(*given).run())


@functools.cache
def _model(number: int) -> Any:
    """Two checkpoints that all graphs share, as a process has them."""
    return (least_checkpoint, checkpoint)[number]().model


class _Graph:
    def __init__(self, dice: random.Random, patches: pytest.MonkeyPatch, told: list[str]) -> None:
        self.dice, self.server, self.told = dice, Server(), told
        patches.setitem(sys.modules, "server", self.server.module())
        self.models = [_model(0), _model(1)]
        self.branches: list[tuple[ModelPatcher, bool]] = [(ModelPatcher(dice.choice(self.models)), False)]
        self.pictures: list[torch.Tensor] = []

    def run(self) -> tuple[Counter, list[torch.Tensor]]:
        before = [traces(model) for model in self.models]
        for _ in range(self.dice.randint(2, 7)):
            self._grow()
        seen = Counter(self._sample() for _ in range(self.dice.randint(1, 4)))
        hold_to_be_as_before(self.models, before)
        return seen, self.pictures

    def _grow(self) -> None:
        """One more branch. Its mark: may it merge?"""
        dice = self.dice
        patcher, merges = dice.choice(self.branches)
        kind = dice.choice(("clone", "apply", "apply", "strength", "wrong", "remove", "wrapper", "preview"))
        values: dict[str, Any] = {}
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
        self.told.append(f"{len(self.branches)}: {kind} {values}")
        self.branches.append((patcher, merges))

    def _sample(self) -> str:
        dice = self.dice
        number = dice.randrange(len(self.branches))
        patcher, merges = self.branches[number]
        # a merged checkpoint, or one that is loaded anew: another model than the branch was made for
        model = dice.choice(self.models) if dice.random() < 0.1 else patcher.model
        call = {"steps": dice.randint(1, 3), "batch": dice.randint(1, 2), "size": dice.choice(SIZES),
                "seed": dice.randrange(3)}  # fmt: skip
        thrown_at = dice.randrange(3) if dice.random() < 0.1 else None
        self.told.append(f"sample {number} {call}{'' if thrown_at is None else ' and throw'}")

        def stop(step: int) -> None:
            if step == thrown_at:
                raise Thrown

        plain = Guider(ModelPatcher(model)).sample(**call)
        try:
            out = Guider(patcher, model).sample(stop=stop, **call)
        except Thrown:
            return "thrown through"
        self.pictures.append(out)
        if out.shape != plain.shape or not out.isfinite().all():
            raise Fault(f"a picture of {tuple(out.shape)}, finite {bool(out.isfinite().all())}")
        same = torch.equal(out, plain)
        if not merges and not same:
            raise Fault("a branch without merging draws another picture")
        return "sampling as without merging" if same else "merged sampling"
