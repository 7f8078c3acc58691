"""Random sessions with one UNet, drawn beforehand. A control makes the same calls without merging: what raises does so
there too, or names the wrong value; pictures are finite; in the end the model is as it was."""

from __future__ import annotations

import copy
import functools
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from torch import nn

import tome_core
from tests.small_models.unets import CASES, Family, inputs
from tests.thoroughness import THOROUGH
from tests.watching.traces import traces
from tome_core import PRESETS, MergeConfig, describe_settings, preset
from tome_core.models.unet_blocks import find_unet

pytestmark = pytest.mark.slow
DTYPES = {torch.float32: 15, torch.bfloat16: 3, torch.float16: 2, torch.float64: 1}
SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 9, 10, 12, 12, 16, 20)
MOST_TOKENS = 512  # of a batch: longer tests find no more
MODES = {"no_grad": 60, "inference": 15, "autocast": 7}
EVENTS = {"call": 40, "patch": 8, "change": 9, "tell": 9, "throw": 3}
DESCRIBED = {setting["name"]: setting for setting in describe_settings()}
WRONG = (-1, 2**70, float("nan"), float("inf"), "x", "", None, [], {}, (1,), 1e300, True, b"", object())


def weighted(dice: random.Random, weights: dict[Any, int]) -> Any:
    return dice.choices(tuple(weights), tuple(weights.values()))[0]


def any_value(dice: random.Random, setting: dict[str, Any]) -> Any:
    """Any value in the setting's range, even if it does not go with other settings."""
    if "choices" in setting:
        return dice.choice(setting["choices"])
    if isinstance(setting["default"], bool):
        return dice.random() < 0.5
    if setting["default"] is None and dice.random() < 0.5:
        return None
    low, high = setting["minimum"], setting["maximum"]
    return dice.randint(low, high) if isinstance(setting["step"], int) else dice.uniform(low, high)


def any_config(dice: random.Random) -> MergeConfig:
    """Half of the settings at random, the rest by default; drawn again if they do not go together."""
    while True:
        names = [name for name in DESCRIBED if dice.random() < 0.5]
        try:
            return MergeConfig(**{name: any_value(dice, DESCRIBED[name]) for name in names})
        except ValueError:
            continue


class Call(NamedTuple):
    """A call of the UNet. mode: how it is made."""

    batch: int
    height: int
    width: int
    timestep: Any
    mode: str = "no_grad"
    seed: int = 0


PROBE = Call(1, 8, 8, 321)


