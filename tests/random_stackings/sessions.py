"""A session with one UNet: patches come, calls are made, patches go, in any order.

Everything is drawn before anything runs; a control runs the same steps without merging. What others put on a model
beside us is drawn in `tests.beside`.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

import tome_core
from tests import models
from tests.models import CASES, ModelCase, inputs
from tests.random_settings import DESCRIBED, any_config
from tests.traces import traces
from tome_core import PRESETS, preset
from tome_core.models.unet_blocks import find_unet

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
MODES = {"no_grad": 60, "inference": 15, "grad": 8, "autocast": 7}
EVENTS = {"call": 40, "merge": 8, "unmerge": 6, "again": 3, "tell": 4, "begin": 5, "end": 3, "throw": 3}


class Fault(AssertionError):
    """A law that a case has broken."""


class Thrown(Exception):
    """What a model throws in mid-call."""


def weighted(dice: random.Random, weights: dict[Any, int]) -> Any:
    """One of the keys."""
    return dice.choices(tuple(weights), tuple(weights.values()))[0]


class Pristine(NamedTuple):
    """A family's model as it is built: copied for each case, never called. left: what `traces` finds on it."""

    model: nn.Module
    left: list
    probe: torch.Tensor


def probed(case: ModelCase, model: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """A small picture, by which two models are told apart."""
    x, text = (tensor.to(dtype) for tensor in inputs(case.in_channels, 1, 8, 8, 3, case.frames))
    with torch.no_grad():
        return case.call(model, x, 321, text)


@functools.lru_cache(maxsize=64)
def pristine(name: str, dtype: torch.dtype) -> Pristine:
    """The family's model, in float32 if it cannot be called in another."""
    case = FAMILIES[name]
    model = case.build().to(dtype)
    try:
        return Pristine(model, traces(model), probed(case, copy.deepcopy(model), dtype))
    except RuntimeError:  # LDM's time
        return pristine(name, torch.float32)


# --- what is done -----------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of the UNet. mode: how it is made."""

    batch: int
    height: int
    width: int
    timestep: Any
    mode: str
    seed: int


def a_call(dice: random.Random, like: Call | None = None) -> Call:
    """Often another step of the picture before."""
    if like is not None and dice.random() < 0.7:
        batch, height, width, seed = like.batch, like.height, like.width, like.seed
    else:
        sides, seed = ODD_SIDES if dice.random() < 0.2 else SIDES, dice.randrange(5)
        height, width = dice.choice(sides), dice.choice(sides)
        batch = min(dice.choice((1, 1, 2, 2, 2, 3, 4, 5, 8)), max(1, MOST_TOKENS // (height * width)))
    time = dice.choice((0, 1, 999, dice.randrange(1000), dice.uniform(0, 999)))
    each = torch.tensor([dice.randrange(1000) for _ in range(batch)])  # a time for each sample
    timestep = dice.choice((time, time, torch.tensor(int(time)), torch.tensor([float(time)] * batch), each))
    return Call(batch, height, width, timestep, weighted(dice, MODES), seed)


def called(case: ModelCase, model: nn.Module, dtype: torch.dtype, call: Call) -> torch.Tensor:
    """The picture; with gradients, the latent's gradient behind it."""
    shape = call.batch, call.height, call.width, call.seed, case.frames
    x, text = (tensor.to(dtype) for tensor in inputs(case.in_channels, *shape))
    if call.mode == "grad":
        out = case.call(model, x.requires_grad_(), call.timestep, text)
        (gradient,) = torch.autograd.grad(out.float().square().sum(), x)
        if out.dtype == torch.float16:  # whose gradients overflow without a scaler
            return out.detach()
        return torch.cat([out.detach(), gradient[:, : out.shape[1]].to(out.dtype)])
    around = torch.autocast("cpu", torch.bfloat16) if call.mode == "autocast" else nullcontext()
    with torch.inference_mode() if call.mode == "inference" else torch.no_grad(), around:
        return case.call(model, x, call.timestep, text)


class Wish(NamedTuple):
    """What is asked to merge, and by which function. is_right: no error may come of it."""

    function: Callable[..., Any]
    settings: dict[str, Any]
    is_right: bool = True


def a_wish(dice: random.Random) -> Wish:
    """Settings of any kind; one in twelve has a value that is none, or does not go with another."""
    pays = {"only_if_it_pays": False} if dice.random() < 0.8 else {}
    kind = weighted(dice, {"config": 40, "preset": 25, "strength": 10, "tomesd's": 6, "wrong": 8})
    if kind == "config":
        return Wish(tome_core.patch, {"config": replace(any_config(dice, dice.randint(1, 2)), **pays)})
    if kind == "preset":
        return Wish(tome_core.patch, {"config": replace(preset(dice.choice([*PRESETS])), **pays)})
    if kind == "strength":
        return Wish(tome_core.patch, {"strength": dice.random(), **pays})
    if kind == "wrong":
        return Wish(tome_core.patch, {**pays, dice.choice([*DESCRIBED]): dice.choice(WRONG)}, is_right=False)
    return Wish(tome_core.apply_patch, {
        "ratio": dice.random(), "sx": dice.randint(1, 4), "max_downsample": dice.choice((1, 8)),
        "merge_mlp": dice.random() < 0.5, "merge_crossattn": dice.random() < 0.5})  # fmt: skip


def a_time(dice: random.Random) -> dict[str, Any]:
    time = dice.choice(({}, {"percent": dice.random()}, {"timestep": dice.uniform(0, 999)},
                        {"sigma": dice.uniform(0, 15)}))  # fmt: skip
    return {**time, "sampling": dice.choice((None, "a", "b")), "pictures": dice.choice((None, 1, 2))} if time else {}


class Session(NamedTuple):
    """steps: names of methods of `Stage`, each with its argument."""

    family: str
    dtype: torch.dtype
    steps: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return "\n  ".join([f"{self.family}, {self.dtype}", *(f"{kind} {what}" for kind, what in self.steps)])


def drawn(dice: random.Random) -> Session:
    """The session of these dice."""
    family, dtype = dice.choice(tuple(FAMILIES)), weighted(dice, DTYPES)
    call = a_call(dice)
    steps = [("merge", a_wish(dice)), ("call", call)]
    for _ in range(dice.randint(1, 5)):
        kind, what = weighted(dice, EVENTS), dice.randrange(8)
        if kind == "call":
            what = call = a_call(dice, call)
        elif kind == "merge":
            what = a_wish(dice)
        elif kind == "tell":
            what = a_time(dice)
        elif kind == "begin":
            what = dice.choice((None, None, 1, 2, call.batch))
        elif kind == "throw":
            what = (what, call)
        steps.append((kind, what))
    steps.append(("leave", dice.randrange(2**32)))
    return Session(family, next(pristine(family, dtype).model.parameters()).dtype, tuple(steps))


# --- a session that runs ----------------------------------------------------------------------------------------------


class Stage:
    """A session that runs on a model as it was built. merges: False in the control.

    outcomes: of each call, a picture or what it raised.
    """

    def __init__(self, session: Session, merges: bool) -> None:
        self.case: ModelCase = FAMILIES[session.family]
        self.model = copy.deepcopy(pristine(session.family, session.dtype).model)
        self.session, self.merges = session, merges
        self.handles: list[Any] = []
        self.scopes: list[Any] = []
        self.outcomes: list[torch.Tensor | Exception] = []
        self.refusals = self.pictures_merged = 0

    def run(self) -> Stage:
        """All steps."""
        for kind, what in self.session.steps:
            getattr(self, f"_{kind}")(what)
        return self

    def _merge(self, wish: Wish) -> None:
        if not self.merges:
            return
        try:
            handle = wish.function(self.model, **wish.settings)
        except (ValueError, TypeError) as error:
            text = str(error)
            if wish.is_right or not any(f"{name}={value!r}" in text for name, value in wish.settings.items()):
                raise Fault(f"refused without naming what is wrong: {type(error).__name__}: {text}") from error
            self.refusals += 1
        else:
            self.handles += [handle] if wish.function is tome_core.patch else []

    def _unmerge(self, number: int) -> None:
        handle = self.handles[number % len(self.handles)] if self.handles else None
        if self.merges and (number % 4 == 0 or handle is None):
            tome_core.remove_patch(self.model)
        elif handle is not None:
            handle.uninstall() if number % 4 == 1 else handle.remove()

    def _again(self, number: int) -> None:
        if self.handles:
            self.handles[number % len(self.handles)].install()

    def _tell(self, time: dict[str, Any]) -> None:
        for handle in self.handles[-1:]:
            handle.set_time(**time)

    def _begin(self, pictures: int | None) -> None:
        for handle in self.handles[-1:]:
            self.scopes.append(handle.sampling(pictures))
            self.scopes[-1].__enter__()

    def _end(self, number: int = 0) -> None:
        if self.scopes:
            self.scopes.pop().__exit__(None, None, None)

    def _call(self, call: Call) -> None:
        try:
            out: Any = called(self.case, self.model, self.session.dtype, call)
        except Exception as error:
            out = error
        self.outcomes.append(out)

    def _throw(self, what: tuple[int, Call]) -> None:
        """Some module throws in the next call."""
        number, call = what
        modules = [module for module in find_unet(self.model).modules() if not list(module.children())]

        def throw(*_: Any) -> None:
            raise Thrown

        hook = modules[number * 7919 % len(modules)].register_forward_hook(throw)
        self._call(call)
        hook.remove()

    def _leave(self, seed: int) -> None:
        """All patches go, in any order."""
        self.pictures_merged = sum(handle.report().merged_anything for handle in self.handles)
        while self.scopes:
            self._end()
        for handle in random.Random(seed).sample(self.handles, len(self.handles)):
            handle.remove()
        if self.merges:
            tome_core.remove_patch(self.model)

    def left(self) -> tuple[list, torch.Tensor]:
        """What lies on the model, and a picture of it."""
        return traces(self.model), probed(self.case, self.model, self.session.dtype)
