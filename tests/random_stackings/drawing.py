"""What a case draws: the model, its settings, its calls. Everything is decided before anything runs."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

import tome_core
from tests import models
from tests.models import CASES, ModelCase, inputs
from tests.random_settings import DESCRIBED, any_config
from tests.traces import traces
from tome_core import MergeConfig, preset

FAMILIES = {case.name: case for case in (
    *CASES,
    ModelCase("one head", models.small, models.call_unet),
    ModelCase("four levels", models.four_levels, models.call_unet),
)}  # fmt: skip
DTYPES = {torch.float32: 15, torch.bfloat16: 3, torch.float16: 2, torch.float64: 1}
SIDES = (4, 6, 8, 8, 8, 8, 12, 12, 12, 16, 20)
ODD_SIDES = (1, 2, 3, 5, 7, 9, 10, 11)
MOST_TOKENS = 512  # of a batch: what takes long finds no more
WRONG = (-1, 2**70, float("nan"), float("inf"), "x", "", None, [], {}, (1,), 1e300, True, b"", object())


class Pristine(NamedTuple):
    """A family's model as it is built: copied for each case, never called. left: what `traces` finds on it."""

    model: nn.Module
    left: list
    probe: torch.Tensor


def probed(case: ModelCase, model: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """A small picture, by which two models are told apart."""
    x, text = (one.to(dtype) for one in inputs(case.in_channels, 1, 8, 8, 3, case.frames))
    with torch.no_grad():
        return case.call(model, x, 321, text)


@functools.lru_cache(maxsize=64)
def pristine(name: str, dtype: torch.dtype) -> Pristine:
    """The family's model, in float32 where it cannot be called in another."""
    case = FAMILIES[name]
    model = case.build().to(dtype)
    try:
        return Pristine(model, traces(model), probed(case, copy.deepcopy(model), dtype))
    except RuntimeError:  # LDM's time, a ControlNet
        return pristine(name, torch.float32)


class Call(NamedTuple):
    """A call of the UNet. mode: how it is made; more: keywords, each a function of the batch that makes a tensor."""

    batch: int
    height: int
    width: int
    timestep: Any
    mode: str
    more: str
    seed: int


MODES = {"no_grad": 60, "inference": 15, "grad": 8, "autocast": 7, "vmap": 3, "functional": 4, "checkpoint": 3}
MORE = {"": 80, "encoder mask": 8, "scale": 5, "attention mask": 2, "class labels": 1, "residuals": 2}


def a_call(dice: random.Random, takes_more: bool, like: Call | None = None) -> Call:
    """Often another step of the picture before. takes_more: keywords that diffusers' UNets have."""
    if like is not None and dice.random() < 0.7:
        batch, height, width, seed = like.batch, like.height, like.width, like.seed
    else:
        sides, seed = ODD_SIDES if dice.random() < 0.2 else SIDES, dice.randrange(5)
        height, width = dice.choice(sides), dice.choice(sides)
        height = width if dice.random() < 0.4 else height
        batch = min(dice.choice((1, 1, 2, 2, 2, 3, 4, 5, 8)), max(1, MOST_TOKENS // (height * width)))
    return Call(batch, height, width, a_timestep(dice, batch), weighted(dice, MODES),
                weighted(dice, MORE) if takes_more else "", seed)


def a_timestep(dice: random.Random, batch: int) -> Any:
    """A number, a tensor of it, or one for each sample."""
    time = dice.choice((0, 1, 999, dice.randrange(1000), dice.uniform(0, 999)))
    kind = dice.choice(("number", "number", "tensor", "float tensor", "of each", "different"))
    if kind == "number":
        return time
    if kind == "tensor":
        return torch.tensor(int(time))
    if kind == "float tensor":
        return torch.tensor(float(time))
    return torch.tensor([int(time) if kind == "of each" else dice.randrange(1000) for _ in range(batch)])


def weighted(dice: random.Random, weights: dict[Any, int]) -> Any:
    """One of the keys."""
    return dice.choices(tuple(weights), tuple(weights.values()))[0]


class Wish(NamedTuple):
    """What is asked to merge, and by which door. is_right: no error may come of it."""

    door: str
    settings: Any
    is_right: bool = True

    def put_on(self, model: nn.Module) -> Any:
        """The handle."""
        if self.door == "apply_patch":
            tome_core.apply_patch(model, **self.settings)
            return None
        if self.door == "keywords":
            return tome_core.patch(model, **self.settings)
        return tome_core.patch(model, self.settings)


def a_wish(dice: random.Random) -> Wish:
    """Settings of any kind; one in twelve has a value that is none, or does not go with another."""
    pays = {"only_if_it_pays": False} if dice.random() < 0.8 else {}
    door = weighted(dice, {"config": 40, "preset": 25, "strength": 10, "apply_patch": 6, "wrong": 8})
    if door == "config":
        return Wish("config", replace(any_config(dice, dice.randint(1, 2)), **pays))
    if door == "preset":
        return Wish("config", replace(preset(dice.choice(("quality", "balanced", "fast", "max"))), **pays))
    if door == "strength":
        return Wish("keywords", {"strength": dice.random(), **pays})
    if door == "apply_patch":
        return Wish(door, {"ratio": dice.random(), "sx": dice.randint(1, 4), "max_downsample": dice.choice((1, 8)),
                           "merge_mlp": dice.random() < 0.5, "merge_crossattn": dice.random() < 0.5})  # fmt: skip
    return Wish("keywords", {**pays, dice.choice(tuple(DESCRIBED)): dice.choice(WRONG)}, is_right=False)


def as_text(config: Any) -> str:
    """What of a config is not as it is by default."""
    if not isinstance(config, MergeConfig):
        return repr(config)
    plain = MergeConfig()
    changed = {name: config.value(name) for name in DESCRIBED if config.value(name) != plain.value(name)}
    told = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    return f"MergeConfig({told}; {len(config.rules)} rules)"