def a_call(dice: random.Random, like: Call | None = None) -> Call:
    """Draw a call, often another step of the last picture."""
    if like is not None and dice.random() < 0.7:
        batch, height, width, seed = like.batch, like.height, like.width, like.seed
    else:
        height, width, seed = dice.choice(SIDES), dice.choice(SIDES), dice.randrange(5)
        batch = min(dice.choice((1, 1, 2, 2, 2, 3, 4, 5, 8)), max(1, MOST_TOKENS // (height * width)))
    time = dice.choice((0, 1, 999, dice.randrange(1000), dice.uniform(0, 999)))
    each = torch.tensor([dice.randrange(1000) for _ in range(batch)])  # a time for each sample
    timestep = dice.choice((time, time, torch.tensor(int(time)), torch.tensor([float(time)] * batch), each))
    return Call(batch, height, width, timestep, weighted(dice, MODES), seed)


def a_wish(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw a step that requests merging, with its settings."""
    pays = {"only_if_it_pays": False} if dice.random() < 0.8 else {}
    if dice.random() < 0.1:
        return "patch_wrongly", {**pays, dice.choice([*DESCRIBED]): dice.choice(WRONG)}
    configs = any_config(dice), preset(dice.choice(PRESETS)), tome_core.strength(dice.random())
    return "patch", {"config": replace(dice.choice(configs), **pays)}


def a_time(dice: random.Random) -> dict[str, Any]:
    time = dice.choice(({"percent": dice.random()}, {"timestep": dice.uniform(0, 999)}, {"sigma": dice.uniform(0, 15)}))
    return dice.choice(({}, {**time, "sampling": dice.choice((None, "a", "b")), "pictures": dice.choice((None, 1, 2))}))


def a_session(dice: random.Random) -> list[tuple[str, Any]]:
    """Draw a session: names of methods of `Stage`, each with its argument."""
    call = a_call(dice)
    steps = [a_wish(dice), ("call", call)]
    for _ in range(dice.randint(1, 5)):
        kind, number = weighted(dice, EVENTS), dice.randrange(48)
        if kind == "call":
            call = a_call(dice, call)
        drawn = {"call": call, "tell": a_time(dice), "throw": (number, call)}
        steps.append(a_wish(dice) if kind == "patch" else (kind, drawn.get(kind, number)))
    return [*steps, ("leave", dice.randrange(2**32)), ("call", PROBE)]


class Stage:
    """A model on which a session runs. outcomes: for each call a picture or an exception."""

    def __init__(self, case: Family, model: nn.Module) -> None:
        self.case, self.model = case, copy.deepcopy(model)
        self.handles: list[Any] = []
        self.outcomes: list[torch.Tensor | Exception] = []

    def run(self, steps: list[tuple[str, Any]]) -> Stage:
        for kind, what in steps:
            getattr(self, kind)(what)
        return self

    def patch(self, settings: dict[str, Any]) -> None:
        self.handles.append(tome_core.patch(self.model, **settings))

    def patch_wrongly(self, settings: dict[str, Any]) -> None:
        """Patch with a wrong value, which may be wrong for some settings alone."""
        try:
            self.patch(settings)
        except (ValueError, TypeError) as error:
            assert any(f"{name}={value!r}" in str(error) for name, value in settings.items()), error

    def change(self, number: int) -> None:
        if number % 4 == 0 or not self.handles:
            tome_core.remove_patch(self.model)
        else:
            handle = self.handles[number % len(self.handles)]
            (handle.install, handle.uninstall, handle.remove)[number % 4 - 1]()

    def tell(self, time: dict[str, Any]) -> None:
        for handle in self.handles[-1:]:
            handle.set_time(**time)

    def call(self, call: Call) -> None:
        try:
            self.outcomes.append(self._drawn(call))
        except Exception as error:
            self.outcomes.append(error)

    def throw(self, what: tuple[int, Call]) -> None:
        """Let a module raise in the next call."""
        number, call = what
        modules = [module for module in find_unet(self.model).modules() if not list(module.children())]
        hook = modules[number * 7919 % len(modules)].register_forward_hook(lambda *_: 1 / 0)
        self.call(call)
        hook.remove()

    def leave(self, seed: int) -> None:
        for handle in random.Random(seed).sample(self.handles, len(self.handles)):
            handle.remove()
        tome_core.remove_patch(self.model)

    def _drawn(self, call: Call) -> torch.Tensor:
        given = inputs(4, call.batch, call.height, call.width, call.seed, self.case.frames)
        x, text = (tensor.to(next(self.model.parameters()).dtype) for tensor in given)
        around = torch.autocast("cpu", torch.bfloat16) if call.mode == "autocast" else nullcontext()
        with torch.inference_mode() if call.mode == "inference" else torch.no_grad(), around:
            return self.case.forward(self.model, x, call.timestep, text)


@functools.cache
def built(case: Family, dtype: torch.dtype) -> nn.Module:
    """The new model, which is copied and never called."""
    model = case.build()
    takes_all = isinstance(model, diffusers.ModelMixin) and case.name != "gligen"  # some inputs are float32
    return model.to(dtype) if takes_all else model


@pytest.fixture(autouse=True)
def _torchs_own_convolutions():
    """oneDNN's convolution in bfloat16 reads memory that nobody wrote, at strides over pictures of 2 columns."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.parametrize("number", range(5000 if THOROUGH else 90))
def test_a_session_ends_in_pictures_or_a_sentence_and_leaves_nothing(number: int):
    dice = random.Random(number)
    case = dice.choice(CASES)
    model, steps = built(case, weighted(dice, DTYPES)), a_session(dice)
    print(case.name, next(model.parameters()).dtype, *steps, sep="\n")
    control = Stage(case, model).run([step for step in steps if step[0] in ("call", "throw")])
    before = torch.get_rng_state(), random.getstate()
    stage = Stage(case, model).run(steps)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    for ours, plain in zip(stage.outcomes, control.outcomes, strict=True):
        if not isinstance(plain, Exception):
            assert not isinstance(ours, Exception), f"it raises, and without merging it does not: {ours!r}"
            assert ours.shape == plain.shape and (ours.isfinite().all() or not plain.isfinite().all())
    assert traces(stage.model) == traces(control.model)
    torch.testing.assert_close(stage.outcomes[-1], control.outcomes[-1], rtol=0, atol=0, equal_nan=True)
    if number % 16 == 0:
        for ours, again in zip(stage.outcomes, Stage(case, model).run(steps).outcomes, strict=True):
            if torch.is_tensor(ours):
                torch.testing.assert_close(ours, again, rtol=0, atol=0, equal_nan=True)
